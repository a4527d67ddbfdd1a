"""``sigattn theory``: numerical checks of the statements of the paper's theory.

    sigattn theory                              # 1 to 2 minutes on 2 cores; prints the table
    sigattn theory --report runs/theory.html    # a page as well, with the figure "empirical regularity"
    sigattn theory --limit 2000                 # smaller grids: 20 seconds

Expected: every statement holds, except those that ``docs/paper-notes.md`` lists as corrected or as depending on
conditions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from sigattn.demo import drawing, report
from sigattn.files import write_text
from sigattn.theory import regularity
from sigattn.theory.statements import Statement, check_all
from sigattn.validation import check_at_least, check_output_file


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


def check_theory(options: TheoryConfig) -> None:
    """Check every statement of the paper's theory that can be checked by computation (1 to 2 minutes on 2 cores)."""
    console = Console()

    def show(s: Statement) -> None:
        colour = {"holds": "green", "fails": "red"}.get(s.verdict, "yellow")
        console.print(
            f"[{colour}]{s.verdict}[/{colour}]  [bold]{escape(s.claim)}[/bold]  ({s.where}; {s.cases:,} cases)"
        )
        if s.note:
            console.print(escape(s.note), style="dim", highlight=False)

    found = check_statements(options, show)
    counts = Counter(s.verdict for s in found)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{len(found)} statements: {summary}")
    if options.report is not None:
        print(f"report: {options.report}")


def check_statements(config: TheoryConfig, show: Callable[[Statement], None]) -> list[Statement]:
    """Check every statement, call ``show`` with each result, and write the report if one is configured."""
    check_output_file(config.report)
    if config.report is not None:
        config.report.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for statement in check_all(config.limit, config.longest):
        show(statement)
        found.append(statement)
    if config.report is not None:
        write_text(config.report, theory_page(found, config.trials))
    return found


def theory_page(statements: Sequence[Statement], trials: int) -> str:
    """Return the table and the figure as an HTML page."""
    rows = [(s.claim, s.where, f"{s.cases:,}", s.verdict, s.note) for s in statements]
    table = report.html_table(("statement", "where", "cases", "verdict", "details"), rows)
    return report.page(
        "Numerical checks of the theory of sigmoid attention",
        "Statements of Ramapuram et al. (ICLR 2025), each checked by computation.",
        "<style>td, th { text-align: left !important; white-space: normal !important; vertical-align: top }</style>"
        f"{table}<h2>Empirical regularity</h2>{regularity_figure(trials)}"
        "<p>Spectral norm of the Jacobian of one head over n, mean and range of several trials, with standard normal "
        "tokens, d = 16 and b = -log n; dashed: the bounds (Theorem 3.2 for sigmoid, Castin et al. 2023 for softmax). "
        "Top: weights of variance 1/d. Bottom: weights of standard deviation 0.02.</p>",
    )


def regularity_figure(trials: int) -> str:
    """Return the paper's figure "empirical regularity" for two sizes of weights, as SVG."""
    figure, axes = drawing.axes_grid(2, 2, width=5.0, height=3.75)
    for row, std in ((axes[:2], None), (axes[2:], 0.02)):
        plot_jacobian_norms(row, regularity.norms_over_length(trials=trials, std=std))
        row[0].set_ylabel("Jacobian norm, " + ("variance 1/d" if std is None else f"std {std}"))
    drawing.band_legend(axes[0])
    return report.svg(figure)


def plot_jacobian_norms(axes: Sequence[Any], data: Sequence[dict[str, Any]]) -> None:
    """Plot rows of ``norms_over_length`` over n on two axes, without and with hybrid-norm; mean bounds are dashed."""
    lengths = sorted({row["n"] for row in data})
    for axis, hybrid in zip(axes, (False, True), strict=True):
        for activation in ("softmax", "sigmoid"):
            colour = drawing.COLOUR_OF[activation]
            curve = [row for row in data if (row["activation"], row["hybrid_norm"]) == (activation, hybrid)]
            norms, bounds = ([[r[key] for r in curve if r["n"] == n] for n in lengths] for key in ("norm", "bound"))
            width = 1.4 if activation == "sigmoid" else 4.0  # softmax stays visible below sigmoid where they are equal
            drawing.plot_band(axis, lengths, norms, activation, colour, linewidth=width)
            if not hybrid:
                means = [statistics.mean(b) for b in bounds]
                axis.plot(lengths, means, color=colour, linestyle="--", linewidth=1, label=f"{activation}, bound")
        axis.set(xscale="log", yscale="log", xlabel="tokens n")
        axis.set_title("with hybrid-norm" if hybrid else "without hybrid-norm")
