"""Provenance of a measurement: the entries at the head of every results file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sigattn
from sigattn.validation import UserError

ROOT = Path(__file__).resolve().parents[1]  # of the repository


class BenchmarkError(UserError, RuntimeError):
    """A benchmark cannot run on this machine; the message gives the reason and the remedy."""


def describe(benchmark: str, config: Any, *, gpu: bool = False) -> dict[str, Any]:
    """Return benchmark, date, commit, digest of the source, device, versions and configuration.

    Args:
        benchmark: name of the benchmark.
        config: configuration, a dataclass or a mapping; where results are written is left out.
        gpu: name the GPU as device, if there is one, and mark results of interpreted kernels.
    """
    configuration = config if isinstance(config, Mapping) else asdict(config)
    versions = {"sigattn": sigattn.__version__, "torch": torch.__version__, "python": platform.python_version()}
    device = processor_name()
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["triton"] = metadata.version("triton")
    if gpu and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda or torch.version.hip or "unknown"
    elif gpu and os.environ.get("TRITON_INTERPRET") == "1":
        device += ", kernels interpreted: times are meaningless"
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "source": source_digest(),
        "device": device,
        "versions": versions,
        "configuration": {key: value for key, value in configuration.items() if key != "results"},
    }


def _code() -> tuple[Path, ...]:
    return Path(sigattn.__file__).resolve().parent, ROOT / "experiments", ROOT / "benchmarks"


def commit() -> str:
    """Return the commit of the running code, with "+" if its files were changed; "unknown" outside a checkout."""
    status = ["status", "--porcelain", "--", *(f":(glob){folder}/**/*.py" for folder in _code())]
    try:
        head, changed = (
            subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], status)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed else "")


def source_digest() -> str:
    """Return a digest of the running code's files, which identifies the version outside a checkout too."""
    digest = hashlib.sha256()
    for folder in _code():
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder.parent)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def processor_name() -> str:
    """Return the processor's name, if the system gives one, and the instruction set that PyTorch uses."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a results file atomically: a reader sees the earlier content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)
