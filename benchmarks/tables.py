"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sigattn.tables import print_table


def print_rows(title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table. ``columns`` maps a heading to a key of the rows and the format of its numbers, "" for text."""
    cells = [[_cell(row[key], form) for key, form in columns.values()] for row in rows]
    print_table(list(columns), cells, title=title, right=[heading for heading, (_, form) in columns.items() if form])


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else mask_name(value) if isinstance(value, bool) else format(value, form)


def mask_name(causal: bool) -> str:
    """Return "causal" or "full"."""
    return "causal" if causal else "full"
