"""Beyond the paper: sigmoid attention that is level with softmax in small models.

    python -m experiments small-models --seeds 7 --speech FSDD.tar.gz
    python -m experiments small-models-transfer --seeds 10 --data tinyshakespeare.txt

The paper's advice was found with models of 10⁸ to 10⁹ parameters. ``small-models`` trains every candidate on every task
with two seeds, and chooses the one that is least behind softmax on its worst task, on one half of the held-out samples.
It is then trained with the other seeds and judged on the other half, as are the paper's advice and sigmoid attention
with ``normalize``, which is no candidate, and is compared with softmax seed by seed. Result: a bias that is a function
of the query.

``small-models-transfer`` compares that bias, as ``recommend(small=True)`` has it, with softmax on further tasks. In
language, where positions are ALiBi's, it starts at -log of the sum of ALiBi's weights of the visible keys. Some tasks
also train the bias that starts at -log of their number, which was the recommendation until the model of 4 layers of 128
showed it behind softmax.
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
from torch.nn import modules

from experiments import drawing, intervals, sweep, synthetic
from experiments.experiment import (
    LANGUAGE,
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
from sigattn.data.dataset import Batch
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.nn.guide import recommend
from sigattn.recipes import datasets, find_recipe
from sigattn.recipes.recipe import Recipe

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
NORMALIZED: dict[str, dict[str, Any]] = {"normalized, -log n - 6": {"normalize": True}}
SOFTMAX_OF_NORMALIZED = "softmax, device of normalized"  # stored runs, where the others are of another device
SOFTMAXES = SOFTMAX, SOFTMAX_OF_NORMALIZED
CHOOSING, JUDGING = "choosing", "judging"
MOST_TO_CHOOSE = 2  # seeds

SMALL, VISIBLE = "sigmoid, recommend(small=True)", "sigmoid, b of the query from -log of the visible keys"
VARIANTS = (SOFTMAX, SMALL, VISIBLE)
SOURCE_CODE, GIVEN_TEXT, DOCUMENTATION = "source code", "the given text", "documentation"
LARGER, LARGER_GIVEN = "documentation, 4 layers of 128", "the given text, 4 layers of 128"


@dataclass(frozen=True)
class SmallTask:
    """Task of a comparison.

    Attributes:
        recipe: name of the recipe. steps, batch_size: at the small scale.
        metric: metric of the recipe's task. label: the metric in words. sign: 1 if less is better, -1 if more is.
        tolerance: the largest difference from softmax that does not matter. guess: the metric of a model that diverged.
        changes: changed fields of the model, for softmax and sigmoid alike.
        learned: softmax's mean metric must be below this, else the task decides nothing.
        terms: of k-summation; 0 for other problems. The error of a model that always predicts 0 is ``terms``, and the
            metric is divided by it.
        variants: those that ``small-models-transfer`` trains.
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
    learned: float = math.inf
    terms: int = 0
    variants: tuple[str, ...] = (SOFTMAX, SMALL)

    @property
    def base(self) -> Recipe:
        """Recipe with sigmoid attention, in full length."""
        recipe = synthetic.k_summation(self.terms) if self.terms else find_recipe(self.recipe)
        return recipe.with_transformer(**self.changes)

    def shortened(self, setting: Setting) -> Recipe:
        """Return the recipe for a scale."""
        return sweep.shortened(self.base, setting.steps(2, self.steps), setting.scaled(4, self.batch_size, None))

    def judge(
        self, claim: str, variant: str, softmax: Sequence[float], sigmoid: Sequence[float], *, paired: bool = False
    ) -> Finding:
        """Return the finding that sigmoid attention is at least level with softmax, by the metrics of their seeds."""
        behind = (intervals.paired if paired else intervals.welch)(softmax, sigmoid)
        behind = behind if self.sign > 0 else -behind
        learned = statistics.mean(softmax) < self.learned
        return Finding(
            claim,
            behind.verdict_not_above(self.tolerance) if learned else "not shown",
            f"{variant}: behind softmax by {behind} {self.label}, tolerance {self.tolerance:g}"
            + ("" if learned else "; softmax has not learned the task"),
        )


_LANGUAGE = SmallTask("lm-1b-2k-tiny", 1200, 16, "bits", "bits per byte", 0.02, 8.0, {"max_seq_len": 256})
TASKS = {
    "language": _LANGUAGE,
    "vision": SmallTask("vit-supervised-tiny", 400, 128, "top1", "top-1", 0.03, 0.1, {}, -1),
    "speech": SmallTask("asr-ls960-tiny", 400, 20, "cer", "CER %", 4.0, 100.0, {"position": "rope"}),
}
_TEXT = replace(_LANGUAGE, learned=4.0)
# the others have 2 layers of 64
_LARGER = replace(_TEXT, changes={**_TEXT.changes, "num_layers": 4, "embed_dim": 128}, batch_size=4)
_SUM = SmallTask("k-summation", 1600, 64, "loss", "part of the variance", 0.05, 1.0, {"seq_len": 16}, 1, 0.5, 1)
NEW_TASKS = {
    SOURCE_CODE: replace(_TEXT, variants=VARIANTS),
    GIVEN_TEXT: replace(_TEXT, variants=VARIANTS),
    LARGER: replace(_LARGER, variants=VARIANTS),
    LARGER_GIVEN: _LARGER,
    DOCUMENTATION: _TEXT,
    "k-summation, k = 1": _SUM,
    "k-summation, k = 4": replace(_SUM, terms=4),
}


