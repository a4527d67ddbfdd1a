"""Report of a comparison of runs: one self-contained HTML page with table, curves and samples."""

import html
import io
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

COLOURS = ("#d55e00", "#0072b2", "#cc79a7")  # softmax, sigmoid with and without a bias
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
svg { max-width: 100%; height: auto }
pre { background: #f6f6f4; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }
"""


class Run(NamedTuple):
    """Trained model in the report: its name, its metrics by step, and a text that it generated."""

    name: str
    rows: Sequence[dict[str, Any]]
    sample: str

    def values(self, key: str) -> list[float]:
        """Return the values of a metric at the steps at which it was measured."""
        return [row[key] for row in self.rows if key in row]


TABLE: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("model", lambda run: run.name),
    ("held-out bits per byte", lambda run: f"{run.values('validation_bits')[-1]:.3f}"),
    ("training bits per byte", lambda run: f"{statistics.mean(run.values('loss')[-20:]) / math.log(2):.3f}"),
    ("output norm, first", lambda run: _number(run.values("attention_norm")[0])),
    ("output norm, last", lambda run: _number(run.values("attention_norm")[-1])),
    ("largest gradient norm", lambda run: f"{max(run.values('gradient_norm')):.2f}"),
    ("sequences per second", lambda run: f"{statistics.median(run.values('samples_per_second')):,.0f}"),
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def comparison_page(title: str, introduction: str, runs: Sequence[Run], facts: dict[str, Any]) -> str:
    """Return the report as an HTML page. ``facts`` are settings and versions, shown as a table."""
    table = _table([name for name, _ in TABLE], [[cell(run) for _, cell in TABLE] for run in runs])
    samples = "".join(f"<h3>{html.escape(run.name)}</h3><pre>{html.escape(run.sample)}</pre>" for run in runs)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(introduction)}</p>{table}"
        f"<h2>Curves</h2>{_curves(runs)}<h2>A sample of text from each model</h2>{samples}"
        f"<h2>Settings and versions</h2>{_table((), list(facts.items()))}</html>\n"
    )


def _table(columns: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table; all cells are text and are escaped."""
    head = "".join(f"<th>{html.escape(str(c))}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _curves(runs: Sequence[Run]) -> str:
    """Plot training and validation loss, attention norm and gradient norm over the steps, as one SVG element."""
    from matplotlib.figure import Figure  # here: half a second, which commands that draw nothing need not wait for

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels = (
        ("loss", 1 / math.log(2), "training, bits per byte"),
        ("validation_bits", 1.0, "held-out text, bits per byte"),
        ("attention_norm", 1.0, "attention norm ‖P V‖"),
        ("gradient_norm", 1.0, "gradient norm (before clipping)"),
    )
    for axes, (key, unit, title) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for run, colour in zip(runs, COLOURS, strict=True):
            points = [(row["step"] + 1, unit * row[key]) for row in run.rows if key in row]
            marker = "o" if len(points) < 20 else None
            axes.plot(*zip(*points, strict=True), label=run.name, color=colour, linewidth=1.4, marker=marker, ms=4)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if key.endswith("norm"):
            axes.set_yscale("log")
        if key == "loss":
            axes.legend(frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
