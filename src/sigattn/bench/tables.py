"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table


def new_table(title: str, text: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return an empty table: columns of text, left-aligned, then columns of numbers, right-aligned."""
    table = Table(title=title)
    for column in text:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def number(value: float | None, form: str = ".2f") -> str:
    """Format a number; a dash stands for None."""
    return "–" if value is None else format(value, form)


def mask_name(causal: bool) -> str:
    """Return "causal" or "full"."""
    return "causal" if causal else "full"


def print_path(results: Path) -> None:
    """Print where the results are."""
    Console().print(f"results: {results}", highlight=False, soft_wrap=True)
