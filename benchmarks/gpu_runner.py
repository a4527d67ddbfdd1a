"""Run the steps of gpu.sh, each in a subprocess with a time limit, and keep the archive of results up to date."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import STEPS, TINY, Step, command, measure
from benchmarks.gpu_summary import summary

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE, SUMMARY = "results.tar.gz", "summary.txt"
RUNNING = "running"
GRACE = 6.0  # seconds between SIGINT, on which a step ends by itself, and SIGKILL
MAX_LOG_BYTES = 48 * 1024  # of a log in the archive: the start and the end


class Runner:
    """Runner of the steps, in order and within the time limit.

    The results are in a folder named by a fingerprint of source, GPU, PyTorch and wheels: results of other code stay in
    the archive and are not mixed with these. Files in OUT are replaced atomically.
    """

    def __init__(self, out: Path, seconds: float, wheels: Path | None, earlier: Path | None) -> None:
        self.deadline = time.monotonic() + seconds
        self.out = out
        self.process: Any = None
        out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="sigattn-gpu-"))
        self.packed: Any = None
        self.pack_again_at = 0.0
        self.statuses: list[str] = []  # of the steps of this call
        for path in (earlier, out / ARCHIVE):
            if path is not None and path.exists():
                with tarfile.open(path) as archive:
                    archive.extractall(self.work / "kept", filter="data")
        found = sorted(wheels.glob("*.whl")) if wheels else []
        self.folder = self.work / "kept" / fingerprint([wheel.name for wheel in found])
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.forget_interrupted_attempts()
        self.environment = {
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # installed plugins are not needed
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # benchmarks.subprocesses runs in parallel already
        }
        for wheel in found:
            zipfile.ZipFile(wheel).extractall(self.work / "wheels")
            self.environment["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{self.work / 'wheels'}"

    def run(self, names: list[str]) -> None:
        """Run the named steps that are not complete yet."""
        state = self.state()
        for step in STEPS:
            if step.name in names and not state.get(step.name, {}).get("complete"):
                if step.under and not TINY and shutil.which(step.under[0]) is None:
                    state[step.name] = {"status": f"{step.under[0]} is not installed", "complete": False}
                elif step.under and TINY:
                    state[step.name] = {"status": "not part of a rehearsal", "complete": False}
                elif self.seconds_left() < 2 * GRACE:
                    state.setdefault(step.name, {"status": "not begun", "complete": False})
                else:
                    state[step.name] = {"status": RUNNING, "complete": False}
                    self.write_state(state)
                    state[step.name] = self.run_step(step)
                self.write_state(state)

    def state(self) -> dict[str, Any]:
        """Return the state of the steps so far, by name."""
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write_state(self, state: dict[str, Any]) -> None:
        """Write the state of the steps."""
        (self.folder / "state.json").write_text(json.dumps(state, indent=1))
        self.pack()

    def forget_interrupted_attempts(self) -> None:
        """Do not count the last attempt at a case during which an earlier call was killed."""
        for name, state in self.state().items():
            if state["status"] == RUNNING:
                for path in (self.folder / f"{name}.json", *(self.folder / name).glob("[!.]*.json")):
                    if path.exists():
                        path.write_text(json.dumps(json.loads(path.read_text()) | {"attempts": {}}, indent=1))

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run_step(self, step: Step) -> dict[str, Any]:
        """Run a step within its time limit, again if its process crashed after some progress; return its state."""
        start = time.monotonic()
        end = min(start + step.seconds, self.deadline - GRACE - 2)
        print(f"== {step.name} (at most {end - start:.0f} s)", flush=True)
        status, complete = "", False
        while not status:
            before = self.progress()
            code = self.run_process(step, end)
            if code in step.final_codes:
                status, complete = "done" if code in (0, 5) else f"done, exit {code}", True
            elif time.monotonic() >= end:
                status = "cut off"
            elif self.progress() == before:
                status = f"failed, exit {code}"
        seconds = time.monotonic() - start
        print(f"== {step.name}: {status} after {seconds:.0f} s", flush=True)
        self.statuses.append(status)
        return {"status": status, "complete": complete, "seconds": round(seconds, 1)}

    def run_process(self, step: Step, end: float) -> int:
        """Run a step once in a subprocess; at the end of its time send SIGINT, later SIGKILL. Return the exit code."""
        environment = {**self.environment, **step.environment}
        if step.pytest:
            written, before = self.folder / f"{step.name}.jsonl", self.work / f"{step.name}-before.jsonl"
            before.write_bytes(written.read_bytes() if written.exists() else b"")
            environment |= {"SIGATTN_OUTCOMES": str(written), "SIGATTN_OUTCOMES_BEFORE": str(before)}
            environment["OMP_NUM_THREADS"] = "1"  # the tests use one process for each processor
        with open(self.folder / "logs" / f"{step.name}.log", "ab") as log:
            self.process = subprocess.Popen(
                command(step, self.folder), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, process_group=0, preexec_fn=_set_signals,
            )  # fmt: skip
        try:
            self.wait(end)
        finally:
            self.stop()
        return self.process.returncode

    def wait(self, end: float) -> None:
        """Wait for the process and update the archive meanwhile, at most a tenth of the time."""
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            if time.monotonic() > self.pack_again_at:
                start = time.monotonic()
                self.pack()
                self.pack_again_at = time.monotonic() + 10 * (time.monotonic() - start)

    def stop(self) -> None:
        """End the process and its children."""
        for number, patience in ((signal.SIGINT, GRACE), (signal.SIGKILL, 5.0)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # remaining children

    def progress(self) -> list[Any]:
        """Return values that change when a case or a test has been finished or attempted."""
        reports = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*/[!.]*.json"))]
        reports += [json.loads(path.read_text()) for path in sorted(self.folder.glob("[!.]*.json"))]
        outcomes = [path.stat().st_size for path in sorted(self.folder.glob("*.jsonl"))]
        return [*outcomes, *([report.get(key) for key in ("done", "given_up", "attempts")] for report in reports)]

    def pack(self) -> None:
        """Replace the archive and the summary, if anything has changed."""
        root = self.work / "kept"
        files = sorted(path for path in root.rglob("[!.]*") if path.is_file())
        seen = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.exists()]
        if seen == self.packed:
            return
        self.packed = seen
        temporary = self.out / f".{ARCHIVE}"
        with tarfile.open(temporary, "w:gz", compresslevel=6) as archive:
            for path in files:
                content = read_trimmed(path)
                entry = tarfile.TarInfo(str(path.relative_to(root)))
                entry.size, entry.mtime = len(content), int(time.time())
                archive.addfile(entry, io.BytesIO(content))
        temporary.replace(self.out / ARCHIVE)
        try:
            text = summary(self.folder, STEPS)
        except Exception as error:  # the archive matters more
            text = f"no summary: {type(error).__name__}: {error}\n"
        temporary = self.out / f".{SUMMARY}"
        temporary.write_text(text)
        temporary.replace(self.out / SUMMARY)


def read_trimmed(path: Path) -> bytes:
    """Return the content of a file; the start and the end of a long log."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # replaced at this moment
        return b""
    if path.suffix != ".log" or len(content) <= MAX_LOG_BYTES:
        return content
    half = MAX_LOG_BYTES // 2
    return content[:half] + b"\n[...]\n" + content[-half:]


