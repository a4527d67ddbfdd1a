"""Results stored in files: what is stored with the same settings is neither trained nor measured again."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.workers import run_in_workers
from sigattn.files import write_text
from sigattn.train.config import TrainConfig


def identity_hash(task: Any, model: Any, training: TrainConfig, data: str, **more: Any) -> str:
    """Return a hash of everything that a finished run depends on, including settings that may change when resuming.

    Args:
        task, model, training: the configuration. data: ``Data.fingerprint``. more: further settings, as JSON.
    """
    parts = {"task": task, "model": model, "training": training}
    about: dict[str, Any] = {n: {"kind": type(part).__name__, **asdict(part)} for n, part in parts.items()}
    text = json.dumps({**about, "data": data, "more": more}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Job:
    """Call whose result is stored in a file.

    Attributes:
        file: the file. settings: everything that the result depends on, as JSON. call: returns the result, as JSON.
    """

    file: Path
    settings: dict[str, Any]
    call: Callable[[], Any]

    def stored(self) -> Any | None:
        """Return the result in the file, or None if there is none or it is of other settings."""
        try:
            content = json.loads(self.file.read_text())
            return content["value"] if content["settings"] == json.loads(json.dumps(self.settings)) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def run(self) -> Any:
        """Return the stored result; without one, call and store."""
        if (value := self.stored()) is None:
            text = json.dumps({"settings": self.settings, "value": self.call()})
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, text + "\n")
            value = json.loads(text)["value"]
        return value


def run_jobs(jobs: Mapping[str, Job], workers: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the results by name; those that are not stored are computed in parallel, with one thread each.

    Args:
        jobs: the jobs by name. workers: number of jobs at a time. log: called with a line for each computed result.
    """
    missing = {name: partial(_run_alone, job) for name, job in jobs.items() if job.stored() is None}
    computed = {}
    for name, computed[name] in run_in_workers(missing, workers):
        log(f"{len(computed)} of {len(missing)} runs: {name}")
    return {name: computed[name] if name in computed else job.stored() for name, job in jobs.items()}


def _run_alone(job: Job) -> Any:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*Ramapuram")
    return job.run()
