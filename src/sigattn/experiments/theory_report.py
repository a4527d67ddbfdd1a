"""``sigattn theory``: numerical checks of the statements of the paper's theory.

    sigattn theory                              # 1 to 2 minutes on 2 cores; prints the table
    sigattn theory --report runs/theory.html    # a page as well, with the figure "empirical regularity"
    sigattn theory --limit 2000                 # smaller grids: 20 seconds

Expected: every statement holds, except those that ``docs/paper-notes.md`` lists as corrected or as depending on
conditions.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure

from sigattn.experiments import report
from sigattn.theory import regularity
from sigattn.theory.statements import Statement, check_all
from sigattn.validation import check_at_least


@dataclass(frozen=True, kw_only=True)
class TheoryConfig:
    """Settings of the checks.

    Attributes:
        limit: largest number of tokens (inputs times sequence length) of an enumerated contextual mapping.
        longest: largest sequence length of an enumerated contextual mapping.
        trials: trials per point of the regularity figure.
        report: HTML file for the table and the regularity figure.
    """

    limit: int = 50_000
    longest: int = 8
    trials: int = 10
    report: Path | None = None

    def __post_init__(self) -> None:
        check_at_least(4, self, "limit", "longest")  # the smallest values with which every statement has a case
        check_at_least(1, self, "trials")


def check_statements(config: TheoryConfig, show: Callable[[Statement], None]) -> list[Statement]:
    """Check every statement, call ``show`` with each result, and write the report if one is configured."""
    if config.report is not None:
        config.report.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for statement in check_all(config.limit, config.longest):
        show(statement)
        found.append(statement)
    if config.report is not None:
        config.report.write_text(theory_page(found, config.trials))
    return found


def theory_page(statements: Sequence[Statement], trials: int) -> str:
    """Return the table and the figure as an HTML page."""
    head = "".join(f"<th>{name}</th>" for name in ("statement", "where", "cases", "verdict", "details"))
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(c)}</td>" for c in (s.claim, s.where, f"{s.cases:,}", s.verdict, s.note))
        + "</tr>"
        for s in statements
    )
    return report.page(
        "Numerical checks of the theory of sigmoid attention",
        "Statements of Ramapuram et al. (ICLR 2025), each checked by computation.",
        "<style>td, th { text-align: left !important; white-space: normal !important; vertical-align: top }</style>"
        f"<table><tr>{head}</tr>{rows}</table><h2>Empirical regularity</h2>{regularity_figure(trials)}"
        "<p>Spectral norm of the Jacobian of one head over n, mean and range of several trials, with standard normal "
        "tokens, d = 16 and b = -log n; dashed: the bounds (Theorem 3.2 for sigmoid, Castin et al. 2023 for softmax). "
        "Top: weights of variance 1/d. Bottom: weights of standard deviation 0.02.</p>",
    )


def regularity_figure(trials: int) -> str:
    """Return the paper's figure "empirical regularity" for two sizes of weights, as SVG."""
    figure = matplotlib.figure.Figure(figsize=(10, 7.5), layout="constrained")
    for row, std in zip(figure.subplots(2, 2, sharex=True), (None, 0.02), strict=True):
        found = regularity.norms_over_length(trials=trials, std=std)
        for axes, hybrid in zip(row, (False, True), strict=True):
            for activation, colour in zip(("sigmoid", "softmax"), report.COLOURS, strict=False):
                rows = [r for r in found if (r["activation"], r["hybrid_norm"]) == (activation, hybrid)]
                _plot_norms(axes, rows, activation, colour)
            axes.set(xscale="log", yscale="log", title="with hybrid-norm" if hybrid else "without hybrid-norm")
            axes.set_ylabel("Jacobian norm, " + ("variance 1/d" if std is None else f"std {std}"))
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    for axes in figure.axes[2:]:
        axes.set_xlabel("tokens n")
    return report.svg(figure)


def _plot_norms(axes: Any, rows: list[dict[str, Any]], activation: str, colour: str) -> None:
    lengths = sorted({r["n"] for r in rows})
    norms = [[r["norm"] for r in rows if r["n"] == n] for n in lengths]
    axes.plot(lengths, [statistics.mean(x) for x in norms], color=colour, label=activation, marker="o", ms=3)
    axes.fill_between(lengths, [min(x) for x in norms], [max(x) for x in norms], color=colour, alpha=0.15)
    if rows[0]["bound"] is not None:
        bounds = [statistics.mean(r["bound"] for r in rows if r["n"] == n) for n in lengths]
        axes.plot(lengths, bounds, color=colour, linestyle="--", linewidth=1, label=f"{activation}, bound")
