"""Which settings of sigmoid attention are level with softmax in small models, over several tasks.

    python -m experiments small-models --seeds 7 --speech FSDD.tar.gz

The paper's advice was found with models of 10⁸ to 10⁹ parameters. Every candidate is trained on every task with two
seeds, and the one that is least behind softmax on its worst task is chosen, on one half of the held-out samples. It is
then trained with the other seeds and judged on the other half, as is the paper's advice. It was the bias of the query,
which in language starts better at -log of the sum of ALiBi's weights: ``small-models-transfer``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments import intervals, sweep
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
from sigattn.demo import drawing
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTMAX, ADVICE = "softmax", "sigmoid, the paper's advice"
PER_HEAD: dict[str, Any] = {"attention_bias": "log_visible", "learn_bias": "head"}
PER_QUERY: dict[str, Any] = {"attention_bias": "log_visible", "learn_bias": "quadratic"}
HYBRID: dict[str, Any] = {"norm_placement": "hybrid_attention"}
CANDIDATES: dict[str, dict[str, Any]] = {
    ADVICE: {},
    "sigmoid, b = c + a log n learned": PER_HEAD,
    "sigmoid, b of the query learned": PER_QUERY,
    "sigmoid, hybrid-norm": HYBRID,
    "sigmoid, hybrid-norm, b = c + a log n learned": {**PER_HEAD, **HYBRID},
    "sigmoid, hybrid-norm, b of the query learned": {**PER_QUERY, **HYBRID},
    "sigmoid, b = c + a log n and t learned": {**PER_HEAD, "temperature": 1.0},
}
CHOOSING, JUDGING = "choosing", "judging"
MOST_TO_CHOOSE = 2  # seeds


@dataclass(frozen=True)
class SmallTask:
    """Task of the comparison.

    Attributes:
        recipe: name of the recipe. steps, batch_size: at the small scale.
        metric: metric of the task. sign: 1 if less is better, -1 if more is. label: the metric in words.
        tolerance: the largest difference from softmax that does not matter. guess: the metric of a model that diverged.
        changes: changed fields of the model, for softmax and sigmoid alike.
    """

    recipe: str
    steps: int
    batch_size: int
    metric: str
    sign: int
    label: str
    tolerance: float
    guess: float
    changes: dict[str, Any]


TASKS = {
    "language": SmallTask("lm-1b-2k-tiny", 1200, 16, "bits", 1, "bits per byte", 0.02, 8.0, {"max_seq_len": 256}),
    "vision": SmallTask("vit-supervised-tiny", 400, 128, "top1", -1, "top-1", 0.03, 0.1, {}),
    "speech": SmallTask("asr-ls960-tiny", 400, 20, "cer", 1, "CER %", 4.0, 100.0, {"position": "rope"}),
}


def search(setting: Setting) -> Result:
    """Train all candidates with few seeds, choose one, and train it, the paper's advice and softmax with the others.

    Raises:
        ExperimentError: at the paper's scale, or with one seed.
    """
    if setting.scale == "paper":
        raise ExperimentError("small-models is about models that are smaller than the paper's: it has no such scale")
    if setting.seeds < 2:
        raise ExperimentError("small-models chooses with some seeds and judges with the others: pass --seeds 7, not 1")
    tasks = {n: p for n, p in TASKS.items() if n != "speech" or setting.speech is not None or setting.scale == "smoke"}
    candidates = dict(list(CANDIDATES.items())[: setting.scaled(2, None, None)])
    first = min(MOST_TO_CHOOSE, setting.seeds - 1)
    data = [row for name, p in tasks.items() for row in _train(setting, name, p, candidates, range(first))]
    chosen = choose(data)
    setting.log(f"chosen: {chosen}")
    finalists = {name: candidates[name] for name in dict.fromkeys((ADVICE, chosen))}
    others = range(first, setting.seeds)
    data += [row for name, p in tasks.items() for row in _train(setting, name, p, finalists, others)]
    columns = ("variant", *(f"{n}: {p.label}, {use}" for n, p in tasks.items() for use in (CHOOSING, JUDGING)))
    return Result(columns, _table(data, tasks), data, _draw(data, tasks))


def _train(
    setting: Setting, name: str, task: SmallTask, candidates: dict[str, dict[str, Any]], seeds: range
) -> list[Row]:
    """Train softmax and the candidates; return the metric on the held-out samples for these seeds."""
    recipe = find_recipe(task.recipe).with_transformer(**task.changes)
    recipe = sweep.shortened(recipe, setting.steps(4, task.steps), setting.scaled(4, task.batch_size, None))
    recipes = {f"{name}, {n}": recipe.with_transformer(**changes) for n, changes in candidates.items()}
    recipes[f"{name}, {SOFTMAX}"] = recipe.softmax()
    use = JUDGING if seeds.start else CHOOSING
    batches = _held_out(setting, recipe, int(use == JUDGING))
    rows = []
    found = sweep.train_variants(replace(setting, seeds=seeds.stop), recipes, may_diverge=True)
    for variant, outcomes in found.items():
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
        soft, own = (
            statistics.mean(select(data, "value", task=task, variant=n, use=CHOOSING)) for n in (SOFTMAX, name)
        )
        return TASKS[task].sign * (own - soft) / TASKS[task].tolerance

    tasks, names = (list(dict.fromkeys(row[key] for row in data)) for key in ("task", "variant"))
    return min((n for n in names if n != SOFTMAX), key=lambda name: max(behind(task, name) for task in tasks))


def judge(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the chosen candidate and the paper's advice with softmax, on each task."""
    findings = []
    texts = {ADVICE: "The paper's advice", choose(data): "The chosen recipe"}  # one text, if they are the same
    for name, text in texts.items():
        for task_name in dict.fromkeys(row["task"] for row in data):
            task = TASKS[task_name]
            soft, own = (select(data, "value", task=task_name, variant=n, use=JUDGING) for n in (SOFTMAX, name))
            difference = intervals.welch(soft, own)
            difference = difference if task.sign > 0 else -difference
            findings.append(
                Finding(
                    f"{text} is at least level with softmax: {task_name}.",
                    difference.verdict_not_above(task.tolerance),
                    f"{name}: behind softmax by {difference} {task.label}, tolerance {task.tolerance:g}",
                )
            )
    return findings


