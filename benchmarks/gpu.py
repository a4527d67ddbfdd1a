"""Run the steps of gpu.sh, each in a process of its own with a time limit, and keep the archive of results current."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outcomes

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE, SUMMARY = "results.tar.gz", "summary.txt"
TINY = os.environ.get("TRITON_INTERPRET") == "1"
GRACE = 6.0  # seconds between SIGINT, on which a step ends by itself, and SIGKILL
LONGEST_LOG = 48 * 1024  # bytes of a log that are kept, half of its start and half of its end
_QUICK = {"rounds": 1, "round_seconds": 0.0}
_TINY_TUNE = {"lengths": (64,), "heads": 1, "head_dims": (16,), "most_flops": 1e6, "most_candidates": 2, **_QUICK}
_TINY_KERNELS = {
    "lengths": (32, 64), "heads": 2, "head_dims": (16,), "batch": 1, "dtype": "float32", "precompile": False, **_QUICK
}  # fmt: skip
_TINY_TRAINING = {"seconds": 2.0, "steps": 2, "batch": 1, "upscale": 1, "layers": 1}


@dataclass(frozen=True)
class Step:
    """A part of the measurements.

    Attributes:
        name: of the step, its log and its results.
        seconds: at most, in one call.
        benchmark: module and configuration class in ``sigattn.bench``; ``settings`` are the configuration's, ``tiny``
            replaces some of them in a rehearsal.
        columns: of the results' rows, what the summary shows.
        pytest: arguments of pytest. under: a program that runs the step's Python, and its arguments.
        environment: variables of the step.
    """

    name: str
    seconds: int
    benchmark: tuple[str, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    pytest: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def last(self) -> tuple[int, ...]:
        """Exit codes after which nothing is left to do: of pytest also 1 (tests failed) and 5 (there were none)."""
        return (0, *((1, 5) if self.pytest else ()), *((_SANITIZER_FOUND,) if self.under == _SANITIZER else ()))


_RACE = ("n", "head_dim", "causal", "pass", "contestant", "batch", "ms", "graph_ms", "tflops")
_RACE += ("fastest_softmax_time_over_this", "error", "gradient_error")
_TUNE = ("kernel", "n", "head_dim", "causal", "config", "ms", "in_force_time_over_this", "faster", "rejected")
_MAIN = {"lengths": (1024, 4096, 16384), "alibi": False, "profile": False, "most_flops": 2e12, "seconds": 1e9}
_EAGER = ("cuDNN softmax", "flash softmax", "naive sigmoid", "triton-sigmoid", "flash-attn 3 softmax", "FlashSigmoid")
_SANITIZER_FOUND = 9
_SANITIZER = ("compute-sanitizer", "--error-exitcode", str(_SANITIZER_FOUND))
_NCU = (
    "ncu", "--clock-control", "none", "--kernel-name-base", "function",
    "--kernel-name", "regex:forward_kernel|keys_kernel|queries_kernel|fused_kernel|fwd_kernel|bwd_.*kernel",
    "--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis", "--section", "WarpStateStats",
    "--section", "LaunchStats", "--csv", "--page", "details",
)  # fmt: skip

STEPS = (
    Step("machine", 20),
    Step("sweep", 90, pytest=("tests/ops/test_kernel_sweep.py",)),
    Step("kernels", 110, ("kernels", "KernelBenchmark"), {**_MAIN, "contestants": _EAGER}, _TINY_KERNELS, _RACE),
    Step(
        "compiled", 100, ("kernels", "KernelBenchmark"),
        {**_MAIN, "contestants": ("cuDNN softmax", "Flex sigmoid", "compiled naive sigmoid")},
        {**_TINY_KERNELS, "contestants": ("SDPA on CPU",)}, _RACE,
    ),
    Step("variants", 60, ("tune", "TuneBenchmark"), {"variants": True, "rounds": 7, "seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step(
        "overhead", 30, ("overhead", "OverheadBenchmark"), {},
        {"n": 20, "heads": 1, "head_dim": 16, "batches": (1,), "dtype": "float32", **_QUICK},
        ("batch", "pass", "contestant", "microseconds", "graph_microseconds", "fastest_softmax_time_over_this"),
    ),
    Step(
        "decode", 45, ("decode", "DecodeBenchmark"), {"most_gib": 40.0, "batches": (1, 32), "prompts": (1024,)},
        {"contexts": (64,), "batches": (2,), "heads": 2, "kv_heads": 1, "head_dim": 16, "dtypes": ("float32",),
         "prompts": (), **_QUICK},
        ("context", "batch", "layout", "contestant", "median_ms", "gigabytes_per_second", "copy_time_over_this"),
    ),
    Step(
        "hybridnorm", 35, ("hybridnorm", "HybridNormBenchmark"), {},
        {"lengths": (32, 64), "heads": 2, "head_dim": 16, "dtype": "float32", **_QUICK},
        ("n", "causal", "contestant", "ms"),
    ),
    Step("vit", 40, ("training", "TrainingBenchmark"), {"kappas": (), "seconds": 12.0}, _TINY_TRAINING, ("*",)),
    Step(
        "training", 90, ("training", "TrainingBenchmark"), {"vision": False, "seconds": 18.0},
        {**_TINY_TRAINING, "kappas": (4,)}, ("*",),
    ),
    Step("profile", 90, ("tune", "TuneBenchmark"), {"variants": True}, _TINY_TUNE, under=_NCU),
    Step(
        "sanitizer", 60, pytest=("tests/ops/test_kernel_sweep.py",), under=_SANITIZER,
        environment={"SIGATTN_KERNEL_SWEEP": "12", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Step(
        "tests", 110,
        pytest=("tests/ops/test_triton.py", "tests/ops/test_repeats.py", "tests/ops/test_correctness.py",
                "tests/ops/test_dropout.py", "tests/test_flash.py", "tests/test_flash_kvcache.py",
                "-k", "triton or repeat"),
        environment={"SIGATTN_FUZZ_EXAMPLES": "3" if TINY else "12"},
    ),
    Step("hopper_tests", 80, pytest=("tests/ops/test_hopper.py", "-k", "on_a_gpu")),
    Step(
        "hopper_sanitizer", 60, pytest=("tests/ops/test_hopper.py", "-k", "tables_on_a_gpu and 64"), under=_SANITIZER,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Step(
        "accuracy", 40, ("accuracy", "AccuracyBenchmark"), {},
        {"lengths": (64, 256), "queries": 8, "head_dim": 16},
        ("dtype", "n", "contestant", "weights_mean", "weights_max", "output"),
    ),
    Step("tune", 240, ("tune", "TuneBenchmark"), {"seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step(
        "hopper_tune", 120, ("tune", "TuneBenchmark"), {"specialised": True, "lengths": (4096, 1024), "seconds": 1e9},
        _TINY_TUNE, _TUNE,
    ),
    Step("lengths", 240, ("kernels", "KernelBenchmark"), {"seconds": 1e9}, _TINY_KERNELS, _RACE),
)  # fmt: skip


# ---- one step, in a process of its own


def measure(step: Step, folder: Path) -> None:
    """Run a benchmark in this process; its results go into the folder, and continue what is there."""
    if step.name == "machine":
        measure_machine(folder)
        return
    module_name, class_name = step.benchmark or ("", "")
    module = importlib.import_module(f"sigattn.bench.{module_name}")
    settings = {**step.settings, **(step.tiny if TINY else {})}
    results = folder / (f"{step.name}.json" if module_name in ("overhead", "decode") else step.name)
    config = getattr(module, class_name)(results=results, resume=True, **settings)
    (module.run_once if step.under else module.run)(config)


def measure_machine(folder: Path) -> None:
    """Write what the machine is, and its rates of copying and of products in bfloat16: the ceilings of all else."""
    import torch
    import triton

    from sigattn.bench import gpu

    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda, "gpu": "none"}
    size = 64 if TINY else 8192
    a, b = torch.randn(2, size, size, device=gpu.device(), dtype=torch.bfloat16).unbind()
    source = torch.randn(size, 16 * size, device=gpu.device())
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    seconds = {name: t for name, t, _ in gpu.race(calls, 5, 0.05)}
    found["product_tflops"] = 2 * size**3 / seconds["product"] / 1e12
    found["copy_gigabytes_per_second"] = 2 * source.nbytes / seconds["copy"] / 1e9
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    (folder / "machine.json").write_text(json.dumps(found, indent=1))


def command(step: Step, folder: Path) -> list[str]:
    """The command line of a step."""
    under = [*step.under, "--log-file", str(folder / f"{step.name}.csv")] if step.under == _NCU else [*step.under]
    if not step.pytest:
        return [*under, sys.executable, __file__, str(folder), "--only-measure", step.name]
    options = ["-v", "-p", "no:cacheprovider", "-p", "outcomes", "-o", "filterwarnings=default", "--tb=short"]
    if not (TINY or step.under) and importlib.util.find_spec("xdist"):
        options += ["-p", "xdist.plugin", "-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout"):  # a kernel that never ends takes only its test with it
        options += ["-p", "pytest_timeout", "--timeout", "60", "--timeout-method", "thread"]
    return [*under, sys.executable, "-m", "pytest", *options, *step.pytest]


# ---- all steps


class Runner:
    """The steps in order, within the time there is.

    The results lie in a folder named by a fingerprint of source, GPU and PyTorch: results of other code stay in the
    archive, and are not mixed with those of this. OUT only ever holds whole files.
    """

    def __init__(self, out: Path, seconds: float, wheels: Path | None, earlier: Path | None) -> None:
        self.deadline = time.monotonic() + seconds
        self.out, self.process = out, None
        out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="sigattn-gpu-"))
        self.packed: Any = None
        self.pack_again_at = 0.0
        self.statuses: list[str] = []  # of the steps of this call
        earlier = earlier or out / ARCHIVE
        if earlier.exists():
            with tarfile.open(earlier) as archive:
                archive.extractall(self.work / "kept", filter="data")
        self.folder = self.work / "kept" / fingerprint()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins that happen to be installed
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the processes of sigattn.bench.trial are many already
        }
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
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
                elif self.left() < 2 * GRACE:
                    state.setdefault(step.name, {"status": "not begun", "complete": False})
                else:
                    state[step.name] = self.step(step)
                (self.folder / "state.json").write_text(json.dumps(state, indent=1))
                self.pack()

    def state(self) -> dict[str, Any]:
        """The steps so far, by name."""
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def left(self) -> float:
        """Seconds until everything is to be over."""
        return self.deadline - time.monotonic()

    def step(self, step: Step) -> dict[str, Any]:
        """Run a step within its time, again if its process ends early and had come further; return its state."""
        start = time.monotonic()
        end = min(start + step.seconds, self.deadline - GRACE - 2)
        print(f"== {step.name} (at most {end - start:.0f} s)", flush=True)
        status, complete = "", False
        while not status:
            before = self.results()
            code = self.process_of(step, end)
            if code in step.last:
                status, complete = "done" if code in (0, 5) else f"done, exit {code}", True
            elif time.monotonic() >= end:
                status = "cut off"
            elif self.results() == before:
                status = f"failed, exit {code}"
        seconds = time.monotonic() - start
        print(f"== {step.name}: {status} after {seconds:.0f} s", flush=True)
        self.statuses.append(status)
        return {"status": status, "complete": complete, "seconds": round(seconds, 1)}

    def process_of(self, step: Step, end: float) -> int:
        """Run the process of a step; at the end of its time send SIGINT, later SIGKILL. Pack what it writes."""
        environment = {**self.environment, **step.environment}
        if step.pytest:
            written, before = self.folder / f"{step.name}.jsonl", self.work / f"{step.name}-before.jsonl"
            before.write_bytes(written.read_bytes() if written.exists() else b"")
            environment |= {"SIGATTN_OUTCOMES": str(written), "SIGATTN_OUTCOMES_BEFORE": str(before)}
            environment["OMP_NUM_THREADS"] = "1"  # a process for each processor
        with open(self.folder / "logs" / f"{step.name}.log", "ab") as log:
            self.process = subprocess.Popen(
                command(step, self.folder), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, process_group=0, preexec_fn=_die_with_parent,
            )  # fmt: skip
        try:
            self.wait(end)
        finally:
            self.stop()
        return self.process.returncode

    def wait(self, end: float) -> None:
        """Wait for the process, and pack what it has changed, in a tenth of the time."""
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            if time.monotonic() > self.pack_again_at:
                start = time.monotonic()
                self.pack()
                self.pack_again_at = time.monotonic() + 10 * (time.monotonic() - start)

    def stop(self) -> None:
        """End the process and those it started."""
        for number, patience in ((signal.SIGINT, GRACE), (signal.SIGKILL, 5.0)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left behind

    def results(self) -> dict[str, bytes]:
        """The content of the result files, logs left out."""
        files = (path for path in self.folder.rglob("*.json*") if not path.name.startswith("."))
        return {str(path): hashlib.sha256(path.read_bytes()).digest() for path in files}

    def pack(self) -> None:
        """Replace the archive and the summary, if anything has changed."""
        root = self.work / "kept"
        files = sorted(path for path in root.rglob("[!.]*") if path.is_file() and path.suffix != ".png")
        seen = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.exists()]
        if seen == self.packed:
            return
        self.packed = seen
        temporary = self.out / f".{ARCHIVE}"
        with tarfile.open(temporary, "w:gz", compresslevel=6) as archive:
            for path in files:
                content = trimmed(path)
                entry = tarfile.TarInfo(str(path.relative_to(root)))
                entry.size, entry.mtime = len(content), int(time.time())
                archive.addfile(entry, io.BytesIO(content))
        temporary.replace(self.out / ARCHIVE)
        text = self.out / f".{SUMMARY}"
        text.write_text(summary(self.folder))
        text.replace(self.out / SUMMARY)


def trimmed(path: Path) -> bytes:
    """The content of a file, of a long log its start and its end."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # replaced at this moment
        return b""
    if path.suffix != ".log" or len(content) <= LONGEST_LOG:
        return content
    half = LONGEST_LOG // 2
    return content[:half] + b"\n[...]\n" + content[-half:]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def fingerprint() -> str:
    """A name for what is measured: the library's source, the versions of PyTorch and Triton, and the GPU."""
    digest = hashlib.sha256()
    for package in ("torch", "triton"):
        digest.update(importlib.metadata.version(package).encode())
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = [smi, "--query-gpu=name", "--format=csv"]
        digest.update(subprocess.run(query, capture_output=True, check=False).stdout)
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:10]


