"""Comparison of sigmoid and softmax attention on the tiny form of every task, five seeds each, in one table.

    python -m experiments compare --speech FSDD.tar.gz        (or: make train-all SPEECH=FSDD.tar.gz)

Hardware: 2 CPU cores. Time: about an hour. Expected: each pair within the noise of its seeds, or explained in
docs/results.md. The speech rows need the Free Spoken Digit Dataset (a folder, or its .tar.gz) and are left out without
it. Finished runs are not repeated, so that the command can be stopped and started again. ``--normalize`` compares
sigmoid attention whose weights sum to one.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments import cache, intervals, sweep
from experiments.experiment import Row, Setting
from experiments.pages import markdown_table
from sigattn.data.dataset import Batch
from sigattn.data.images import Digits
from sigattn.models.vision import ViT
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe
from sigattn.train import metrics
from sigattn.train.probe import extract_features, linear_probe
from sigattn.validation import SettingsError, check_at_least

SOURCES = "the standard library's *.py files"


@dataclass(frozen=True)
class Entry:
    """Row of the table.

    Attributes:
        title: task and measure.
        recipe: name of the recipe.
        measure: a metric of the task, "probe" or "fine-tune".
        changes: changed fields of the transformer's configuration.
        needs: "speech" for recordings, "sources" for CPython's sources, or "" for the recipe's own data.
    """

    title: str
    recipe: str
    measure: str
    changes: dict[str, Any] = field(default_factory=dict)
    needs: str = ""


ENTRIES = (
    Entry("language, CPython's documentation: bits per byte", "lm-1b-2k-tiny", "bits"),
    Entry("language, CPython's sources: bits per byte", "lm-1b-2k-tiny", "bits", needs="sources"),
    Entry("digits, supervised: top-1", "vit-supervised-tiny", "top1"),
    Entry("digits, SimCLR and linear probe: top-1", "vit-simclr-tiny", "probe"),
    Entry("digits, BYOL and linear probe: top-1", "vit-byol-tiny", "probe"),
    Entry("digits, MAE and fine-tuning: top-1", "vit-mae-tiny", "fine-tune"),
    Entry("spoken digits, CTC with RoPE: WER %", "asr-ls960-tiny", "wer", {"position": "rope"}, "speech"),
    Entry("spoken digits, CTC with ALiBi: WER %", "asr-ls960-tiny", "wer", {"position": "alibi"}, "speech"),
    Entry("spoken digits, CTC with CAPE: WER %", "asr-ls960-tiny", "wer", {"position": "cape"}, "speech"),
)


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """Settings of the comparison.

    Attributes:
        folder: folder of the runs and the table.
        speech: the Free Spoken Digit Dataset, a folder or its .tar.gz; None leaves out the rows that need it.
        seeds: number of runs of each model.
        steps: steps of each run; None for the recipe's own.
        workers: number of parallel runs, with one thread each.
        only: restrict the table to rows whose title contains this text.
        normalize: divide sigmoid's weights by the sum of each row.
    """

    folder: Path = Path("runs/compare")
    speech: Path | None = None
    seeds: int = 5
    steps: int | None = None
    workers: int = 2
    only: str = ""
    normalize: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, self, "seeds", "steps", "workers")
        if not any(self.only in entry.title for entry in ENTRIES):
            titles = "; ".join(entry.title for entry in ENTRIES)
            raise SettingsError(f"only={self.only!r} is in the title of no row; the titles are {titles}")
        if not self.entries:
            raise SettingsError("all selected rows need recordings of spoken digits", "speech")

    @property
    def entries(self) -> list[Entry]:
        """Selected rows for which there is data."""
        return [e for e in ENTRIES if self.only in e.title and (self.speech or e.needs != "speech")]


def compare_activations(config: ComparisonConfig, show: Callable[[str], None]) -> str:
    """Train all models that are not finished with these settings and data, and return the table as Markdown.

    Writes table.md and results.json, or normalize.json, into ``config.folder``; ``show`` is called with a line for each
    finished run.
    """
    sigmoid = "normalized" if config.normalize else "sigmoid"
    rows: list[Row] = []
    fingerprints: dict[str, str] = {}
    for entry in config.entries:
        name = "".join(c if c.isalnum() else "-" for c in entry.title.partition(":")[0])
        data = _sources_file(config.folder) if entry.needs == "sources" else None
        setting = Setting(
            "small", config.seeds, config.folder / name, show, config.workers, data=data, speech=config.speech
        )
        recipe = _recipe(entry, config)
        outcomes = sweep.train_variants(setting, {"softmax": recipe.softmax(), sigmoid: recipe})
        fingerprints |= {SOURCES if source == str(data) else source: f for source, f in setting.fingerprints.items()}
        for i in range(config.seeds):
            rows += [_result(entry, a, outcomes[a][i], recipe.training.batch_size) for a in ("softmax", sigmoid)]
    steps = "each recipe's own steps" if config.steps is None else f"{config.steps} steps"
    sources = "; ".join(f"{source} ({fingerprint})" for source, fingerprint in fingerprints.items())
    table = f"{comparison_table(rows)}\n{config.seeds} seeds, {steps}. Data: {sources}.\n"
    file = config.folder / ("normalize.json" if config.normalize else "results.json")
    file.write_text(json.dumps(rows, indent=1) + "\n")
    (config.folder / "table.md").write_text(table)
    return table


def _recipe(entry: Entry, config: ComparisonConfig) -> Recipe:
    recipe = find_recipe(entry.recipe).with_transformer(**entry.changes, normalize=config.normalize)
    steps = config.steps
    return recipe if steps is None else recipe.with_training(max_steps=steps, warmup_steps=steps // 10)


def _sources_file(folder: Path) -> Path:
    """Write the standard library's modules into a file, and return its path."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    path = folder / "sources.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(module.read_bytes() for module in modules))
    return path