def search(setting: Setting) -> Result:
    """Train every variant with few seeds, choose one, and train it, the paper's advice and softmax with the others.

    ``NORMALIZED`` is trained with all seeds.

    Raises:
        ExperimentError: at the paper's scale, or with one seed.
    """
    _check_scale(setting, "small-models")
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
    texts = {ADVICE: "The paper's advice", choose(data): "The chosen recipe"}  # one text, if they are the same
    for variant, text in (texts | dict.fromkeys(NORMALIZED, "Normalized sigmoid")).items():
        for name in tasks:
            of = {v: select(data, "value", task=name, variant=v, use=JUDGING) for v in (*SOFTMAXES, variant)}
            if of[variant]:
                paired = variant in NORMALIZED
                softmax = (paired and of[SOFTMAX_OF_NORMALIZED]) or of[SOFTMAX]
                claim = f"{text} is at least level with softmax: {name}."
                findings.append(TASKS[name].judge(claim, variant, softmax, of[variant], paired=paired))
    return findings


def measure_new_tasks(setting: Setting) -> Result:
    """Train softmax and the recommended sigmoid attention on every task.

    Raises:
        ExperimentError: at the paper's scale, or at the small scale without ``setting.data``.
    """
    _check_scale(setting, "small-models-transfer")
    if setting.scale == "small" and setting.data is None:
        raise ExperimentError(
            "small-models-transfer needs a text other than CPython's documentation: name it with --data"
        )
    names = setting.scaled((SOURCE_CODE, "k-summation, k = 1"), tuple(NEW_TASKS), None)
    setting.check_variants(_run_name(name, variant) for name in names for variant in NEW_TASKS[name].variants)
    data = [row for name in names for row in _train_new_task(setting, name)]
    tasks = {name: NEW_TASKS[name] for name in names}
    return _result(data, {f"{name}: {task.label}": {"task": name} for name, task in tasks.items()}, tasks)


def _run_name(task: str, variant: str) -> str:
    return f"{task}, {variant}"


def _train_new_task(setting: Setting, name: str) -> list[Row]:
    """Train the variants of a task; return the held-out metric of each seed, after the stored ones."""
    task = NEW_TASKS[name]
    recipe = task.shortened(setting)
    by_variant = {
        SOFTMAX: recipe.softmax(),
        SMALL: with_small_advice(recipe),
        VISIBLE: recipe.with_transformer(**PER_QUERY),
    }
    recipes = {_run_name(name, variant): by_variant[variant] for variant in task.variants}
    texts = {SOURCE_CODE: Path(modules.__file__).parent, GIVEN_TEXT: setting.data, LARGER_GIVEN: setting.data}
    more = {run: number for run, number in setting.more_seeds.items() if run in recipes}
    of_task = replace(setting, data=texts.get(name), more_seeds=more, fingerprints={})
    outcomes = sweep.train_variants(of_task, recipes, may_diverge=True)
    for source, fingerprint in of_task.fingerprints.items():
        described = "torch/nn/modules, as bytes" if name == SOURCE_CODE else name if task.terms else source
        setting.fingerprints[described] = fingerprint
    rows = []
    for variant in task.variants:
        rows += [row for row in setting.stored.rows if (row["task"], row["variant"]) == (name, variant)]
        for outcome in outcomes[_run_name(name, variant)]:
            value = task.guess if outcome.diverged else outcome.final[task.metric] / max(task.terms, 1)
            rows.append({"task": name, "variant": variant, "seed": outcome.seed, "value": value})
    return rows


def with_small_advice(recipe: Recipe) -> Recipe:
    """Return the recipe with the bias that ``recommend(small=True)`` has for its positions; sums have vision's."""
    advice = recommend("language" if isinstance(recipe.model, LanguageModelConfig) else "vision", small=True)
    return recipe.with_transformer(attention_bias=advice.attention_bias, learn_bias=advice.learn_bias)


def count_seeds(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of seeds by run of the rows of data."""
    runs = [_run_name(row["task"], row["variant"]) for row in rows]
    return {run: runs.count(run) for run in runs}


def judge_new_tasks(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the recommended sigmoid attention with softmax on each task, and both starts of the bias."""
    findings = [
        NEW_TASKS[name].judge(
            f"The recipe for small models is at least level with softmax: {name}.",
            SMALL,
            *(select(data, "value", task=name, variant=variant) for variant in (SOFTMAX, SMALL)),
        )
        for name in dict.fromkeys(row["task"] for row in data)
    ]
    small, visible = (select(data, "value", task=LARGER, variant=variant) for variant in (SMALL, VISIBLE))
    if small and visible:
        gain, task = intervals.welch(small, visible), NEW_TASKS[LARGER]
        claim = f"With ALiBi the sum of its weights is a better start than the number of visible keys: {LARGER}."
        evidence = f"{task.label} less: {gain}, tolerance {task.tolerance:g}"
        findings.append(Finding(claim, gain.verdict_positive(task.tolerance), evidence))
    return findings


def _check_scale(setting: Setting, name: str) -> None:
    if setting.scale == "paper":
        raise ExperimentError(f"{name} is about models that are smaller than the paper's: it has no such scale")


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
    Experiment(
        "small-models-transfer",
        "Beyond the paper: the settings for small models, on further texts, sizes and sums",
        "App. Practitioner's Guide",
        measure_new_tasks,
        judge_new_tasks,
        {"smoke": 0.3, "small": 45.0, "paper": None},
        "none: it is about small models",
        "1 to 4 layers of 64 to 128; three texts, and sums; 1,200 to 1,600 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
        unequal_seeds=True,
        count_seeds=count_seeds,
    ),
)
