"""Training losses of sigmoid and softmax on all tasks, the paper's summary (Fig. "summary_nll").

    sigattn reproduce train-losses --speech FSDD.tar.gz     (--scale paper: each recipe's own hardware)

Expected: the two curves of each task coincide. Both models of a pair have the recipe's positions and norms; only the
attention differs (and, in speech, the QK-norm, which softmax does not have). ``sigattn compare`` trains the same pairs
to the end of their small recipes and evaluates them on held-out data.
"""

from __future__ import annotations

from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.ablation import shortened
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Setting
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe

# by task: recipe, steps and batch of the small scale
TASKS: dict[str, tuple[str, int, int]] = {
    "language": ("lm-1b-2k-tiny", 150, 16),
    "supervised": ("vit-supervised-tiny", 300, 128),
    "SimCLR": ("vit-simclr-tiny", 120, 128),
    "BYOL": ("vit-byol-tiny", 80, 128),
    "MAE": ("vit-mae-tiny", 250, 128),
    "speech": ("asr-ls960-tiny", 300, 20),
}
WITHIN = 0.05  # of softmax's loss: largest half width of an interval for which equality can be confirmed


def recipes(setting: Setting) -> dict[str, Recipe]:
    """Return recipes of both mechanisms for each task; speech only if there are recordings.

    Raises:
        ExperimentError: at the paper's scale.
    """
    if setting.scale == "paper":
        raise ExperimentError(
            "train-losses at the paper's scale is every recipe in full: run sigattn train RECIPE and sigattn train "
            "RECIPE-softmax (sigattn recipes lists them) and compare their metrics.jsonl"
        )
    made: dict[str, Recipe] = {}
    for task, (name, steps, batch) in TASKS.items():
        if task == "speech" and setting.speech is None and setting.scale != "smoke":
            continue
        recipe = shortened(find_recipe(name), setting.scaled(4, steps, None), setting.scaled(4, batch, None))
        made |= {f"sigmoid, {task}": recipe, f"softmax, {task}": recipe.softmax()}
    return made


def run(setting: Setting) -> Result:
    """Train all pairs, plot their losses, and compare the losses at the end."""
    wanted = recipes(setting)
    found = sweep.train_all(setting, sweep.make_jobs(wanted, setting))
    tasks = [task for task in TASKS if f"sigmoid, {task}" in wanted]
    picture, axes = drawing.axes_grid(3, (len(tasks) + 2) // 3)
    rows, findings, data = [], [], []
    for axis, task in zip(axes, tasks, strict=False):
        ends = {}
        for mechanism in ("softmax", "sigmoid"):
            outcomes = found[f"{mechanism}, {task}"]
            losses = [[r["loss"] for r in o.rows] for o in outcomes]
            drawing.plot_curves(axis, losses, mechanism, drawing.COLOUR_OF[mechanism])
            ends[mechanism] = [o.mean_of_last() for o in outcomes]
            data += [
                {"task": task, "mechanism": mechanism, "seed": s, "loss": loss}
                for s, loss in enumerate(ends[mechanism])
            ]
        axis.set(title=task, xlabel="step")
        delta, margin = intervals.welch(ends["softmax"], ends["sigmoid"])
        usual = abs(sum(ends["softmax"]) / len(ends["softmax"]))
        rows.append((task, *(intervals.mean_std(ends[m]) for m in ends), intervals.interval(delta, margin)))
        findings.append(
            Finding(
                f"Sigmoid's training loss matches softmax's: {task}.",
                intervals.verdict_equal(delta, margin, WITHIN * usual),
                f"sigmoid - softmax at the end: {intervals.interval(delta, margin)}, of {usual:.3g}",
            )
        )
    for axis in axes[len(tasks) :]:
        axis.set_axis_off()
    axes[0].set_ylabel("training loss")
    axes[0].legend(frameon=False)
    return Result(("task", "softmax", "sigmoid", "sigmoid - softmax"), rows, findings, data, picture)


EXPERIMENT = Experiment(
    "train-losses",
    "Training losses over all tasks",
    'Fig. "summary_nll"',
    run,
    {"smoke": 0.3, "small": 8.0, "paper": None},
    "1 to 64 GPUs of 80 GB, by recipe",
    "models of 2 layers of 64, CPython's documentation, handwritten and spoken digits, 80 to 300 steps",
)
