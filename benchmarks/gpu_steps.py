"""Steps of gpu.sh in their order: benchmark or tests, time limit, settings."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TINY = os.environ.get("TRITON_INTERPRET") == "1"
_QUICK = {"rounds": 1, "round_seconds": 0.0}
_TINY_TUNE = {"lengths": (64,), "num_heads": 1, "head_dims": (16,), "max_flops": 1e6, "max_candidates": 2, **_QUICK}
_TINY_KERNELS = {
    "lengths": (32, 64), "num_heads": 2, "head_dims": (16,), "batch_size": 1, "dtype": "float32", "precompile": False,
    **_QUICK
}  # fmt: skip
_TINY_DECODE = {
    "context_lengths": (64,), "batch_sizes": (2,), "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "dtypes": ("float32",), "prompt_lengths": (), **_QUICK
}  # fmt: skip
_TINY_TRAINING = {"seconds": 2.0, "max_steps": 2, "batch_size": 1, "upscale": 1, "num_layers": 1}


@dataclass(frozen=True)
class Step:
    """One step of the measurements.

    Attributes:
        name: name of the step, its log and its results.
        seconds: time limit in one call.
        benchmark: module, configuration class and function in ``benchmarks``.
        settings: settings of the configuration.
        tiny: settings that are replaced in a rehearsal.
        columns: columns of the rows in the summary; "*" for all.
        pytest: arguments of pytest.
        under: command under which the step's Python runs, such as a profiler.
        environment: environment variables of the step.
    """

    name: str
    seconds: int
    benchmark: tuple[str, str, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    pytest: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def final_codes(self) -> tuple[int, ...]:
        """Exit codes after which the step is complete: for pytest also 1 (tests failed) and 5 (no tests)."""
        return (0, *((1, 5) if self.pytest else ()), *((_SANITIZER_FOUND,) if self.under == _SANITIZER else ()))


_TIMES: tuple[str, ...] = (
    "n",
    "head_dim",
    "causal",
    "pass",
    "implementation",
    "batch_size",
    "ms",
    "graph_ms",
    "tflops",
)
_TIMES += ("fastest_softmax_time_over_this", "error", "gradient_error")
_TUNE: tuple[str, ...] = (
    "kernel",
    "n",
    "head_dim",
    "causal",
    "config",
    "ms",
    "current_time_over_this",
    "faster",
    "error",
)
_TUNE += ("rejected",)
_DECODE: tuple[str, ...] = (
    "context_length",
    "batch_size",
    "layout",
    "implementation",
    "median_ms",
    "gigabytes_per_second",
)
_DECODE += ("copy_time_over_this",)
_KERNELS = ("kernels", "KernelBenchmark", "benchmark_kernels")
_TUNING = ("tune", "TuneBenchmark", "tune_kernels")
_DECODING = ("decode", "DecodeBenchmark", "benchmark_decode")
_TRAINING = ("training", "TrainingBenchmark", "benchmark_training")
_MAIN = {"lengths": (1024, 4096, 16384), "alibi": False, "profile": False, "max_flops": 5e11, "plot": False}
_MAIN |= {"max_seconds": 1e9}
_EAGER = ("cuDNN softmax", "flash softmax", "naive sigmoid", "triton-sigmoid", "flash-attn 3 softmax", "FlashSigmoid")
_COMPILED = ("cuDNN softmax", "Flex sigmoid", "compiled naive sigmoid")
_TESTS = tuple(
    f"tests/ops/test_{name}.py" for name in ("triton", "launch_cache", "correctness", "dropout", "block_mask")
)
_TESTS += ("tests/test_flash.py", "tests/test_flash_kvcache.py")
_SANITIZER_FOUND = 9
_SANITIZER = ("compute-sanitizer", "--error-exitcode", str(_SANITIZER_FOUND))
_NCU = (
    "ncu", "--clock-control", "none", "--kernel-name-base", "function",
    "--kernel-name", "regex:fwd_kernel|bwd_.*kernel",
    "--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis", "--section", "WarpStateStats",
    "--section", "LaunchStats", "--csv", "--page", "details",
)  # fmt: skip

# fmt: off
STEPS: tuple[Step, ...] = (
    Step("machine", 20),
    Step("sweep", 110, pytest=("tests/ops/test_kernel_sweep.py",)),
    Step("kernels", 110, _KERNELS, {**_MAIN, "baselines": _EAGER}, _TINY_KERNELS, _TIMES),
    Step("compiled", 120, _KERNELS, {**_MAIN, "baselines": _COMPILED},
         {**_TINY_KERNELS, "baselines": ("SDPA softmax",)}, _TIMES),
    Step("variants", 60, _TUNING, {"variants": True, "rounds": 7, "max_seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step("overhead", 30, ("overhead", "OverheadBenchmark", "benchmark_overhead"), {},
         {"n": 20, "num_heads": 1, "head_dim": 16, "batch_sizes": (1,), "dtype": "float32", **_QUICK},
         ("batch_size", "pass", "implementation", "microseconds", "graph_microseconds",
          "fastest_softmax_time_over_this")),
    Step("decode", 45, _DECODING,
         {"max_gib": 40.0, "batch_sizes": (1, 32), "prompt_lengths": (1024,), "flex": False}, _TINY_DECODE, _DECODE),
    Step("hybridnorm", 35, ("hybridnorm", "HybridNormBenchmark", "benchmark_hybridnorm"), {},
         {"lengths": (32, 64), "num_heads": 2, "head_dim": 16, "dtype": "float32", **_QUICK},
         ("n", "causal", "implementation", "ms")),
    Step("vit", 40, _TRAINING, {"kappas": (), "seconds": 12.0}, _TINY_TRAINING, ("*",)),
    Step("training", 90, _TRAINING, {"vision": False, "seconds": 18.0},
         {**_TINY_TRAINING, "kappas": (4,)}, ("*",)),
    Step("profile", 90, _TUNING, {"variants": True}, _TINY_TUNE, under=_NCU),
    Step("sanitizer", 60, pytest=("tests/ops/test_kernel_sweep.py",), under=_SANITIZER,
         environment={"SIGATTN_KERNEL_SWEEP": "12", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    Step("tests", 110, pytest=(*_TESTS, "-k", "triton or launch_cache or cuda_graph"),
         environment={"SIGATTN_FUZZ_EXAMPLES": "3" if TINY else "12"}),
    Step("hopper_tests", 80, pytest=("tests/ops/test_hopper.py", "-k", "on_a_gpu")),
    Step("hopper_sanitizer", 60, pytest=("tests/ops/test_hopper.py", "-k", "tables_on_a_gpu and 72"),
         under=_SANITIZER, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    Step("accuracy", 80, ("accuracy", "AccuracyBenchmark", "benchmark_accuracy"), {"plot": False},
         {"lengths": (64, 256), "queries": 8, "head_dim": 16},
         ("dtype", "n", "implementation", "weights_mean", "weights_max", "output")),
    Step("decode_flex", 60, _DECODING,  # FlexAttention is compiled for each
         {"context_lengths": (4096, 65_536), "batch_sizes": (1, 32), "prompt_lengths": ()}, _TINY_DECODE, _DECODE),
    Step("tune", 240, _TUNING, {"max_seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step("hopper_tune", 120, _TUNING,
         {"warp_specialized": True, "lengths": (4096, 1024), "max_seconds": 1e9}, _TINY_TUNE, _TUNE),
    Step("lengths", 240, _KERNELS, {"plot": False, "max_seconds": 1e9}, _TINY_KERNELS, _TIMES),
)
# fmt: on
if TINY:  # the limits are for a GPU; a rehearsal imports PyTorch in each of its subprocesses, on a CPU
    STEPS = tuple(replace(step, seconds=10 * step.seconds) for step in STEPS)


def measure(step: Step, folder: Path) -> None:
    """Run a benchmark in this process and write its results into the folder; earlier results there are resumed."""
    if step.name == "machine":
        measure_machine(folder)
        return
    module_name, class_name, function = step.benchmark or ("", "", "")
    module = importlib.import_module(f"benchmarks.{module_name}")
    settings = {**step.settings, **(step.tiny if TINY else {})}
    results = folder / (f"{step.name}.json" if module_name in ("overhead", "decode") else step.name)
    config = getattr(module, class_name)(results=results, resume=True, **settings)
    getattr(module, "run_for_profiler" if step.under else function)(config)


def measure_machine(folder: Path) -> None:
    """Write the machine's versions and its rates of copies and of bfloat16 products, upper limits for the kernels."""
    import torch
    import triton

    from benchmarks import gpu, provenance
    from benchmarks.timing import time_calls

    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda, "gpu": "none"}
    size = 64 if TINY else 8192
    a, b = torch.randn(2, size, size, device=gpu.device(), dtype=torch.bfloat16).unbind()
    source = torch.randn(size, 16 * size, device=gpu.device())
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    seconds = {name: t for name, t, _ in time_calls(calls, 5, 0.05)}
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
    """Return the command line of a step."""
    under = [*step.under, "--log-file", str(folder / f"{step.name}.csv")] if step.under == _NCU else [*step.under]
    if not step.pytest:
        return [*under, sys.executable, "-m", "benchmarks.gpu_runner", str(folder), "--only-measure", step.name]
    options = [
        "-v",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.outcomes",
        "-o",
        "filterwarnings=default",
        "--tb=short",
    ]
    if not (TINY or step.under) and importlib.util.find_spec("xdist"):
        options += ["-p", "xdist.plugin", "-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout"):  # a kernel that never ends fails only its test
        options += ["-p", "pytest_timeout", "--timeout", "120", "--timeout-method", "thread"]
    return [*under, sys.executable, "-m", "pytest", *options, *step.pytest]
