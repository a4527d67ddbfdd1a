"""Detection of a repetition of the first pair of symbols, at lengths not trained on (App. "Pair Repeat Problem").

    sigattn reproduce pair-repeat --scale small             (--scale paper: 5M samples, an hour a run on 2 cores)

Expected: sigmoid learns it from fewer samples than softmax, and both lose accuracy equally at other lengths.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from sigattn.data import synthetic
from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Experiment, Finding, Result, Row, Scale, Setting, select
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.synthetic import PairRepeat

TOLERANCE = 0.05  # of the accuracy, which is 0.5 for a guess


def measure_accuracy_over_lengths(setting: Setting) -> Result:
    """Train three architectures and measure accuracy over lengths."""
    recipe = find_recipe("pair-repeat")
    steps = setting.steps(6, 1000, recipe.training.max_steps)
    recipe = sweep.shortened(recipe, steps, setting.scaled(8, 128, 256), warmup_steps=steps // 20)
    variants = {"sigmoid": recipe, "softmax": recipe.softmax(), "mlp": recipe.with_transformer(kind="mlp")}
    outcomes = sweep.train_variants(setting, variants)
    lengths = setting.scaled((5, 14), tuple(range(5, 23)), tuple(range(5, 23)))
    samples = setting.scaled(64, 1024, 1024)
    data = []
    for name, runs in outcomes.items():
        for run in runs:
            model = run.load_model()
            for length in lengths:
                with torch.no_grad():
                    metrics = PairRepeat().evaluate(model, synthetic.PairRepeat().of_length(length, samples))
                data.append({"model": name, "seed": run.seed, "length": length, "accuracy": metrics["accuracy"]})
    figure, (axis,) = drawing.axes_grid(1, width=6.0, height=4.0)
    for name in variants:
        values = [select(data, "accuracy", model=name, length=n) for n in lengths]
        drawing.plot_band(axis, lengths, values, name, drawing.COLOUR_OF[name])
    for n in (14, 15):
        axis.axvline(n, color="#999", linewidth=0.8, linestyle=":")
    axis.set(xlabel="length (trained on 14 and 15)", ylabel="accuracy")
    axis.set_xticks(lengths)
    drawing.band_legend(axis)
    rows = [(name, intervals.mean_std(_trained_accuracy(data, name))) for name in variants]
    return Result(("model", "accuracy, lengths 14 and 15"), rows, data, figure)


def _trained_accuracy(data: Sequence[Row], name: str) -> list[float]:
    """Return the mean accuracy at the measured lengths that were trained on, by seed."""
    at = [select(data, "accuracy", model=name, length=n) for n in (14, 15)]
    return [statistics.mean(of_seed) for of_seed in zip(*(values for values in at if values), strict=True)]


def _fall_off(data: Sequence[Row], name: str) -> list[float]:
    """Return the accuracy at the lengths trained on less the mean accuracy at all others, by seed."""
    others = sorted({row["length"] for row in data} - {14, 15})
    at = [select(data, "accuracy", model=name, length=n) for n in others]
    elsewhere = [statistics.mean(of_seed) for of_seed in zip(*at, strict=True)]
    return [a - b for a, b in zip(_trained_accuracy(data, name), elsewhere, strict=True)]


def judge_accuracy(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the accuracies of sigmoid and softmax after the same number of samples, and what they lose elsewhere."""
    trained = {name: _trained_accuracy(data, name) for name in ("sigmoid", "softmax")}
    gain = intervals.welch(trained["softmax"], trained["sigmoid"])
    learned = max(max(values) for values in trained.values()) > 0.75
    both_learned = all(statistics.mean(values) > 0.75 for values in trained.values())
    lost = intervals.welch(*(_fall_off(data, name) for name in ("softmax", "sigmoid")))
    return [
        Finding(
            "Sigmoid learns the problem from fewer samples than softmax.",
            gain.verdict_positive() if learned else "not shown",
            f"accuracy at the lengths trained on, sigmoid - softmax: {gain}"
            + ("" if learned else "; neither has learned the problem"),
        ),
        Finding(
            "At lengths never trained on, both lose the same accuracy.",
            lost.verdict_equal(TOLERANCE) if both_learned else "not shown",
            f"accuracy lost, sigmoid - softmax: {lost}, tolerance {TOLERANCE:g}"
            + ("" if both_learned else "; not both have learned the problem"),
        ),
    ]


EXPERIMENTS = (
    Experiment(
        "pair-repeat",
        "Repeated pairs, and lengths never trained on",
        'Fig. "repeat_seq_results", App. G.5',
        measure_accuracy_over_lengths,
        judge_accuracy,
        {"smoke": 0.1, "small": 4.0, "paper": 540.0},
        "2 CPU cores",
        "128,000 samples instead of 5 million, three trials instead of six",
    ),
)
