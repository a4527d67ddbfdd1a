"""Detection of a repetition of the first pair of symbols, at lengths not trained on (App. "Pair Repeat Problem").

    sigattn reproduce pair-repeat --scale small             (--scale paper: 5M samples, an hour a run on 2 cores)

Expected: sigmoid learns it from fewer samples than softmax, and both lose accuracy equally at other lengths.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sigattn.data import synthetic
from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting
from sigattn.models import saving
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.pair_repeat import PairRepeat


def base(setting: Setting) -> Recipe:
    """Return the recipe, with fewer steps below the paper's scale."""
    recipe = find_recipe("pair-repeat")
    steps = setting.scaled(6, 1000, recipe.training.max_steps)
    training = replace(
        recipe.training, max_steps=steps, batch_size=setting.scaled(8, 128, 256), warmup_steps=steps // 20,
        validate_every=steps, checkpoint_every=steps,
    )  # fmt: skip
    return replace(recipe, training=training)


def run(setting: Setting) -> Result:
    """Train three architectures and measure accuracy over lengths."""
    recipe = base(setting)
    wanted = {
        "sigmoid": recipe,
        "softmax": recipe.softmax(),
        "mlp": recipe.with_transformer(kind="mlp"),
    }
    jobs = sweep.make_jobs(wanted, setting)
    found = sweep.train_all(setting, jobs)
    lengths = setting.scaled((5, 14), tuple(range(5, 23)), tuple(range(5, 23)))
    data = []
    for job in jobs:
        model = saving.load(setting.folder / "runs" / job.name / str(job.seed) / "model")
        for length in lengths:
            with torch.no_grad():
                accuracy = PairRepeat().evaluate(model, synthetic.PairRepeat().of_length(length, 1024))["accuracy"]
            data.append({"model": job.name, "seed": job.seed, "length": length, "accuracy": accuracy})
    picture, axes = drawing.axes_grid(1, width=6.0, height=4.0)
    for name in wanted:
        values = [[r["accuracy"] for r in data if (r["model"], r["length"]) == (name, n)] for n in lengths]
        drawing.plot_band(axes[0], lengths, values, name, drawing.COLOUR_OF[name])
    for n in (14, 15):
        axes[0].axvline(n, color="#999", linewidth=0.8, linestyle=":")
    axes[0].set(xlabel="length (trained on 14 and 15)", ylabel="accuracy")
    axes[0].legend(frameon=False)
    trained = {name: [o.final["accuracy"] for o in found[name]] for name in wanted}
    delta, margin = intervals.welch(trained["softmax"], trained["sigmoid"])
    learned = max(max(v) for v in trained.values()) > 0.75
    findings = [
        Finding(
            "Sigmoid learns the problem from fewer samples than softmax.",
            "not shown" if not learned or abs(delta) <= margin else "agrees" if delta > margin else "differs",
            f"accuracy at the lengths trained on, sigmoid - softmax: {intervals.interval(delta, margin)}"
            + ("" if learned else "; no model has learned the problem"),
        )
    ]
    rows = [(name, intervals.mean_std(trained[name])) for name in wanted]
    return Result(("model", "accuracy, lengths 14 and 15"), rows, findings, data, picture)


EXPERIMENT = Experiment(
    "pair-repeat",
    "Repeated pairs, and lengths never trained on",
    'Fig. "repeat_seq_results", App. G.6',
    run,
    {"smoke": 0.1, "small": 4.0, "paper": 540.0},
    "2 CPU cores",
    "128,000 samples instead of 5 million, three trials instead of six",
)
