"""``sigattn theory``: every statement of the paper's theory that can be run, checked and tabled.

    sigattn theory                              # 1 to 2 minutes on 2 cores; prints the table
    sigattn theory --report runs/theory.html    # a page as well, with the figure "empirical regularity"
    sigattn theory --limit 2000                 # smaller grids: 20 seconds

Expected: all of it holds, but for what ``docs/paper-notes.md`` lists as mended or as depending on conditions.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure

from sigattn.recipes import report
from sigattn.theory import regularity
from sigattn.theory.statements import Statement, check_all
from sigattn.validation import check_at_least


@dataclass(frozen=True, kw_only=True)
class Theory:
    """What to check.

    Attributes:
        limit: enumerate contextual mappings of up to so many tokens (inputs times tokens of each).
        longest: and of up to so many tokens a sequence.
        trials: of each point of the regularity figure.
        report: write the table and the regularity figure here, as HTML.
    """

    limit: int = 50_000
    longest: int = 8
    trials: int = 10
    report: Path | None = None

    def __post_init__(self) -> None:
        check_at_least(4, self, "limit", "longest")  # the least for which every statement has a case
        check_at_least(1, self, "trials")


def run(options: Theory, show: Callable[[Statement], None]) -> list[Statement]:
    """Check everything, show each statement as it is done, and write the page if one is wanted."""
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for statement in check_all(options.limit, options.longest):
        show(statement)
        found.append(statement)
    if options.report is not None:
        options.report.write_text(page(found, options.trials))
    return found


def page(statements: Sequence[Statement], trials: int) -> str:
    """The table and the figure as HTML."""
    head = "".join(f"<th>{name}</th>" for name in ("statement", "where", "cases", "verdict", "what was found"))
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(c)}</td>" for c in (s.claim, s.where, f"{s.cases:,}", s.verdict, s.note))
        + "</tr>"
        for s in statements
    )
    return report.page(
        "The theory of sigmoid attention, run",
        "Statements of Ramapuram et al. (ICLR 2025), each checked by computing it.",
        "<style>td, th { text-align: left !important; white-space: normal !important; vertical-align: top }</style>"
        f"<table><tr>{head}</tr>{rows}</table><h2>Empirical regularity</h2>{regularity_figure(trials)}"
        "<p>Spectral norm of the Jacobian of one head over n, mean and range of several trials, with standard normal "
        "tokens, d = 16 and b = -log n; dashed the bounds (Theorem 3.2 for sigmoid, Castin et al. 2023 for softmax). "
        "Top: weights of variance 1/d. Bottom: of standard deviation 0.02.</p>",
    )


def regularity_figure(trials: int) -> str:
    """The paper's figure, for two sizes of weights, as SVG."""
    figure = matplotlib.figure.Figure(figsize=(10, 7.5), layout="constrained")
    for row, std in zip(figure.subplots(2, 2, sharex=True), (None, 0.02), strict=True):
        found = regularity.norms_over_length(trials=trials, std=std)
        for axes, hybrid in zip(row, (False, True), strict=True):
            for activation, colour in zip(("sigmoid", "softmax"), report.COLOURS, strict=False):
                mine = [r for r in found if (r["activation"], r["hybrid_norm"]) == (activation, hybrid)]
                _curve(axes, mine, activation, colour)
            axes.set(xscale="log", yscale="log", title="with hybrid-norm" if hybrid else "attention alone")
            axes.set_ylabel("Jacobian norm, " + ("variance 1/d" if std is None else f"std {std}"))
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    for axes in figure.axes[2:]:
        axes.set_xlabel("tokens n")
    return report.svg(figure)


def _curve(axes: Any, rows: list[dict[str, Any]], activation: str, colour: str) -> None:
    lengths = sorted({r["n"] for r in rows})
    norms = [[r["norm"] for r in rows if r["n"] == n] for n in lengths]
    axes.plot(lengths, [statistics.mean(x) for x in norms], color=colour, label=activation, marker="o", ms=3)
    axes.fill_between(lengths, [min(x) for x in norms], [max(x) for x in norms], color=colour, alpha=0.15)
    if rows[0]["bound"] is not None:
        bounds = [statistics.mean(r["bound"] for r in rows if r["n"] == n) for n in lengths]
        axes.plot(lengths, bounds, color=colour, linestyle="--", linewidth=1, label=f"{activation}, bound")
