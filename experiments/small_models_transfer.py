"""The settings of ``recommend(small=True)`` on texts, larger models and sums.

    python -m experiments small-models-transfer --seeds 10 --data tinyshakespeare.txt

Each task trains softmax, and sigmoid with the bias of ``recommend(small=True)``, a function of the query. In language,
where positions are ALiBi's, it starts at -log of the sum of ALiBi's weights of the visible keys. Some tasks also train
the bias that starts at -log of their number: ``small-models`` chose it, and it was the recommendation until the model
of 4 layers of 128 showed it behind softmax.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import modules

from experiments import intervals, sweep
from experiments.experiment import (
    TRAINING,
    Experiment,
    ExperimentError,
    Finding,
    Result,
    Row,
    Scale,
    Setting,
    select,
)
from sigattn.demo import drawing
from sigattn.models.language import LanguageModelConfig
from sigattn.nn.guide import recommend
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.synthetic import KSummation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTMAX, SMALL = "softmax", "sigmoid, recommend(small=True)"
VISIBLE = "sigmoid, b of the query from -log of the visible keys"
VARIANTS = (SOFTMAX, SMALL, VISIBLE)
SOURCE_CODE, GIVEN_TEXT, DOCUMENTATION = "source code", "the given text", "documentation"
LARGER, LARGER_GIVEN = "documentation, 4 layers of 128", "the given text, 4 layers of 128"


@dataclass(frozen=True)
class NewTask:
    """Task of the comparison. Its metric is better the lower it is.

    Attributes:
        recipe: name of the recipe. changes: changed fields of the model, for softmax and sigmoid alike.
        steps, batch_size: at the small scale. metric: metric of the recipe's task. label: the metric in words.
        tolerance: the largest difference from softmax that does not matter.
        learned: softmax's mean metric must be below this, else the task decides nothing.
        guess: the metric of a model that diverged.
        terms: of k-summation; 0 for other problems. The error of a model that always predicts 0 is ``terms``, and the
            metric is divided by it.
        variants: those that are trained.
    """

    recipe: str
    changes: dict[str, Any]
    steps: int
    batch_size: int
    metric: str
    label: str
    tolerance: float
    learned: float
    guess: float
    terms: int = 0
    variants: tuple[str, ...] = (SOFTMAX, SMALL)


_TEXT = NewTask("lm-1b-2k-tiny", {"max_seq_len": 256}, 1200, 16, "bits", "bits per byte", 0.02, 4.0, 8.0)
# small-models has 2 layers of 64
_LARGER = replace(_TEXT, changes={**_TEXT.changes, "num_layers": 4, "embed_dim": 128}, batch_size=4)
_SUM = NewTask("k-summation", {"seq_len": 16}, 1600, 64, "loss", "part of the variance", 0.05, 0.5, 1.0, 1)
TASKS = {
    SOURCE_CODE: replace(_TEXT, variants=VARIANTS),
    GIVEN_TEXT: replace(_TEXT, variants=VARIANTS),
    LARGER: replace(_LARGER, variants=VARIANTS),
    LARGER_GIVEN: _LARGER,
    DOCUMENTATION: _TEXT,
    "k-summation, k = 1": _SUM,
    "k-summation, k = 4": replace(_SUM, terms=4),
}


def measure_new_tasks(setting: Setting) -> Result:
    """Train softmax and the recommended sigmoid attention on every task.

    Raises:
        ExperimentError: at the paper's scale, or at the small scale without ``setting.data``.
    """
    if setting.scale == "paper":
        raise ExperimentError("small-models-transfer is about models smaller than the paper's: it has no such scale")
    if setting.scale == "small" and setting.data is None:
        raise ExperimentError(
            "small-models-transfer needs a text other than CPython's documentation: name it with --data"
        )
    names = setting.scaled((SOURCE_CODE, "k-summation, k = 1"), tuple(TASKS), None)
    setting.check_variants(_run_name(name, variant) for name in names for variant in TASKS[name].variants)
    data = [row for name in names for row in _train(setting, name)]
    columns = ("variant", *(f"{name}: {TASKS[name].label}" for name in names))
    found = [(v, [select(data, "value", task=n, variant=v) for n in names]) for v in VARIANTS]
    rows = [(v, *(intervals.mean_std(values) if values else "" for values in by_task)) for v, by_task in found]
    return Result(columns, rows, data, _draw(data))


def _run_name(task: str, variant: str) -> str:
    return f"{task}, {variant}"


def _train(setting: Setting, name: str) -> list[Row]:
    """Train the variants of a task; return the held-out metric of each seed, after the stored ones."""
    task = TASKS[name]
    recipe = sweep.shortened(recipe_of(task), setting.steps(4, task.steps), setting.scaled(4, task.batch_size, None))
    made = {
        SOFTMAX: recipe.softmax(),
        SMALL: with_small_advice(recipe),
        VISIBLE: recipe.with_transformer(attention_bias="log_visible", learn_bias="quadratic"),
    }
    recipes = {_run_name(name, variant): made[variant] for variant in task.variants}
    given = {GIVEN_TEXT: setting.data, LARGER_GIVEN: setting.data}
    text = Path(modules.__file__).parent if name == SOURCE_CODE else given.get(name)
    more = {run: number for run, number in setting.more_seeds.items() if run in recipes}
    own = replace(setting, data=text, more_seeds=more, fingerprints={})
    outcomes = sweep.train_variants(own, recipes, may_diverge=True)
    for source, fingerprint in own.fingerprints.items():
        described = "torch/nn/modules, as bytes" if name == SOURCE_CODE else name if task.terms else source
        setting.fingerprints[described] = fingerprint
    rows = []
    for variant in task.variants:
        rows += [row for row in setting.stored.rows if (row["task"], row["variant"]) == (name, variant)]
        for outcome in outcomes[_run_name(name, variant)]:
            value = task.guess if outcome.diverged else outcome.final[task.metric] / max(task.terms, 1)
            rows.append({"task": name, "variant": variant, "seed": outcome.seed, "value": value})
    return rows


def recipe_of(task: NewTask) -> Recipe:
    """Return the recipe of a task, with sigmoid attention as the recipe has it."""
    recipe = find_recipe(task.recipe).with_transformer(**task.changes)
    return replace(recipe, task=KSummation(k=task.terms)) if task.terms else recipe


def with_small_advice(recipe: Recipe) -> Recipe:
    """Return the recipe with the bias that ``recommend(small=True)`` has for its positions; sums have vision's."""
    advice = recommend("language" if isinstance(recipe.model, LanguageModelConfig) else "vision", small=True)
    return recipe.with_transformer(attention_bias=advice.attention_bias, learn_bias=advice.learn_bias)


