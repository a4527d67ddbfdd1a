"""The steps of gpu.sh in their order: what each measures, for how long, and in which process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TINY = os.environ.get("TRITON_INTERPRET") == "1"
_QUICK = {"rounds": 1, "round_seconds": 0.0}
_TINY_TUNE = {"lengths": (64,), "heads": 1, "head_dims": (16,), "most_flops": 1e6, "most_candidates": 2, **_QUICK}
_TINY_KERNELS = {
    "lengths": (32, 64), "heads": 2, "head_dims": (16,), "batch": 1, "dtype": "float32", "precompile": False, **_QUICK
}  # fmt: skip
_TINY_DECODE = {
    "contexts": (64,), "batches": (2,), "heads": 2, "kv_heads": 1, "head_dim": 16, "dtypes": ("float32",),
    "prompts": (), **_QUICK
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


_RACE = ("n", "head_dim", "causal", "pass", "implementation", "batch", "ms", "graph_ms", "tflops")
_RACE += ("fastest_softmax_time_over_this", "error", "gradient_error")
_TUNE = ("kernel", "n", "head_dim", "causal", "config", "ms", "current_time_over_this", "faster", "error")
_TUNE += ("rejected",)
_DECODE = ("context", "batch", "layout", "implementation", "median_ms", "gigabytes_per_second", "copy_time_over_this")
_MAIN = {"lengths": (1024, 4096, 16384), "alibi": False, "profile": False, "most_flops": 5e11, "draw": False}
_MAIN |= {"seconds": 1e9}
_EAGER = ("cuDNN softmax", "flash softmax", "naive sigmoid", "triton-sigmoid", "flash-attn 3 softmax", "FlashSigmoid")
_COMPILED = ("cuDNN softmax", "Flex sigmoid", "compiled naive sigmoid")
_TESTS = tuple(
    f"tests/ops/test_{name}.py" for name in ("triton", "launch_cache", "correctness", "dropout", "block_mask")
)
_TESTS += ("tests/test_flash.py", "tests/test_flash_kvcache.py", "tests/flash/test_packing.py")
_SANITIZER_FOUND = 9
_SANITIZER = ("compute-sanitizer", "--error-exitcode", str(_SANITIZER_FOUND))
_NCU = (
    "ncu", "--clock-control", "none", "--kernel-name-base", "function",
    "--kernel-name", "regex:fwd_kernel|bwd_dkdv_kernel|bwd_dq_kernel|fused_kernel|fwd_kernel|bwd_.*kernel",
    "--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis", "--section", "WarpStateStats",
    "--section", "LaunchStats", "--csv", "--page", "details",
)  # fmt: skip

# fmt: off
STEPS = (
    Step("machine", 20),
    Step("sweep", 110, pytest=("tests/ops/test_kernel_sweep.py",)),
    Step("kernels", 110, ("kernels", "KernelBenchmark"), {**_MAIN, "baselines": _EAGER}, _TINY_KERNELS, _RACE),
    Step("compiled", 120, ("kernels", "KernelBenchmark"), {**_MAIN, "baselines": _COMPILED},
         {**_TINY_KERNELS, "baselines": ("SDPA softmax",)}, _RACE),
    Step("variants", 60, ("tune", "TuneBenchmark"), {"variants": True, "rounds": 7, "seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step("overhead", 30, ("overhead", "OverheadBenchmark"), {},
         {"n": 20, "heads": 1, "head_dim": 16, "batches": (1,), "dtype": "float32", **_QUICK},
         ("batch", "pass", "implementation", "microseconds", "graph_microseconds", "fastest_softmax_time_over_this")),
    Step("decode", 45, ("decode", "DecodeBenchmark"),
         {"most_gib": 40.0, "batches": (1, 32), "prompts": (1024,), "flex": False}, _TINY_DECODE, _DECODE),
    Step("hybridnorm", 35, ("hybridnorm", "HybridNormBenchmark"), {},
         {"lengths": (32, 64), "heads": 2, "head_dim": 16, "dtype": "float32", **_QUICK},
         ("n", "causal", "implementation", "ms")),
    Step("vit", 40, ("training", "TrainingBenchmark"), {"kappas": (), "seconds": 12.0}, _TINY_TRAINING, ("*",)),
    Step("training", 90, ("training", "TrainingBenchmark"), {"vision": False, "seconds": 18.0},
         {**_TINY_TRAINING, "kappas": (4,)}, ("*",)),
    Step("profile", 90, ("tune", "TuneBenchmark"), {"variants": True}, _TINY_TUNE, under=_NCU),
    Step("sanitizer", 60, pytest=("tests/ops/test_kernel_sweep.py",), under=_SANITIZER,
         environment={"SIGATTN_KERNEL_SWEEP": "12", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    Step("tests", 110, pytest=(*_TESTS, "-k", "triton or launch_cache"),
         environment={"SIGATTN_FUZZ_EXAMPLES": "3" if TINY else "12"}),
    Step("hopper_tests", 80, pytest=("tests/ops/test_hopper.py", "-k", "on_a_gpu")),
    Step("hopper_sanitizer", 60, pytest=("tests/ops/test_hopper.py", "-k", "tables_on_a_gpu and 64"),
         under=_SANITIZER, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    Step("accuracy", 80, ("accuracy", "AccuracyBenchmark"), {"draw": False},
         {"lengths": (64, 256), "queries": 8, "head_dim": 16},
         ("dtype", "n", "implementation", "weights_mean", "weights_max", "output")),
    Step("decode_flex", 60, ("decode", "DecodeBenchmark"),  # FlexAttention is compiled for each of them
         {"contexts": (4096, 65_536), "batches": (1, 32), "prompts": ()}, _TINY_DECODE, _DECODE),
    Step("tune", 240, ("tune", "TuneBenchmark"), {"seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step("hopper_tune", 120, ("tune", "TuneBenchmark"),
         {"specialised": True, "lengths": (4096, 1024), "seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step("lengths", 240, ("kernels", "KernelBenchmark"), {"draw": False, "seconds": 1e9}, _TINY_KERNELS, _RACE),
)
# fmt: on


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

    from sigattn.bench import gpu, provenance

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
        if (smi := shutil.which("nvidia-smi")) is not None:
            query = [smi, f"--query-gpu={fields}", "--format=csv"]
            found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    provenance.write(folder / "machine.json", found)


def command(step: Step, folder: Path) -> list[str]:
    """The command line of a step."""
    under = [*step.under, "--log-file", str(folder / f"{step.name}.csv")] if step.under == _NCU else [*step.under]
    if not step.pytest:
        program = str(Path(__file__).with_name("gpu.py"))
        return [*under, sys.executable, program, str(folder), "--only-measure", step.name]
    options = ["-v", "-p", "no:cacheprovider", "-p", "outcomes", "-o", "filterwarnings=default", "--tb=short"]
    if not (TINY or step.under) and importlib.util.find_spec("xdist"):
        options += ["-p", "xdist.plugin", "-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout"):  # a kernel that never ends takes only its test with it
        options += ["-p", "pytest_timeout", "--timeout", "120", "--timeout-method", "thread"]
    return [*under, sys.executable, "-m", "pytest", *options, *step.pytest]
