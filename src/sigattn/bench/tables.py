"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_rows(title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table. ``columns`` maps a heading to a key of the rows and the format of its numbers, "" for text."""
    table = Table(title=title)
    for heading, (_, form) in columns.items():
        table.add_column(heading, justify="right" if form else "left")
    for row in rows:
        table.add_row(*(_cell(row[key], form) for key, form in columns.values()))
    Console().print(table)


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else mask_name(value) if isinstance(value, bool) else format(value, form)


def mask_name(causal: bool) -> str:
    """Return "causal" or "full"."""
    return "causal" if causal else "full"


def print_line(line: str) -> None:
    """Print a line without highlighting, and without wrapping it."""
    Console().print(line, highlight=False, soft_wrap=True)


def print_path(results: Path) -> None:
    """Print where the results are."""
    print_line(f"results: {results}")
