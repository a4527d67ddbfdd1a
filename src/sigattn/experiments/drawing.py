"""Elements of figures that several experiments share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.figure

# Okabe and Ito's colours, which are distinguishable with the common colour-vision deficiencies
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
COLOUR_OF = {"softmax": COLOURS[1], "sigmoid": COLOURS[0], "mlp": COLOURS[2]}
SOFTMAX_COLOURS = ("#d55e00", "#e69f00", "#999999")
OTHER_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#f0e442")


def variant_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each variant; those of softmax are shades of orange and grey."""
    softmax, other = iter(SOFTMAX_COLOURS), iter(OTHER_COLOURS)
    return {name: next(softmax if "softmax" in name else other) for name in names}


def axes_grid(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.4) -> tuple[Any, list[Any]]:
    """Return a figure and a list of its ``rows`` × ``columns`` axes, row by row; width and height are of each."""
    figure = matplotlib.figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for a in axes:
        a.grid(alpha=0.25)
        a.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_band(
    axes: Any, x: Sequence[float] | Sequence[int], values: Sequence[Sequence[float]], label: str, colour: str
) -> None:
    """Plot a line through the means of the values at each x, and their range."""
    _mean_and_range(axes, x, values, color=colour, label=label, marker="o", ms=3)


def plot_metric(
    axes: Any, runs: Sequence[Sequence[dict[str, Any]]], metric: str, label: str, colour: str, window: int = 1
) -> None:
    """Plot a metric of several runs over the steps, as moving averages: their mean and their range.

    Args:
        runs: the measurements of each step, for each run.
        window: number of steps of the moving average.
    """
    steps = min(len(rows) for rows in runs)
    smoothed = [moving_average([row[metric] for row in rows[:steps]], window) for rows in runs]
    every = max(1, steps // 150)  # more points could not be distinguished
    _mean_and_range(
        axes,
        list(range(1, steps + 1))[::every],
        list(zip(*smoothed, strict=True))[::every],
        color=colour,
        label=label,
    )


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of the ``window`` values up to it."""
    return [statistics.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def _mean_and_range(
    axes: Any, x: Sequence[float] | Sequence[int], values: Sequence[Sequence[float]], **line: Any
) -> None:
    axes.plot(x, [statistics.mean(v) for v in values], linewidth=1.4, **line)
    low, high = [min(v) for v in values], [max(v) for v in values]
    axes.fill_between(x, low, high, color=line["color"], alpha=0.15, linewidth=0)
