"""Command ``sigattn theory``."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape

from sigattn.experiments import theory_report
from sigattn.theory.statements import Statement


def check_theory(options: theory_report.TheoryConfig) -> None:
    """Check every statement of the paper's theory that can be checked by computation (1 to 2 minutes on 2 cores)."""
    console = Console()

    def show(s: Statement) -> None:
        colour = {"holds": "green", "fails": "red"}.get(s.verdict, "yellow")
        console.print(
            f"[{colour}]{s.verdict}[/{colour}]  [bold]{escape(s.claim)}[/bold]  ({s.where}; {s.cases:,} cases)"
        )
        if s.note:
            console.print(escape(s.note), style="dim", highlight=False)

    found = theory_report.check_statements(options, show)
    counts = Counter(s.verdict for s in found)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{len(found)} statements: {summary}", highlight=False)
    if options.report is not None:
        console.print(f"report: {options.report}", soft_wrap=True, highlight=False)
