"""Tables of text on the terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, right: Collection[str] = ()
) -> None:
    """Print a table of text. The columns ``right`` are aligned on the right; the first is not broken over lines."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*row)
    Console().print(table)
