"""Training losses of sigmoid and softmax on all tasks, the paper's summary (Fig. "summary_nll").

    python -m experiments train-losses --speech FSDD.tar.gz     (--scale paper: each recipe's own hardware)

Expected: the two curves of each task coincide. Both models of a pair have the same positions and norms; only the
attention differs (and, in speech, the QK-norm, which softmax does not have). ``python -m experiments compare``
trains such pairs to the end of their small recipes and evaluates them on held-out data.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from experiments import drawing, intervals, language_ablations, speech, sweep, vision_ablations
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
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVATIONS = ("softmax", "sigmoid")
# by task: the recipe as in the experiments of that task
TASKS: dict[str, Callable[[Setting], Recipe]] = {
    "language": language_ablations.norm_recipe,
    "supervised": vision_ablations.base,
    "SimCLR": lambda setting: _vision(setting, "vit-simclr-tiny", 400),
    "BYOL": lambda setting: _vision(setting, "vit-byol-tiny", 240),
    "MAE": lambda setting: _vision(setting, "vit-mae-tiny", 250),
    "speech": speech.base,
}
TOLERANCE = 0.05  # of softmax's loss


def recipes_by_task(setting: Setting) -> dict[str, Recipe]:
    """Return the recipe of sigmoid attention for each task; speech only if there are recordings.

    Raises:
        ExperimentError: at the paper's scale.
    """
    if setting.scale == "paper":
        raise ExperimentError(
            "train-losses at the paper's scale is every recipe in full: run sigattn train RECIPE and sigattn train "
            "RECIPE-softmax (sigattn recipes lists them) and compare their metrics.jsonl"
        )
    return {task: base(setting) for task, base in TASKS.items() if task != "speech" or setting.speech}


def _vision(setting: Setting, name: str, steps: int) -> Recipe:
    return sweep.shortened(find_recipe(name), setting.steps(2, steps), setting.scaled(4, 128, None))


def compare_training_losses(setting: Setting) -> Result:
    """Train all pairs, plot their losses, and compare the losses at the end."""
    tasks = recipes_by_task(setting)
    variants: dict[str, Recipe] = {}
    for task, recipe in tasks.items():
        variants |= {f"sigmoid, {task}": recipe, f"softmax, {task}": recipe.softmax()}
    outcomes = sweep.train_variants(setting, variants)
    rows: list[tuple[str, ...]] = []
    data: list[Row] = []
    for task in tasks:
        ends = {}
        for activation in ACTIVATIONS:
            run = {"task": task, "activation": activation}
            data += [row for row in setting.stored.rows if run.items() <= row.items()]
            data += [{**run, "seed": o.seed, "loss": o.mean_of_last()} for o in outcomes[f"{activation}, {task}"]]
            ends[activation] = select(data, "loss", **run)
        difference = intervals.welch(ends["softmax"], ends["sigmoid"])
        rows.append((task, *(intervals.mean_std(losses) for losses in ends.values()), str(difference)))
    figure = None if setting.stored.rows else _plot_curves(outcomes, tasks)  # stored seeds have no curves
    return Result(("task", "softmax", "sigmoid", "sigmoid - softmax"), rows, data, figure)


def _plot_curves(outcomes: dict[str, list[sweep.Outcome]], tasks: Collection[str]) -> Figure:
    """Plot the training losses of each task over the steps."""
    figure, axes = drawing.axes_grid(2, (len(tasks) + 1) // 2)
    for axis, task in zip(axes, tasks, strict=False):
        for activation in ACTIVATIONS:
            runs = [o.rows for o in outcomes[f"{activation}, {task}"]]
            drawing.plot_metric(axis, runs, "loss", activation, drawing.COLOUR_OF[activation], window=10)
        axis.set(title=task, xlabel="step")
    for axis in axes[len(tasks) :]:
        axis.set_axis_off()
    axes[0].set_ylabel("training loss")
    drawing.band_legend(axes[0])
    return figure


def _count_seeds(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of seeds by run of the rows of data (``Experiment.count_seeds``)."""
    return dict(Counter(f"{row['activation']}, {row['task']}" for row in rows))


def judge_training_losses(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the losses of sigmoid and softmax at the end of training, by task."""
    findings = []
    for task in dict.fromkeys(row["task"] for row in data):
        softmax, sigmoid = (select(data, "loss", task=task, activation=a) for a in ("softmax", "sigmoid"))
        difference, usual = intervals.welch(softmax, sigmoid), abs(statistics.mean(softmax))
        findings.append(
            Finding(
                f"Sigmoid's training loss matches softmax's: {task}.",
                difference.verdict_equal(TOLERANCE * usual),
                f"sigmoid - softmax at the end: {difference}, of {usual:.3g}; tolerance {TOLERANCE:.0%}",
            )
        )
    return findings


EXPERIMENTS = (
    Experiment(
        "train-losses",
        "Training losses over all tasks",
        'Fig. "summary_nll"',
        compare_training_losses,
        judge_training_losses,
        {"smoke": 0.3, "small": 8.0, "paper": None},
        "1 to 64 GPUs of 80 GB, by recipe",
        "models of 2 layers of 64, CPython's documentation, handwritten and spoken digits, 240 to 1,200 steps",
        takes=(*LANGUAGE, "speech"),
        unequal_seeds=True,
        count_seeds=_count_seeds,
    ),
)
