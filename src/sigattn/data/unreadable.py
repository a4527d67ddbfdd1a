"""Unreadable samples of a data set: skipped, counted and reported; an error if they are the majority."""

from __future__ import annotations

from sigattn.data.dataset import DataError

MAX_FRACTION = 0.5  # a larger fraction indicates a systematic problem
MAX_NAMED = 5  # files that are reported by name


class UnreadableFiles:
    """Collection of a data set's unreadable files; the first are named when they are found, all are counted.

    Args:
        kind: "image" or "recording".
        total: number of files of the data set.
    """

    def __init__(self, kind: str, total: int = 0) -> None:
        self.kind = kind
        self.total = total
        self.errors: dict[str, str] = {}  # by name

    def __len__(self) -> int:
        return len(self.errors)

    def add(self, name: str, error: str) -> None:
        """Record a file, and print a line about it if it is one of the first ``MAX_NAMED``.

        Raises:
            DataError: if more than ``MAX_FRACTION`` of all files cannot be read.
        """
        if name not in self.errors:
            if len(self) < MAX_NAMED:
                print(f"unreadable {self.kind} {name}: {error}", flush=True)
            elif len(self) == MAX_NAMED:
                print(f"further unreadable {self.kind}s are counted, and not named", flush=True)
            self.merge({name: error})

    def merge(self, errors: dict[str, str]) -> None:
        """Add files that another process has reported.

        Raises:
            DataError: if more than ``MAX_FRACTION`` of all files cannot be read.
        """
        self.errors |= errors
        if errors and len(self) > MAX_FRACTION * self.total:
            name, error = next(reversed(self.errors.items()))
            raise DataError(f"{len(self)} of {self.total} {self.kind}s cannot be read, the last {name}: {error}")

    def summary(self) -> str:
        """Return one line for the end of a run; empty if every file could be read."""
        if not self.errors:
            return ""
        more = f" and {len(self) - MAX_NAMED} more" if len(self) > MAX_NAMED else ""
        return (
            f"{len(self)} of {self.total:,} {self.kind}s could not be read and were left out: "
            f"{', '.join(list(self.errors)[:MAX_NAMED])}{more}"
        )
