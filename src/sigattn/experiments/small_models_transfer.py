"""The settings that ``small-models`` chose, on texts, sizes and problems that had no part in the choice.

    sigattn reproduce small-models-transfer --seeds 5 --data shakespeare.txt

Each task trains softmax, sigmoid as the task's recipe has it, and sigmoid with the bias of ``recommend(small=True)``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import modules

from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Row, Scale, Setting, select
from sigattn.nn.guide import recommend
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.synthetic import KSummation, PairRepeat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTMAX, ADVICE, SMALL = "softmax", "sigmoid, the paper's advice", "sigmoid, recommend(small=True)"
SOURCE_CODE = Path(modules.__file__).parent


@dataclass(frozen=True)
class NewTask:
    """Task that had no part in choosing the settings.

    Attributes:
        recipe: name of the recipe. steps, batch_size: at the small scale.
        metric: metric of the task. sign: 1 if less is better, -1 if more is. label: the metric in words.
        tolerance: the largest difference from softmax that does not matter.
        learned: softmax's mean metric must be better than this, else the task decides nothing.
        guess: the metric of a model that diverged.
        changes: changed fields of the model, for softmax and sigmoid alike. problem: the recipe's task, if changed.
        log: True to judge the logarithm of the metric.
    """

    recipe: str
    steps: int
    batch_size: int
    metric: str
    sign: int
    label: str
    tolerance: float
    learned: float
    guess: float
    changes: dict[str, Any] = field(default_factory=dict)
    problem: KSummation | PairRepeat | None = None
    log: bool = False


_TEXT = NewTask("lm-1b-2k-tiny", 1200, 16, "bits", 1, "bits per byte", 0.02, 4.0, 8.0, {"max_seq_len": 256})
_LARGER = {**_TEXT.changes, "num_layers": 4, "embed_dim": 128}
_SUM = NewTask(
    "k-summation", 3200, 64, "loss", 1, "log of the squared error", 0.5, math.log(0.5), 1.0, {"seq_len": 16},
    KSummation(k=1), log=True,
)  # fmt: skip
_PAIRS = NewTask(
    "pair-repeat", 4800, 64, "accuracy", -1, "accuracy", 0.05, 0.75, 0.5, {"num_symbols": 5, "seq_len": 12},
    PairRepeat(lengths=(8, 9)),
)  # fmt: skip
GIVEN_TEXT = "the given text"
TASKS = {
    "source code": _TEXT,
    GIVEN_TEXT: _TEXT,
    "documentation, 4 layers of 128": replace(_TEXT, changes=_LARGER),
    "k-summation": _SUM,
    "pair repeat": _PAIRS,
}


def measure_new_tasks(setting: Setting) -> Result:
    """Train softmax, sigmoid as in the recipe and as recommended for small models on every task.

    Raises:
        ExperimentError: at the paper's scale.
    """
    if setting.scale == "paper":
        raise ExperimentError("small-models-transfer is about models smaller than the paper's: it has no such scale")
    names = setting.scaled(("source code", "k-summation"), tuple(TASKS), None)
    tasks = {name: TASKS[name] for name in names if name != GIVEN_TEXT or setting.data is not None}
    data = [row for name, task in tasks.items() for row in _train(setting, name, task)]
    columns = ("variant", *(f"{name}: {task.label}" for name, task in tasks.items()))
    rows = [
        (v, *(intervals.mean_std(select(data, "value", task=name, variant=v)) for name in tasks))
        for v in (SOFTMAX, ADVICE, SMALL)
    ]
    return Result(columns, rows, data, _draw(data))


def _train(setting: Setting, name: str, task: NewTask) -> list[Row]:
    """Train the three variants of a task; return the held-out metric of each seed."""
    recipe = sweep.shortened(recipe_of(task), setting.steps(4, task.steps), setting.scaled(4, task.batch_size, None))
    recipes = {SOFTMAX: recipe.softmax(), ADVICE: recipe, SMALL: with_small_advice(recipe)}
    own = {"source code": SOURCE_CODE, GIVEN_TEXT: setting.data}.get(name)
    local = replace(setting, data=own, fingerprints={})
    named = {f"{name}, {variant}": r for variant, r in recipes.items()}
    outcomes = sweep.train_variants(local, named, may_diverge=True)
    for text, fingerprint in local.fingerprints.items():
        setting.fingerprints["torch/nn/modules, as bytes" if name == "source code" else text] = fingerprint
    rows = []
    for variant in recipes:
        for outcome in outcomes[f"{name}, {variant}"]:
            value = task.guess if outcome.diverged else outcome.final[task.metric]
            value = math.log(value) if task.log else value
            rows.append({"task": name, "variant": variant, "seed": outcome.seed, "value": value})
    return rows


def recipe_of(task: NewTask) -> Recipe:
    """Return the recipe of a task, with sigmoid attention as the recipe has it."""
    recipe = find_recipe(task.recipe).with_transformer(**task.changes)
    return recipe if task.problem is None else replace(recipe, task=task.problem)


def with_small_advice(recipe: Recipe) -> Recipe:
    """Return the recipe with the bias that ``recommend(small=True)`` has for every domain."""
    advice = recommend("language", small=True)
    return recipe.with_transformer(attention_bias=advice.attention_bias, learn_bias=advice.learn_bias)


def judge(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare both kinds of sigmoid attention with softmax on each task."""
    findings = []
    for variant, text in ((ADVICE, "The paper's advice"), (SMALL, "The chosen recipe")):
        for name in dict.fromkeys(row["task"] for row in data):
            task = TASKS[name]
            soft, own = (select(data, "value", task=name, variant=v) for v in (SOFTMAX, variant))
            behind = intervals.welch(soft, own)
            behind = behind if task.sign > 0 else -behind
            learned = task.sign * (statistics.mean(soft) - task.learned) < 0
            note = "" if learned else "; softmax has not learned the task"
            findings.append(
                Finding(
                    f"{text} is at least level with softmax: {name}.",
                    behind.verdict_not_above(task.tolerance) if learned else "not shown",
                    f"{variant}: behind softmax by {behind} {task.label}, tolerance {task.tolerance:g}{note}",
                )
            )
    return findings


def _draw(data: Sequence[Row]) -> Figure:
    """Plot each seed's value."""
    names, variants = (list(dict.fromkeys(row[key] for row in data)) for key in ("task", "variant"))
    figure, axes = drawing.axes_grid(len(names), width=4.2, height=1.9)
    for axis, name in zip(axes, names, strict=True):
        for i, variant in enumerate(variants):
            colour = drawing.COLOUR_OF["softmax" if variant == SOFTMAX else "sigmoid"]
            values = select(data, "value", task=name, variant=variant)
            axis.plot(values, [i] * len(values), "o", ms=4, color=colour)
        axis.set(title=name, xlabel=TASKS[name].label, ylim=(len(variants) - 0.5, -0.5))
        axis.set_yticks(range(len(variants)), variants)
    return figure


EXPERIMENTS = (
    Experiment(
        "small-models-transfer",
        "Beyond the paper: the settings for small models, on tasks that had no part in choosing them",
        'App. "Practitioner\'s Guide"',
        measure_new_tasks,
        judge,
        {"smoke": 0.3, "small": 40.0, "paper": None},
        "none: it is about small models",
        "1 to 4 layers of 64 to 160; 1,200 to 4,800 steps",
        kind="beyond",
    ),
)
