"""Beyond the paper: sigmoid attention that is level with softmax in small models.

    python -m experiments small-models --seeds 7 --speech FSDD.tar.gz

The paper's advice was found with models of 10⁸ to 10⁹ parameters. Every candidate is trained on every task with two
seeds, and the one that is least behind softmax on its worst task is chosen, on one half of the held-out samples. It is
then trained with the other seeds and judged on the other half, as are the paper's advice and sigmoid attention with
``normalize``, which is no candidate, and is compared with softmax seed by seed.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments import drawing, intervals, sweep
from experiments.experiment import (
    LANGUAGE,
    Experiment,
    ExperimentError,
    Finding,
    Result,
    Row,
    Scale,
    Setting,
    select,
)
from sigattn.data.dataset import Batch
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes import datasets, find_recipe
from sigattn.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTMAX, ADVICE = "softmax", "sigmoid, the paper's advice"
PER_HEAD: dict[str, Any] = {"attention_bias": "log_visible", "learn_bias": "head"}
HYBRID: dict[str, Any] = {"norm_placement": "hybrid_attention"}
CANDIDATES: dict[str, dict[str, Any]] = {
    ADVICE: {},
    "sigmoid, b = c + a log n learned": PER_HEAD,
    "sigmoid, hybrid-norm": HYBRID,
    "sigmoid, hybrid-norm, b = c + a log n learned": {**PER_HEAD, **HYBRID},
    "sigmoid, b = c + a log n and t learned": {**PER_HEAD, "temperature": 1.0},
}
NORMALIZED: dict[str, dict[str, Any]] = {"normalized, -log n - 6": {"normalize": True}}
SOFTMAX_OF_NORMALIZED = "softmax, device of normalized"  # stored runs, where the others are of another device
SOFTMAXES = SOFTMAX, SOFTMAX_OF_NORMALIZED
CHOOSING, JUDGING = "choosing", "judging"
MOST_TO_CHOOSE = 2  # seeds


@dataclass(frozen=True)
class SmallTask:
    """Task of a comparison.

    Attributes:
        recipe: name of the recipe. steps, batch_size: at the small scale.
        metric: metric of the recipe's task. label: the metric in words. sign: 1 if less is better, -1 if more is.
        tolerance: the largest difference from softmax that does not matter. guess: the metric of a model that diverged.
        changes: changed fields of the model, for softmax and sigmoid alike.
    """

    recipe: str
    steps: int
    batch_size: int
    metric: str
    label: str
    tolerance: float
    guess: float
    changes: dict[str, Any]
    sign: int = 1

    def shortened(self, setting: Setting) -> Recipe:
        """Return the recipe for a scale."""
        recipe = find_recipe(self.recipe).with_transformer(**self.changes)
        return sweep.shortened(recipe, setting.steps(2, self.steps), setting.scaled(4, self.batch_size, None))

    def judge(
        self, claim: str, variant: str, softmax: Sequence[float], sigmoid: Sequence[float], *, paired: bool = False
    ) -> Finding:
        """Return the finding that sigmoid attention is at least level with softmax, by the metrics of their seeds."""
        behind = (intervals.paired if paired else intervals.welch)(softmax, sigmoid)
        behind = behind if self.sign > 0 else -behind
        return Finding(
            claim,
            behind.verdict_not_above(self.tolerance),
            f"{variant}: behind softmax by {behind} {self.label}, tolerance {self.tolerance:g}",
        )


TASKS = {
    "language": SmallTask("lm-1b-2k-tiny", 1200, 16, "bits", "bits per byte", 0.02, 8.0, {"max_seq_len": 256}),
    "vision": SmallTask("vit-supervised-tiny", 400, 128, "top1", "top-1", 0.03, 0.1, {}, -1),
    "speech": SmallTask("asr-ls960-tiny", 400, 20, "cer", "CER %", 4.0, 100.0, {"position": "rope"}),
}


def search(setting: Setting) -> Result:
    """Train every variant with few seeds, choose one, and train it, the paper's advice and softmax with the others.

    ``NORMALIZED`` is trained with all seeds.

    Raises:
        ExperimentError: at the paper's scale, or with one seed.
    """
    if setting.scale == "paper":
        raise ExperimentError("small-models is about models that are smaller than the paper's: it has no such scale")
    if setting.seeds < 2:
        raise ExperimentError("small-models chooses with some seeds and judges with the others: pass --seeds 7, not 1")
    tasks = {name: task for name, task in TASKS.items() if name != "speech" or setting.speech is not None}
    candidates = dict(list(CANDIDATES.items())[: setting.scaled(2, None, None)])
    first = min(MOST_TO_CHOOSE, setting.seeds - 1)
    variants = candidates | NORMALIZED
    data = [row for name in tasks for row in _train_candidates(setting, name, variants, range(first))]
    chosen = choose(data)
    setting.log(f"chosen: {chosen}")
    finalists = {name: variants[name] for name in dict.fromkeys((ADVICE, chosen, *NORMALIZED))}
    others = range(first, setting.seeds)
    data += [row for name in tasks for row in _train_candidates(setting, name, finalists, others)]
    columns = {
        f"{n}: {t.label}, {use}": {"task": n, "use": use} for n, t in tasks.items() for use in (CHOOSING, JUDGING)
    }
    return _result(data, columns, tasks)


def _train_candidates(setting: Setting, name: str, candidates: dict[str, dict[str, Any]], seeds: range) -> list[Row]:
    """Train softmax and the candidates; return the metric on the held-out samples for these seeds."""
    task = TASKS[name]
    recipe = task.shortened(setting)
    recipes = {f"{name}, {n}": recipe.with_transformer(**changes) for n, changes in candidates.items()}
    recipes[f"{name}, {SOFTMAX}"] = recipe.softmax()
    use = JUDGING if seeds.start else CHOOSING
    batches = _held_out(setting, recipe, int(use == JUDGING))
    rows = []
    trained = sweep.train_variants(replace(setting, seeds=seeds.stop), recipes, may_diverge=True)
    for variant, outcomes in trained.items():
        for outcome in outcomes[seeds.start :]:
            value = task.guess
            if not outcome.diverged:
                with torch.no_grad():
                    value = recipe.task.evaluate(outcome.load_model(), batches)[task.metric]
            row = {"task": name, "variant": variant.removeprefix(f"{name}, "), "use": use, "seed": outcome.seed}
            rows.append({**row, "value": value})
    return rows


def _held_out(setting: Setting, recipe: Recipe, half: int) -> list[Batch]:
    """Return every other held-out sample, in batches."""
    if isinstance(recipe.model, SpeechModelConfig):
        path: Path | None = sweep.recordings_path(setting)
    else:
        path = setting.data if isinstance(recipe.model, LanguageModelConfig) else None
    batches = datasets.load_dataset(recipe, path, tokenizer=setting.tokenizer).validation(32)
    return [tuple(t[half::2] for t in batch) for batch in batches if len(batch[0]) > half]


def choose(data: Sequence[Row]) -> str:
    """Return the candidate that is least behind softmax on its worst task, in units of the task's tolerance."""

    def behind(task: str, name: str) -> float:
        softmax, sigmoid = (
            statistics.mean(select(data, "value", task=task, variant=n, use=CHOOSING)) for n in (SOFTMAX, name)
        )
        return TASKS[task].sign * (sigmoid - softmax) / TASKS[task].tolerance

    tasks, variants = (list(dict.fromkeys(row[key] for row in data)) for key in ("task", "variant"))
    return min((v for v in variants if v in CANDIDATES), key=lambda name: max(behind(task, name) for task in tasks))


