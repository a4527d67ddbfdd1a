"""Plots of the benchmarks: a line for each implementation over the number of tokens."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.baselines import IMPLEMENTATIONS, OURS


def new_figure(rows: int, columns: int) -> tuple[Figure, Any]:
    """Return a figure and its axes, an array (rows, columns)."""
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_implementations(axes: Any, rows: list[dict[str, Any]], key: str, **settings: Any) -> None:
    """Plot ``key`` of the rows over their n; ``settings`` are of the axes. Lines of softmax are dashed."""
    for at, (name, implementation) in enumerate(IMPLEMENTATIONS.items()):
        if points := sorted((r["n"], r[key]) for r in rows if r["implementation"] == name):
            style = {"linestyle": "--" if implementation.softmax else "-", "linewidth": 2 if name == OURS else 1}
            axes.plot(*zip(*points, strict=True), marker=".", color=f"C{at}", label=name, **style)
    axes.set(xlabel="tokens n", **settings)
    axes.grid(alpha=0.3)