def count_seeds(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of seeds by run of the rows of data."""
    runs = [_run_name(row["task"], row["variant"]) for row in rows]
    return {run: runs.count(run) for run in runs}


def judge(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the recommended sigmoid attention with softmax on each task, and both starts of the bias."""
    findings = []
    for name in dict.fromkeys(row["task"] for row in data):
        task = TASKS[name]
        soft, own = (select(data, "value", task=name, variant=variant) for variant in (SOFTMAX, SMALL))
        behind = intervals.welch(soft, own)
        learned = statistics.mean(soft) < task.learned
        findings.append(
            Finding(
                f"The recipe for small models is at least level with softmax: {name}.",
                behind.verdict_not_above(task.tolerance) if learned else "not shown",
                f"{SMALL}: behind softmax by {behind} {task.label}, tolerance {task.tolerance:g}"
                + ("" if learned else "; softmax has not learned the task"),
            )
        )
    own, visible = (select(data, "value", task=LARGER, variant=variant) for variant in (SMALL, VISIBLE))
    if own and visible:
        gain, tolerance = intervals.welch(own, visible), TASKS[LARGER].tolerance
        findings.append(
            Finding(
                f"With ALiBi the sum of its weights is a better start than the number of visible keys: {LARGER}.",
                gain.verdict_positive(tolerance),
                f"{TASKS[LARGER].label} less: {gain}, tolerance {tolerance:g}",
            )
        )
    return findings


def _draw(data: Sequence[Row]) -> Figure:
    names = list(dict.fromkeys(row["task"] for row in data))
    columns = min(len(names), 4)
    figure, axes = drawing.axes_grid(columns, math.ceil(len(names) / columns), width=3.4, height=2.0)
    for i, (axis, name) in enumerate(zip(axes, names, strict=False)):
        found = {variant: select(data, "value", task=name, variant=variant) for variant in VARIANTS}
        drawing.plot_seeds(axis, {variant: values or [math.nan] for variant, values in found.items()})
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(TASKS[name].label)
        axis.tick_params(labelleft=i % columns == 0)
        axis.locator_params(axis="x", nbins=4)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    return figure


EXPERIMENTS = (
    Experiment(
        "small-models-transfer",
        "Beyond the paper: the settings for small models, on further texts, sizes and sums",
        "App. Practitioner's Guide",
        measure_new_tasks,
        judge,
        {"smoke": 0.3, "small": 45.0, "paper": None},
        "none: it is about small models",
        "1 to 4 layers of 64 to 128; three texts, and sums; 1,200 to 1,600 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
        unequal_seeds=True,
        count_seeds=count_seeds,
    ),
)
