"""pytest plugin: write a line of JSON for each finished test, and skip the tests that an earlier run finished.

SIGATTN_OUTCOMES: file of the lines. SIGATTN_OUTCOMES_BEFORE: such a file of earlier runs.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

_FAULTS = ("CUDA error", "illegal memory access", "AcceleratorError", "misaligned address", "launch failure")
_faulted = False
_is_worker = False


def pytest_configure(config: pytest.Config) -> None:
    """Record if this process is a worker of xdist."""
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes in a file by test, without an incomplete last line."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if found.get(row["test"], {}).get("outcome") != "failed":
            found[row["test"]] = row
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that an earlier run finished."""
    before = read(Path(os.environ["SIGATTN_OUTCOMES_BEFORE"]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome, with the error of a failure, unless this is a worker of xdist."""
    global _faulted
    text = "" if report.passed else str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    error = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-3:]
    why = " ".join(error)[:500]
    _faulted |= report.failed and any(fault in why for fault in _FAULTS)
    if not _is_worker and not (report.passed and report.when != "call"):
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "why": why}
        with open(os.environ["SIGATTN_OUTCOMES"], "a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """End a process whose CUDA context is lost: every later test in it would fail as well."""
    if _faulted and _is_worker:
        os._exit(1)  # xdist starts a new one


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Without xdist, end the run after a fault; gpu_runner.py starts it again."""
    if _faulted and nextitem is not None:
        item.session.shouldstop = "a kernel faulted: the process is restarted"