def judge_search(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the paper's advice, the chosen candidate and normalized sigmoid with softmax, on each task."""
    findings, tasks = [], list(dict.fromkeys(row["task"] for row in data))
    texts = {choose(data): "The chosen recipe", ADVICE: "The paper's advice"}  # one text, if they are the same
    for variant, text in (texts | dict.fromkeys(NORMALIZED, "Normalized sigmoid")).items():
        for name in tasks:
            of = {v: select(data, "value", task=name, variant=v, use=JUDGING) for v in (*SOFTMAXES, variant)}
            if of[variant]:
                paired = variant in NORMALIZED
                softmax = (paired and of[SOFTMAX_OF_NORMALIZED]) or of[SOFTMAX]
                claim = f"{text} is at least level with softmax: {name}."
                findings.append(TASKS[name].judge(claim, variant, softmax, of[variant], paired=paired))
    return findings


def _result(data: list[Row], columns: dict[str, dict[str, str]], tasks: dict[str, SmallTask]) -> Result:
    """Return the table of means, a row for each variant, and a plot of all values.

    Args:
        columns: the rows of data that a column is about, by its title.
    """
    variants = list(dict.fromkeys(row["variant"] for row in data))
    cells = {v: [select(data, "value", variant=v, **where) for where in columns.values()] for v in variants}
    rows = [(v, *(intervals.mean_std(values) if values else "" for values in by_task)) for v, by_task in cells.items()]
    return Result(("variant", *columns), rows, data, _draw(data, variants, tasks))


def _draw(data: Sequence[Row], variants: Sequence[str], tasks: dict[str, SmallTask]) -> Figure:
    """Plot the value of each seed, of those that judge if a variant has any, in a panel for each task."""
    judging = [row for row in data if row.get("use") == JUDGING]
    columns = min(len(tasks), 3)
    labels = {variant: textwrap.fill(variant, 24) for variant in variants}
    height = 1.2 + 0.2 * sum(label.count("\n") + 1 for label in labels.values())
    figure, axes = drawing.axes_grid(columns, math.ceil(len(tasks) / columns), width=3.4, height=height)
    for i, (axis, (name, task)) in enumerate(zip(axes, tasks.items(), strict=False)):
        values = {
            variant: select(judging, "value", task=name, variant=variant)
            or select(data, "value", task=name, variant=variant)
            for variant in variants
        }
        drawing.plot_seeds(axis, {labels[variant]: of_variant or [math.nan] for variant, of_variant in values.items()})
        axis.set_title(textwrap.fill(name, 24), fontsize=10)
        axis.set_xlabel(task.label)
        axis.tick_params(labelleft=i % columns == 0)
        axis.locator_params(axis="x", nbins=4)
    for axis in axes[len(tasks) :]:
        axis.set_visible(False)
    return figure


EXPERIMENTS = (
    Experiment(
        "small-models",
        "Beyond the paper: settings of sigmoid attention for small models",
        "App. Practitioner's Guide",
        search,
        judge_search,
        {"smoke": 0.3, "small": 40.0, "paper": None},
        "none: it is about small models",
        "2 layers of 64; CPython's documentation, handwritten and spoken digits; 400 to 1,200 steps",
        takes=(*LANGUAGE, "speech"),
        kind="beyond",
    ),
)