# ---- the summary


def summary(folder: Path) -> str:
    """Return what was measured as text: the machine, the steps, failed tests, and the rows of each benchmark."""
    lines = [f"results of {folder.name}"]
    for name in ("machine", "state"):
        path = folder / f"{name}.json"
        for key, value in json.loads(path.read_text()).items() if path.exists() else ():
            lines.append(f"{key}: {value['status'] if isinstance(value, dict) else str(value).strip()}")
    for step in STEPS:
        lines += _test_lines(step, folder) if step.pytest else _row_lines(step, folder)
    return "\n".join(lines) + "\n"


def _test_lines(step: Step, folder: Path) -> list[str]:
    found = list(outcomes.read(folder / f"{step.name}.jsonl").values())
    if not found:
        return []
    counts = {kind: sum(row["outcome"] == kind for row in found) for kind in ("passed", "failed", "skipped")}
    failed = [f"FAILED {row['test']}: {row.get('why', '')[:300]}" for row in found if row["outcome"] == "failed"]
    log = folder / "logs" / f"{step.name}.log"
    said = [line for line in log.read_text(errors="replace").splitlines() if "=========" in line] if step.under else []
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
    reasons = {name.partition(",")[0]: reason for name, reason in report["absent"].items()}
    lines += [f"absent: {name}: {reason[:160]}" for name, reason in reasons.items()]
    return lines + [f"given up, its process ended twice: {case}" for case in report["given_up"]]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def main() -> int:
    """Run what the command line asks for; return 1 if a step of this call failed."""
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