def _result(entry: Entry, activation: str, outcome: sweep.Outcome, batch_size: int) -> Row:
    rows = outcome.rows
    return {
        "entry": entry.title,
        "activation": activation,
        "seed": outcome.seed,
        "steps": len(rows),
        "value": _value(entry.measure, outcome),
        "measure": entry.measure,
        "gradient_spikes": metrics.count_spikes([r["gradient_norm"] for r in rows], 3.0),
        "loss_spikes": metrics.count_spikes([r["loss"] for r in rows], 1.2),
        "first_attention_norm": rows[0]["attention_norm"],
        "last_attention_norm": statistics.mean(r["attention_norm"] for r in rows[-20:]),
        "steps_per_second": statistics.median(r["samples_per_second"] for r in rows) / batch_size,
    }


def _value(measure: str, outcome: sweep.Outcome) -> float:
    if measure in outcome.final:
        return outcome.final[measure]
    # the folder, and the file with it, is emptied before another run
    job = cache.Job(outcome.folder / "evaluated.json", {"measure": measure}, partial(_evaluate, measure, outcome))
    return float(job.run())


def _evaluate(measure: str, outcome: sweep.Outcome) -> float:
    """Return the top-1 accuracy of a trained backbone, by a linear probe or fine-tuned."""
    backbone = outcome.load_model()
    training, held_out = Digits().train_and_held_out()
    if measure == "fine-tune":
        return fine_tune(backbone, training, held_out)
    return linear_probe(extract_features(backbone, [training]), extract_features(backbone, [held_out]))


def fine_tune(backbone: ViT, training: Batch, held_out: Batch) -> float:
    """Return the top-1 accuracy in 0 … 1 after fine-tuning the backbone and a new linear classifier with AdamW.

    The backbone is changed in place and left in evaluation mode.
    """
    epochs, batch_size, learning_rate = 20, 128, 1e-3
    torch.manual_seed(0)
    images, labels = training
    classes = int(max(labels.max(), held_out[1].max())) + 1
    model = nn.ModuleDict({"backbone": backbone, "output": nn.Linear(backbone.config.embed_dim, classes)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    steps = epochs * -(-len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    backbone.train()
    for _ in range(epochs):
        for index in torch.randperm(len(images)).split(batch_size):
            loss = F.cross_entropy(model["output"](backbone.features(images[index])), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    backbone.eval()
    with torch.no_grad():
        return (model["output"](backbone.features(held_out[0])).argmax(-1) == held_out[1]).double().mean().item()


def comparison_table(results: Sequence[Row]) -> str:
    """Return the table: mean ± standard deviation over seeds, and the difference with its 95 % interval (Welch)."""
    measured = ("spikes: gradient, loss", "attention norm, first → last", "steps/s")

    def means(key: str, runs: Sequence[Row], digits: str = ",.3g") -> str:
        return format(statistics.mean(r[key] for r in runs), digits)

    rows = []
    activations = list(dict.fromkeys(r["activation"] for r in results))
    for title in dict.fromkeys(r["entry"] for r in results):
        pair = [[r for r in results if (r["entry"], r["activation"]) == (title, a)] for a in activations]
        values = [[r["value"] for r in runs] for runs in pair]
        spikes = (f"{means('gradient_spikes', runs)}, {means('loss_spikes', runs)}" for runs in pair)
        norms = (f"{means('first_attention_norm', runs)} → {means('last_attention_norm', runs)}" for runs in pair)
        speeds = (means("steps_per_second", runs, ".3g") for runs in pair)
        cells = (title, *(intervals.mean_std(v) for v in values), describe_difference(*values))
        rows.append((*cells, *(" / ".join(both) for both in (spikes, norms, speeds))))
    return markdown_table(("", *activations, f"{activations[1]} - softmax", *measured), rows) + "\n"


def describe_difference(first: Sequence[float], second: Sequence[float]) -> str:
    """Format mean(second) - mean(first) with its 95 % interval, and a star if the interval excludes 0."""
    difference = intervals.welch(first, second)
    if not difference.margin:  # all seeds gave the same value: there is no interval
        return f"{difference.delta:+.3g}"
    return str(difference) + ("" if abs(difference.delta) <= difference.margin else " *")
