"""Detection of a repetition of the first pair of symbols, at lengths not trained on (App. "Pair Repeat Problem").

    python -m experiments pair-repeat --scale small             (--scale paper: 5M samples, an hour a run on 2 cores)

Expected: sigmoid learns it from fewer samples than softmax, and both lose accuracy equally at other lengths.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments import drawing, intervals, sweep, synthetic
from experiments.experiment import Experiment, Finding, Result, Row, Scale, Setting, count_seeds_by, select
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe

TOLERANCE = 0.05  # of the accuracy, which is 0.5 for a guess


def base(setting: Setting) -> Recipe:
    """Return the recipe; below the paper's scale with fewer symbols and shorter sequences, which are learned sooner."""
    recipe = synthetic.pair_repeat()
    steps = setting.steps(3, 1200, recipe.training.max_steps)
    if setting.scale != "paper":
        task = synthetic.PairRepeat(lengths=(8, 9))
        recipe = replace(recipe.with_transformer(num_symbols=5, seq_len=12), task=task)
    if setting.scale == "smoke":
        recipe = recipe.with_transformer(embed_dim=32)
    return sweep.shortened(recipe, steps, setting.scaled(8, 64, 256), warmup_steps=steps // 20)


def measure_accuracy_over_lengths(setting: Setting) -> Result:
    """Train three architectures and measure accuracy over lengths."""
    recipe = base(setting)
    variants = {"sigmoid": recipe, "softmax": recipe.softmax(), "mlp": recipe.with_transformer(kind="mlp")}
    outcomes = sweep.train_variants(setting, variants)
    problem = datasets.load_dataset(recipe, None)
    assert isinstance(problem, synthetic.PairRepeatData)
    lengths = setting.scaled((5, 8), tuple(range(5, 13)), tuple(range(5, 23)))
    data: list[Row] = []
    for name, runs in outcomes.items():
        data += [row for row in setting.stored.rows if row["model"] == name]
        for run in runs:
            model = run.load_model()
            for length in lengths:
                with torch.no_grad():
                    metrics = synthetic.PairRepeat().evaluate(model, problem.of_length(length, 1024))
                row = {"model": name, "seed": run.seed, "length": length, "trained": length in problem.lengths}
                data.append({**row, "accuracy": metrics["accuracy"]})
    figure, (axis,) = drawing.axes_grid(1, width=6.0, height=4.0)
    for name in variants:
        values = [select(data, "accuracy", model=name, length=n) for n in lengths]
        drawing.plot_band(axis, lengths, values, name, drawing.COLOUR_OF[name])
    for n in problem.lengths:
        axis.axvline(n, color="#999", linewidth=0.8, linestyle=":")
    trained = " and ".join(map(str, problem.lengths))
    axis.set(xlabel=f"length (trained on {trained})", ylabel="accuracy")
    axis.set_xticks(lengths)
    drawing.band_legend(axis)
    rows = [(name, intervals.mean_std(_accuracy(data, name, trained=True))) for name in variants]
    return Result(("model", f"accuracy, lengths {trained}"), rows, data, figure)


def _accuracy(data: Sequence[Row], name: str, trained: bool) -> list[float]:
    """Return the mean accuracy at the measured lengths that were, or were not, trained on, by seed."""
    lengths = dict.fromkeys(row["length"] for row in data if row["trained"] == trained)
    at = [select(data, "accuracy", model=name, length=n) for n in lengths]
    return [statistics.mean(of_seed) for of_seed in zip(*at, strict=True)]


def _fall_off(data: Sequence[Row], name: str) -> list[float]:
    """Return the accuracy at the lengths trained on less the mean accuracy at all others, by seed."""
    both = (_accuracy(data, name, trained=True), _accuracy(data, name, trained=False))
    return [a - b for a, b in zip(*both, strict=True)]


def judge_accuracy(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the accuracies of sigmoid and softmax after the same number of samples, and what they lose elsewhere."""
    trained = {name: _accuracy(data, name, trained=True) for name in ("sigmoid", "softmax")}
    gain = intervals.welch(trained["softmax"], trained["sigmoid"])
    learned = max(max(values) for values in trained.values()) > 0.75
    both_learned = all(statistics.mean(values) > 0.75 for values in trained.values())
    lost = intervals.welch(*(_fall_off(data, name) for name in ("softmax", "sigmoid")))
    return [
        Finding(
            "Sigmoid learns the problem from fewer samples than softmax.",
            gain.verdict_positive(TOLERANCE) if learned else "not shown",
            f"accuracy at the lengths trained on, sigmoid - softmax: {gain}, tolerance {TOLERANCE:g}"
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
        "5 symbols instead of 9, lengths 8 and 9 instead of 14 and 15, 77,000 samples instead of 5 million",
        unequal_seeds=True,
        count_seeds=count_seeds_by("model"),
    ),
)
