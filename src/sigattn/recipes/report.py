"""The page that a comparison of runs ends in: one HTML file, pictures and all."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
from matplotlib.axes import Axes

# Categorical colours that stay apart under the common colour-vision deficiencies (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
svg { max-width: 100%; height: auto }
pre { background: #f6f6f4; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }
"""


@dataclass(frozen=True)
class Run:
    """One trained model: its name, its rows of metrics in order of steps, and a sample of what it writes."""

    name: str
    rows: Sequence[dict[str, Any]]
    sample: str

    def last(self, key: str) -> float:
        """The last value that was measured."""
        return float(next(row[key] for row in reversed(self.rows) if key in row))


TABLE: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("model", lambda run: run.name),
    ("held-out bits per byte", lambda run: f"{run.last('validation_bits'):.3f}"),
    ("training bits per byte", lambda run: f"{_mean_of_last(run, 'loss') / math.log(2):.3f}"),
    ("output norm, first", lambda run: _number(run.rows[0]["attention_norm"])),
    ("output norm, last", lambda run: _number(run.last("attention_norm"))),
    ("largest gradient norm", lambda run: f"{max(row['gradient_norm'] for row in run.rows):.2f}"),
    ("sequences per second", lambda run: f"{_median(run, 'samples_per_second'):,.0f}"),
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _mean_of_last(run: Run, key: str, count: int = 20) -> float:
    values = [row[key] for row in run.rows[-count:]]
    return float(sum(values) / len(values))


def _median(run: Run, key: str) -> float:
    values = sorted(row[key] for row in run.rows)
    return float(values[len(values) // 2])


def build(title: str, introduction: str, runs: Sequence[Run], facts: dict[str, Any]) -> str:
    """The page as HTML. ``facts`` says what was run, with which versions and settings."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in TABLE)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(run))}</td>" for _, cell in TABLE) + "</tr>" for run in runs
    )
    samples = "".join(f"<h3>{html.escape(run.name)}</h3><pre>{html.escape(run.sample)}</pre>" for run in runs)
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    return page(
        title,
        introduction,
        f"<table><tr>{head}</tr>{body}</table><h2>Curves</h2>{curves(runs)}"
        f"<h2>A sample of text from each</h2>{samples}<h2>What was run</h2><table>{rows}</table>",
    )


def page(title: str, introduction: str, body: str) -> str:
    """A whole HTML page; ``body`` is HTML, the rest is text."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(introduction)}</p>{body}</html>\n"
    )


def svg(figure: matplotlib.figure.Figure) -> str:
    """A figure as an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def curves(runs: Sequence[Run]) -> str:
    """Training and validation loss, attention norm and gradient norm over the steps, as one SVG."""
    figure = matplotlib.figure.Figure(figsize=(11, 7.5), layout="constrained")
    (training, validation), (attention, gradient) = figure.subplots(2, 2)
    panels: tuple[tuple[Axes, str, float, str], ...] = (
        (training, "loss", 1 / math.log(2), "training, bits per byte"),
        (validation, "validation_bits", 1.0, "held-out text, bits per byte"),
        (attention, "attention_norm", 1.0, "attention norm ‖σ(QKᵀ/√d + b)V‖"),
        (gradient, "gradient_norm", 1.0, "gradient norm (before clipping)"),
    )
    for axes, key, unit, title in panels:
        for run, colour in zip(runs, COLOURS, strict=False):
            points = [(row["step"] + 1, unit * row[key]) for row in run.rows if key in row]
            marker = "o" if len(points) < 20 else None
            axes.plot(*zip(*points, strict=True), label=run.name, color=colour, linewidth=1.4, marker=marker, ms=4)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    attention.set_yscale("log")
    gradient.set_yscale("log")
    training.legend(frameon=False)
    return svg(figure)
