"""Comparison of sigmoid and softmax attention on the tiny form of every task, five seeds each, in one table.

    python -m experiments compare --speech FSDD.tar.gz        (or: make train-all SPEECH=FSDD.tar.gz)

Hardware: 2 CPU cores. Time: about an hour. Expected: each pair within the noise of its seeds, or explained in
docs/results.md. The speech rows need the Free Spoken Digit Dataset (a folder, or its .tar.gz) and are left out without
it. Finished runs are not repeated, so that the command can be stopped and started again.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import intervals
from sigattn.data.digits import Digits
from sigattn.data.text import TextData, TokenText
from sigattn.demo import report
from sigattn.files import Kind, read_json_object
from sigattn.models import saving
from sigattn.models.vision import ViT
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.train import loop, metrics, workers
from sigattn.train.identity import identity_hash
from sigattn.train.probe import extract_features, fine_tune, linear_probe
from sigattn.train.run_cache import load_result, prepared_folder, store_result
from sigattn.validation import SettingsError, check_at_least

ACTIVATIONS = ("softmax", "sigmoid")


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
    changes: tuple[tuple[str, Any], ...] = ()
    needs: str = ""


ENTRIES = (
    Entry("language, CPython's documentation: bits per byte", "lm-1b-2k-tiny", "bits"),
    Entry("language, CPython's sources: bits per byte", "lm-1b-2k-tiny", "bits", needs="sources"),
    Entry("digits, supervised: top-1", "vit-supervised-tiny", "top1"),
    Entry("digits, SimCLR and linear probe: top-1", "vit-simclr-tiny", "probe"),
    Entry("digits, BYOL and linear probe: top-1", "vit-byol-tiny", "probe"),
    Entry("digits, MAE and fine-tuning: top-1", "vit-mae-tiny", "fine-tune"),
    Entry("spoken digits, CTC with RoPE: WER %", "asr-ls960-tiny", "wer", (("position", "rope"),), "speech"),
    Entry("spoken digits, CTC with ALiBi: WER %", "asr-ls960-tiny", "wer", (("position", "alibi"),), "speech"),
    Entry("spoken digits, CTC with CAPE: WER %", "asr-ls960-tiny", "wer", (("position", "cape"),), "speech"),
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
    """

    folder: Path = Path("runs/compare")
    speech: Path | None = None
    seeds: int = 5
    steps: int | None = None
    workers: int = 2
    only: str = ""

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


RESULT: dict[str, Kind] = {  # keys of a run's result.json
    "entry": str,
    "activation": str,
    "value": (int, float),
    "gradient_spikes": int,
    "loss_spikes": int,
    "first_attention_norm": (int, float),
    "last_attention_norm": (int, float),
    "steps_per_second": (int, float),
}


