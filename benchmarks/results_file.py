"""Results file of a benchmark, rewritten after each case: an interrupted run keeps its rows and can be resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from benchmarks import provenance

MAX_ATTEMPTS = 2  # for a case during which the process ended without an exception
_COMPARED = ("benchmark", "source", "device", "versions", "configuration")
_NOT_COMPARED = ("resume", "max_seconds")  # settings that do not change the meaning of a row
Case = TypeVar("Case")


class ResultsFile:
    """Provenance, rows and finished cases of a benchmark, of one run or of several that resume one another.

    Args:
        path: JSON file, replaced atomically after each case.
        described: provenance (``provenance.describe``).
        resume: continue the results in ``path``; the cases in it are not measured again.

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

    @classmethod
    def of(cls, benchmark: str, config: Any) -> ResultsFile:
        """Return the file of a benchmark: ``config.results``, or if that is a folder, BENCHMARK.json in it."""
        path = config.results if config.results.suffix == ".json" else config.results / f"{benchmark}.json"
        return cls(path, provenance.describe(benchmark, asdict(config), gpu=True), resume=config.resume)

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._current is not None:
            if issubclass(kind, KeyboardInterrupt):  # a time limit, which is no failure of the case
                self.data["attempts"].pop(self._current, None)
            else:
                self.data["absent"][self._current] = f"{kind.__name__}: {error}"[:300]
        self.write()

    def has(self, case: object) -> bool:
        """Return True if a case is finished."""
        return json.loads(json.dumps(case)) in self.data["done"]

    def remaining(self, cases: Iterable[Case], seconds: float | None = None) -> Iterator[Case]:
        """Yield the unfinished cases until ``seconds`` have passed; list the rest under ``left_out_for_time``."""
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
        """Write the file, with further entries; return its content."""
        self.data |= more
        provenance.write(self.path, self.data)
        return self.data


def _compared(report: dict[str, Any], key: str) -> Any:
    value = report.get(key)
    return {k: v for k, v in value.items() if k not in _NOT_COMPARED} if isinstance(value, dict) else value
