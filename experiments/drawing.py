"""Elements of figures that several experiments share."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

# One colour for each kind of attention in all figures, by Okabe and Ito, distinguishable with the common colour-vision
# deficiencies; variants of a kind are shades of it: softmax orange, others from blue on.
COLOUR_OF = {"softmax": "#d55e00", "sigmoid": "#0072b2", "mlp": "#009e73"}
SOFTMAX_COLOURS = ("#d55e00", "#e69f00", "#8c510a", "#999999")
OTHER_COLOURS = ("#0072b2", "#cc79a7", "#56b4e9", "#000000", "#332288", "#44aa99")
LINE_STYLES = ("-", ":", "-.")  # for as many rounds of the colours
BAND = "mean; band: lowest to highest"
WIDTH = 8.7  # inches of the text of a page; a wider figure would be shown smaller, with labels that are hard to read


def variant_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each variant: shades of orange for softmax, of blue and further ones for others."""
    return {name: style["colour"] for name, style in variant_styles(names).items()}


def variant_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a line style for each variant; the colours repeat in another style."""
    palettes = (SOFTMAX_COLOURS, OTHER_COLOURS)
    softmax, other = (itertools.cycle(itertools.product(LINE_STYLES, colours)) for colours in palettes)
    styles = {name: next(softmax if "softmax" in name else other) for name in names}
    return {name: {"colour": colour, "linestyle": line} for name, (line, colour) in styles.items()}


def sigmoid_shades(count: int) -> list[Any]:
    """Return shades of blue from light to dark, for values of one setting of sigmoid attention."""
    import matplotlib

    blues = matplotlib.colormaps["Blues"]
    return [blues(0.35 + 0.65 * i / max(1, count - 1)) for i in range(count)]


def band_legend(axes: Any, **options: Any) -> None:
    """Add a legend to axes or a figure that says what lines and bands are."""
    axes.legend(frameon=False, fontsize=8, title=BAND, title_fontsize=8, **options)


def axes_grid(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.4) -> tuple[Any, list[Any]]:
    """Return a figure and a list of its ``rows`` × ``columns`` axes, row by row.

    Width and height are of each axis; the figure is at most ``WIDTH`` wide.
    """
    from matplotlib.figure import Figure  # here: half a second, which commands that draw nothing need not wait for

    figure = Figure(figsize=(min(width * columns, WIDTH), height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for a in axes:
        a.grid(alpha=0.25)
        a.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_seeds(axes: Any, values: dict[str, list[float]]) -> None:
    """Plot a row for each variant: the value of each seed as a dot, and their mean as a bar."""
    for i, (name, found) in enumerate(values.items()):
        colour = COLOUR_OF[next((kind for kind in ("softmax", "sigmoid") if kind in name), "mlp")]
        axes.plot(found, [i] * len(found), "o", ms=4, color=colour, alpha=0.6)
        axes.plot([statistics.mean(found)], [i], "|", ms=14, color=colour)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)


def plot_band(
    axes: Any,
    x: Sequence[float] | Sequence[int],
    values: Sequence[Sequence[float]],
    label: str,
    colour: Any,
    **line: Any,
) -> None:
    """Plot a line through the means of the values at each x, and their range; ``line`` changes its style."""
    style = {"color": colour, "label": label, "marker": "o", "ms": 3, "linewidth": 1.4, **line}
    axes.plot(x, [statistics.mean(v) for v in values], **style)
    low, high = [min(v) for v in values], [max(v) for v in values]
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def plot_metric(
    axes: Any,
    runs: Sequence[Sequence[dict[str, Any]]],
    metric: str,
    label: str,
    colour: Any,
    window: int = 1,
    linestyle: str = "-",
) -> None:
    """Plot a metric of several runs over the steps, as moving averages: their mean and their range.

    Args:
        runs: the measurements of each step, for each run.
        window: number of steps of the moving average.
        linestyle: style of the mean.
    """
    steps = min(len(rows) for rows in runs)
    smoothed = [moving_average([row[metric] for row in rows[:steps]], window) for rows in runs]
    every = max(1, steps // 150)  # more points could not be distinguished
    points = list(zip(*smoothed, strict=True))[::every]
    plot_band(axes, range(1, steps + 1, every), points, label, colour, marker="", linestyle=linestyle)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of the ``window`` values up to it."""
    return [statistics.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
