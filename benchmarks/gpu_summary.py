"""Summary of the results of gpu.sh as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import outcomes
from benchmarks.gpu_steps import Step


def summary(folder: Path, steps: Sequence[Step]) -> str:
    """Return the summary: machine, steps, failed tests, and the rows of each benchmark."""
    lines = [f"results of {folder.name}"]
    for name in ("machine", "state"):
        path = folder / f"{name}.json"
        for key, value in json.loads(path.read_text()).items() if path.exists() else ():
            lines.append(f"{key}: {value['status'] if isinstance(value, dict) else str(value).strip()}")
    for step in steps:
        lines += _test_lines(step, folder) if step.pytest else _row_lines(step, folder)
    return "\n".join(lines) + "\n"


def _test_lines(step: Step, folder: Path) -> list[str]:
    found = list(outcomes.read(folder / f"{step.name}.jsonl").values())
    if not found:
        return []
    counts = {kind: sum(row["outcome"] == kind for row in found) for kind in ("passed", "failed", "skipped")}
    failed = [f"FAILED {row['test']}: {row.get('why', '')[:300]}" for row in found if row["outcome"] == "failed"]
    log = folder / "logs" / f"{step.name}.log"
    said = (
        [line for line in log.read_text(errors="replace").splitlines() if line.startswith("========= ")]
        if step.under
        else []
    )
    return [f"\n{step.name}: {counts}", *failed[:40], *said[-10:]]


def _row_lines(step: Step, folder: Path) -> list[str]:
    module = step.benchmark[0] if step.benchmark else ""
    paths = (folder / f"{step.name}.json", folder / step.name / f"{module}.json")
    path = next((path for path in paths if step.columns and path.exists()), None)
    if path is None:
        return []
    report = json.loads(path.read_text())
    columns = step.columns if step.columns != ("*",) else tuple(report["rows"][0]) if report["rows"] else ()
    lines = [f"\n{step.name}: {' | '.join(columns)}"]
    lines += [" | ".join(_cell(row.get(column)) for column in columns) for row in report["rows"]]
    lines += [f"{line}" for key in ("crossings", "generation", "average_speed_up") for line in report.get(key, ())]
    for row in (row for row in report["rows"] if row.get("faster")):
        where = f"{row['kernel']}, n = {row['n']}, D = {row['head_dim']}, {'causal' if row['causal'] else 'full'}"
        lines.append(f"faster and correct, candidate for the default of {where}: {row['config']}")
    reasons = {name.partition(",")[0]: reason for name, reason in report["absent"].items()}
    lines += [f"absent: {name}: {reason[:160]}" for name, reason in reasons.items()]
    return lines + [f"given up, its process ended twice: {case}" for case in report["given_up"]]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)