def _set_signals() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for commands that it starts in the background


def fingerprint(wheels: list[str]) -> str:
    """Return a digest of the code, the versions of PyTorch and Triton, the baselines and the GPU."""
    digest = hashlib.sha256(" ".join(wheels).encode())
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # Triton has other names on other devices
            digest.update(importlib.metadata.version(package).encode())
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = [smi, "--query-gpu=name", "--format=csv"]
        digest.update(subprocess.run(query, capture_output=True, check=False).stdout)
    for path in sorted(p for folder in ("src", "benchmarks") for p in (ROOT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def main() -> int:
    """Run the chosen steps; return 1 if a step of this call failed."""
    parser = argparse.ArgumentParser(description="see gpu.sh")
    parser.add_argument("out", type=Path)
    parser.add_argument("--from", dest="earlier", type=Path)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--steps", default=",".join(step.name for step in STEPS))
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--only-measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    steps = {step.name: step for step in STEPS}
    if given.only_measure:
        measure(steps[given.only_measure], given.out)
        return 0
    names = given.steps.split(",")
    if unknown := set(names) - steps.keys():
        parser.error(f"no such steps: {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    for path in (given.earlier, given.wheels):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner(given.out.resolve(), given.seconds, given.wheels, given.earlier)
    try:
        runner.run(names)
    finally:
        runner.pack()
        print((runner.out / SUMMARY).read_text()[:10_000], flush=True)
        shutil.rmtree(runner.work, ignore_errors=True)
    return 1 if any(status.startswith(("failed", "done, ")) for status in runner.statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
