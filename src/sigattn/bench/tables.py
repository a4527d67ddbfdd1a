"""Tables that the commands print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    right: Collection[str] = (),
    min_width: int = 0,
) -> None:
    """Print a table of text. The columns ``right`` are aligned on the right; ``min_width`` is that of the console."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=min_width > 0)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, min_width)
    console.print(table)


def print_rows(title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table. ``columns`` maps a heading to a key of the rows and the format of its numbers, "" for text."""
    cells = [[_cell(row[key], form) for key, form in columns.values()] for row in rows]
    print_table(list(columns), cells, title=title, right=[heading for heading, (_, form) in columns.items() if form])


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else mask_name(value) if isinstance(value, bool) else format(value, form)


def mask_name(causal: bool) -> str:
    """Return "causal" or "full"."""
    return "causal" if causal else "full"