@dataclass(frozen=True)
class Run:
    """Training run of the comparison; sigmoid attention or its softmax twin.

    Attributes:
        config: settings of the comparison. entry: row of the table. activation: "softmax" or "sigmoid". seed: the seed.
    """

    config: ComparisonConfig
    entry: Entry
    activation: str
    seed: int

    @property
    def recipe(self) -> Recipe:
        """Recipe of the entry with its changes, the seed and the configured steps."""
        recipe = find_recipe(self.entry.recipe).with_transformer(**dict(self.entry.changes))
        recipe = recipe if self.activation == "sigmoid" else recipe.softmax()
        steps = self.config.steps
        changes = {} if steps is None else {"max_steps": steps, "warmup_steps": steps // 10}
        return recipe.with_training(seed=self.seed, **changes)

    @property
    def folder(self) -> Path:
        """Folder of metrics, model and result."""
        name = "".join(c if c.isalnum() else "-" for c in self.entry.title.partition(":")[0])
        return self.config.folder / name / f"{self.activation}-{self.seed}"

    @property
    def result_file(self) -> Path:
        """File of the result."""
        return self.folder / "result.json"

    def load_data(self) -> Any:
        """Load the training data."""
        recipe = self.recipe
        if self.entry.needs == "sources":
            context: int = recipe.model.max_seq_len  # type: ignore[union-attr]
            library = Path(sysconfig.get_paths()["stdlib"])
            sources = b"\n".join(f.read_bytes() for f in sorted(library.glob("*.py")))
            return TextData(TokenText.split(sources, context), context)
        return datasets.load_dataset(recipe, self.config.speech if self.entry.needs == "speech" else None)

    def identity(self, fingerprint: str) -> str:
        """Return the identity of the run on data with this fingerprint."""
        recipe = self.recipe
        return identity_hash(recipe.task, recipe.model, recipe.training, fingerprint, measure=self.entry.measure)

    def train(self, identity: str) -> dict[str, Any]:
        """Train and evaluate the model; return and store the result."""
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", ".*Ramapuram")
        recipe = self.recipe
        with prepared_folder(self.folder, identity):
            data = self.load_data()
            loop.train(recipe.task, recipe.model, recipe.training, data, self.folder, resume=True)
            rows = metrics.read_metrics(self.folder / "metrics.jsonl")
            speed = statistics.median(r["samples_per_second"] for r in rows) / recipe.training.batch_size
            result = {
                "entry": self.entry.title,
                "activation": self.activation,
                "seed": self.seed,
                "steps": len(rows),
                "value": self._value(rows[-1]),
                "measure": self.entry.measure,
                "gradient_spikes": metrics.count_spikes([r["gradient_norm"] for r in rows], 3.0),
                "loss_spikes": metrics.count_spikes([r["loss"] for r in rows], 1.2),
                "first_attention_norm": rows[0]["attention_norm"],
                "last_attention_norm": statistics.mean(r["attention_norm"] for r in rows[-20:]),
                "steps_per_second": speed,
                "data": data.fingerprint,
            }
            store_result(self.result_file, identity, result)
        return result

    def _value(self, last: dict[str, Any]) -> float:
        measure = self.entry.measure
        if measure not in ("probe", "fine-tune"):
            return float(last[f"validation_{measure}"])
        backbone = saving.load(self.folder / "model")
        assert isinstance(backbone, ViT)
        training, held_out = Digits(strength=0.0).train_and_held_out()
        if measure == "fine-tune":
            return fine_tune(backbone, training, held_out)
        return linear_probe(extract_features(backbone, [training]), extract_features(backbone, [held_out]))


def compare_activations(config: ComparisonConfig, show: Callable[[str], None]) -> str:
    """Train all models that are not finished with these settings and data, and return the table as Markdown.

    Writes table.md and results.json into ``config.folder``; ``show`` is called with one line per finished run.
    """
    fingerprints = {e: Run(config, e, "sigmoid", 0).load_data().fingerprint for e in config.entries}
    runs = [Run(config, e, a, s) for e in config.entries for s in range(config.seeds) for a in ACTIVATIONS]
    identities = {run: run.identity(fingerprints[run.entry]) for run in runs}
    todo = [run for run in runs if load_result(run.result_file, identities[run]) is None]
    calls = {run: partial(run.train, identities[run]) for run in todo}
    for i, (run, result) in enumerate(workers.run_in_workers(calls, config.workers), 1):
        show(f"{i} of {len(todo)}: {run.entry.title}, {run.activation}, seed {run.seed}: {result['value']:.4g}")
    results = [read_json_object(run.result_file, **RESULT) for run in runs]
    table = comparison_table(results) + "\n" + describe_data(config, fingerprints)
    (config.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (config.folder / "table.md").write_text(table)
    return table


def describe_data(config: ComparisonConfig, fingerprints: dict[Entry, str]) -> str:
    """Return seeds, steps and data sets with their fingerprints as one line of Markdown."""
    names = {"speech": str(config.speech), "sources": "the standard library's *.py files"}
    data = {names.get(e.needs, find_recipe(e.recipe).data.name): fingerprint for e, fingerprint in fingerprints.items()}
    steps = "each recipe's own steps" if config.steps is None else f"{config.steps} steps"
    return f"{config.seeds} seeds, {steps}. Data: " + "; ".join(f"{n} ({f})" for n, f in data.items()) + ".\n"


def comparison_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table: mean ± standard deviation over seeds, and the difference with its 95 % interval (Welch)."""
    measured = ("spikes: gradient, loss", "attention norm, first → last", "steps/s")

    def means(key: str, runs: Sequence[dict[str, Any]], digits: str = ",.3g") -> str:
        return format(statistics.mean(r[key] for r in runs), digits)

    rows = []
    for title in dict.fromkeys(r["entry"] for r in results):
        pair = [[r for r in results if (r["entry"], r["activation"]) == (title, a)] for a in ACTIVATIONS]
        values = [[r["value"] for r in runs] for runs in pair]
        spikes = (f"{means('gradient_spikes', runs)}, {means('loss_spikes', runs)}" for runs in pair)
        norms = (f"{means('first_attention_norm', runs)} → {means('last_attention_norm', runs)}" for runs in pair)
        speeds = (means("steps_per_second", runs, ".3g") for runs in pair)
        cells = (title, *(intervals.mean_std(v) for v in values), describe_difference(*values))
        rows.append((*cells, *(" / ".join(both) for both in (spikes, norms, speeds))))
    return report.markdown_table(("", *ACTIVATIONS, "sigmoid - softmax", *measured), rows) + "\n"


def describe_difference(first: Sequence[float], second: Sequence[float]) -> str:
    """Format mean(second) - mean(first) with its 95 % interval, and a star if the interval excludes 0."""
    difference = intervals.welch(first, second)
    if not difference.margin:  # all seeds gave the same value: there is no interval
        return f"{difference.delta:+.3g}"
    return str(difference) + ("" if abs(difference.delta) <= difference.margin else " *")
