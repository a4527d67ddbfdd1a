"""Elements of figures that several experiments share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib.figure

from sigattn.experiments.report import COLOURS

COLOUR_OF = {"softmax": COLOURS[1], "sigmoid": COLOURS[0], "mlp": COLOURS[2]}


def axes_grid(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.4) -> tuple[Any, list[Any]]:
    """Return a figure and a list of its ``rows`` × ``columns`` axes, row by row; width and height are of each."""
    made = matplotlib.figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = made.subplots(rows, columns, squeeze=False).flatten().tolist()
    for a in axes:
        a.grid(alpha=0.25)
        a.spines[["top", "right"]].set_visible(False)
    return made, axes


def plot_band(
    axes: Any, x: Sequence[float] | Sequence[int], values: Sequence[Sequence[float]], label: str, colour: str
) -> None:
    """Plot a line through the means of the values at each x, and their range."""
    axes.plot(x, [statistics.mean(v) for v in values], color=colour, label=label, marker="o", ms=3, linewidth=1.4)
    axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, linewidth=0)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of the ``window`` values up to it."""
    return [statistics.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def plot_curves(axes: Any, runs: Sequence[Sequence[float]], label: str, colour: str, window: int = 10) -> None:
    """Plot the smoothed mean of several runs over the steps, and their range."""
    steps = min(len(r) for r in runs)
    smoothed = [moving_average(r[:steps], window) for r in runs]
    every = max(1, steps // 150)  # more points could not be distinguished
    x = list(range(1, steps + 1))[::every]
    at = list(zip(*smoothed, strict=True))[::every]
    axes.plot(x, [statistics.mean(v) for v in at], color=colour, label=label, linewidth=1.4)
    axes.fill_between(x, [min(v) for v in at], [max(v) for v in at], color=colour, alpha=0.15, linewidth=0)