def _table(data: Sequence[Row], tasks: dict[str, SmallTask]) -> list[tuple[str, ...]]:
    """Return a row of means for each variant; those that were not chosen have no values to judge by."""
    rows = []
    for variant in dict.fromkeys(row["variant"] for row in data):
        found = [select(data, "value", task=t, variant=variant, use=u) for t in tasks for u in (CHOOSING, JUDGING)]
        rows.append((variant, *(intervals.mean_std(values) if values else "" for values in found)))
    return rows


def _draw(data: Sequence[Row], tasks: dict[str, SmallTask]) -> Figure:
    """Plot each seed's value: rings of the seeds to choose by, dots of those to judge by."""
    variants = list(dict.fromkeys(row["variant"] for row in data))
    figure, axes = drawing.axes_grid(len(tasks), width=4.2, height=1.2 + 0.25 * len(variants))
    for axis, (task_name, task) in zip(axes, tasks.items(), strict=True):
        for i, variant in enumerate(variants):
            colour = drawing.COLOUR_OF["softmax" if variant == SOFTMAX else "sigmoid"]
            for use, face in ((CHOOSING, "none"), (JUDGING, colour)):
                values = select(data, "value", task=task_name, variant=variant, use=use)
                axis.plot(values, [i] * len(values), "o", ms=4, mfc=face, mec=colour)
        axis.set(title=task_name, xlabel=task.label, ylim=(len(variants) - 0.5, -0.5))
        axis.set_yticks(range(len(variants)), variants if axis is axes[0] else [""] * len(variants))
    for use, face in ((CHOOSING, "none"), (JUDGING, "#555555")):
        axes[-1].plot([], [], "o", ms=4, mfc=face, mec="#555555", label=f"seeds for {use}")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


EXPERIMENTS = (
    Experiment(
        "small-models",
        "Beyond the paper: settings of sigmoid attention for small models",
        "App. Practitioner's Guide",
        search,
        judge,
        {"smoke": 0.3, "small": 40.0, "paper": None},
        "none: it is about small models",
        "2 layers of 64; CPython's documentation, handwritten and spoken digits; 400 to 1,200 steps",
        takes=(*LANGUAGE, "speech"),
        kind="beyond",
    ),
)
