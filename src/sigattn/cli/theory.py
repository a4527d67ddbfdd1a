"""``sigattn theory``: numerical checks of the statements of the paper's theory.

    sigattn theory                              # 1 to 2 minutes on 2 cores; prints the table
    sigattn theory --limit 2000                 # smaller grids: 20 seconds

Expected: every statement holds, except those that ``docs/paper-notes.md`` lists as corrected or as depending on
conditions. ``python -m experiments regularity`` plots the figure "empirical regularity".
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape

from sigattn.theory.statements import check_all
from sigattn.validation import check_at_least


def check_theory(limit: int = 50_000, longest: int = 8) -> None:
    """Check every statement of the paper's theory that can be checked by computation (1 to 2 minutes on 2 cores).

    Args:
        limit: largest number of tokens (inputs times sequence length) of an enumerated contextual mapping.
        longest: largest sequence length of an enumerated contextual mapping.
    """
    check_at_least(4, {"limit": limit, "longest": longest})  # the smallest with which every statement has a case
    console, counts = Console(), Counter[str]()
    for s in check_all(limit, longest):
        colour = {"holds": "green", "fails": "red"}.get(s.verdict, "yellow")
        console.print(
            f"[{colour}]{s.verdict}[/{colour}]  [bold]{escape(s.claim)}[/bold]  ({s.where}; {s.cases:,} cases)"
        )
        if s.note:
            console.print(escape(s.note), style="dim", highlight=False)
        counts[s.verdict] += 1
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{counts.total()} statements: {summary}")
