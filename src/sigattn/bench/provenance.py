"""Where a measurement comes from: what every results file says of itself."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import sigattn


class BenchmarkError(RuntimeError):
    """This machine cannot run a benchmark; the message says why, and what to do."""


def describe(benchmark: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Benchmark, date, commit, digest of the source, device, versions and configuration."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "source": source(),
        "device": processor(),
        "versions": {"sigattn": sigattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "configuration": {key: str(v) if isinstance(v, Path) else v for key, v in configuration.items()},
    }


def commit() -> str:
    """The commit of the code that runs, with "+" if files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=here.parent, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed else "")


def source() -> str:
    """Return a digest of the library's Python files, which tells versions apart outside a checkout too."""
    digest, package = hashlib.sha256(), Path(sigattn.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def processor() -> str:
    """The processor's name, as far as the system tells, and what PyTorch uses of it."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a results file; a reader sees the earlier content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)
