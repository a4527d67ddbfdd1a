"""Results file of a benchmark: rewritten after each case, so that an interrupted run keeps what it measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sigattn.bench import provenance

MAX_ATTEMPTS = 2  # of a case during which the process ends without an exception
_COMPARED = ("benchmark", "source", "device", "versions", "configuration")
_NOT_COMPARED = ("results", "resume", "seconds")  # settings that do not change what a row means
Case = TypeVar("Case")


class Report:
    """Provenance, rows and finished cases of one run, or of several runs that continue one another.

    Args:
        path: The JSON file; it is replaced atomically after each case.
        described: Provenance (``provenance.describe``).
        resume: Continue the results in ``path``: the cases in it are not measured again.

    Raises:
        BenchmarkError: if ``path`` holds results of other code, another device or another configuration.
    """

    def __init__(self, path: Path, described: dict[str, Any], *, resume: bool = False) -> None:
        self.path = path
        described = json.loads(json.dumps(described))
        empty: dict[str, Any] = {key: {} for key in ("absent", "attempts")}
        empty |= {key: [] for key in ("left_out_for_time", "given_up", "rows", "done")}
        self.data: dict[str, Any] = {**described, **empty}
        self._current: str | None = None
        if resume and path.exists():
            earlier = json.loads(path.read_text())
            changed = [key for key in _COMPARED if _compared(earlier, key) != _compared(described, key)]
            if changed or not empty.keys() <= earlier.keys():
                what = ", ".join(changed) or "the file's layout"
                raise provenance.BenchmarkError(f"{path} cannot be continued, because it differs in: {what}")
            self.data = {**earlier, "continued": [*earlier.get("continued", []), described["date"]]}

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._current is not None:
            if issubclass(kind, KeyboardInterrupt):  # a time limit: not the fault of the case
                self.data["attempts"].pop(self._current, None)
            else:
                self.data["absent"][self._current] = f"{kind.__name__}: {error}"[:300]
        self.write()

    def has(self, case: object) -> bool:
        """Return True if a case is finished."""
        return json.loads(json.dumps(case)) in self.data["done"]

    def remaining(self, cases: Iterable[Case], seconds: float | None = None) -> Iterator[Case]:
        """Yield the cases that are not done, until ``seconds`` have passed; the others are noted as left out."""
        start = time.perf_counter()
        self.data["left_out_for_time"] = []
        for case in list(cases):
            key = json.dumps(case)
            if self.has(case) or json.loads(key) in self.data["given_up"]:
                continue
            if seconds is not None and time.perf_counter() - start > seconds:
                self.data["left_out_for_time"].append(json.loads(key))
                continue
            attempts = self.data["attempts"]
            if attempts.get(key, 0) >= MAX_ATTEMPTS:
                self.data["given_up"].append(json.loads(key))
                continue
            attempts[key] = attempts.get(key, 0) + 1
            self._current = key
            self.write()
            yield case
            self._current = None

    def add(self, case: object, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the rows of a finished case and write the file; return the rows."""
        found = list(rows)
        key = json.dumps(case)
        self.data["rows"] += found
        self.data["done"].append(json.loads(key))
        self.data["attempts"].pop(key, None)
        self.write()
        return found

    def write(self, **more: Any) -> dict[str, Any]:
        """Write the file, with further entries; return everything it holds."""
        self.data |= more
        provenance.write(self.path, self.data)
        return self.data


def _compared(report: dict[str, Any], key: str) -> Any:
    value = report.get(key)
    return {k: v for k, v in value.items() if k not in _NOT_COMPARED} if isinstance(value, dict) else value
