"""What native code would give on a CPU with AVX-512: a C++ kernel compared with the operator and its baselines.

    python benchmarks/native_trial.py [LENGTH …]        (needs g++; results: runs/bench/native.json)

The kernel (native_trial.cpp) is compiled for this processor and is no part of the package: the operator needs no
compiler. It serves float32, heads of 64, full and causal attention. docs/log.md has the ratios.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigattn.bench import baselines, provenance
from sigattn.bench.baselines import BACKWARD, COMPILED_NAIVE, CPU_IMPLEMENTATIONS, FORWARD, NAIVE, OURS, SDPA, TRAINING
from sigattn.bench.inputs import Options, random_inputs
from sigattn.bench.timing import time_calls

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ROUNDS = 9
SCALE = 64**-0.5


def compile_kernel(folder: str) -> ctypes.CDLL:
    """Compile the kernel for this processor into a folder, and load it."""
    library = f"{folder}/native_trial.so"
    source = str(Path(__file__).with_suffix(".cpp"))
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return ctypes.CDLL(library)


def make_native(library: ctypes.CDLL) -> baselines.AttentionFunction:
    """Return the kernel as an attention function with a backward pass."""

    def call(function: Any, tensors: tuple[Tensor, ...], bias: float, causal: bool, scratch: Tensor) -> None:
        heads, n = tensors[0].shape[0] * tensors[0].shape[1], tensors[0].shape[2]
        numbers = (heads, n, ctypes.c_float(SCALE), ctypes.c_float(bias), int(causal))
        function(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), *numbers, ctypes.c_void_p(scratch.data_ptr()))

    class Native(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: float, causal: bool) -> Tensor:
            out = torch.empty_like(q)
            call(library.forward, (q, k, v, out), bias, causal, torch.empty_like(q))
            ctx.save_for_backward(q, k, v)
            ctx.options = (bias, causal)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            inputs = ctx.saved_tensors
            found = tuple(torch.empty_like(t) for t in inputs)
            tensors = (*inputs, gradients[0].contiguous(), *found)
            call(library.backward, tensors, *ctx.options, torch.empty(2 * inputs[0].numel()))
            return (*found, None, None)

    def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        out: Tensor = Native.apply(q, k, v, options.bias, options.causal)  # type: ignore[no-untyped-call]
        return out

    return attention


def measure(native: baselines.AttentionFunction, n: int, causal: bool) -> list[dict[str, Any]]:
    """Check and time the kernel, the operator and its baselines; return a row for each pass: their time over its."""
    baselines.reset_compiled()
    inputs = random_inputs(1, 8, n, 64, torch.float32, torch.device("cpu"), causal=causal, contiguous=True)
    implementations = {"native": baselines.Implementation(False, native, cpu=True), **CPU_IMPLEMENTATIONS}
    passes: dict[str, dict[str, Any]] = {FORWARD: {}, BACKWARD: {}, TRAINING: {}}
    for name, implementation in implementations.items():
        calls, _ = baselines.checked_passes(implementation, inputs)
        for direction in passes:
            passes[direction][name] = calls[direction]
    rows = []
    for direction, calls in passes.items():
        timing = time_calls(calls, ROUNDS)[0]
        others = {name: round(timing.ratios[name], 3) for name in (OURS, SDPA, NAIVE, COMPILED_NAIVE)}
        rows.append({"n": n, "causal": causal, "pass": direction, "native_ms": timing.seconds * 1e3, **others})
        print(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in rows[-1].items()
            )
        )
    return rows


def main() -> None:
    """Measure at the lengths of the command line."""
    lengths = tuple(int(n) for n in sys.argv[1:]) or LENGTHS
    if any(n < 64 or n % 64 for n in lengths):
        sys.exit(f"native_trial.py: lengths must be multiples of 64, got {' '.join(sys.argv[1:])}")
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        native = make_native(compile_kernel(folder))
        rows = [row for n in lengths for causal in (False, True) for row in measure(native, n, causal)]
    config = {"lengths": lengths, "rounds": ROUNDS, "threads": 2}
    provenance.write(Path("runs/bench/native.json"), {**provenance.describe("native", config), "rows": rows})


if __name__ == "__main__":
    main()
