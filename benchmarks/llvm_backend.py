"""Backend "llvm" compared with "blocked" and the baselines on a CPU: times of forward and backward over its own.

To know whether to pass it on a processor where it is not the default.

python -m benchmarks.llvm_backend [LENGTH …]        (needs llvmlite; results: runs/benchmarks/llvm.json)
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sigattn
from benchmarks import baselines, provenance
from benchmarks.baselines import (
    BACKWARD,
    COMPILED_NAIVE,
    CPU_IMPLEMENTATIONS,
    FORWARD,
    NAIVE,
    SDPA,
    TRAINING,
    Implementation,
)
from benchmarks.inputs import Options, random_inputs
from benchmarks.timing import time_calls
from sigattn.ops.llvm import calls

LENGTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096)
DTYPES = torch.float32, torch.bfloat16
ROUNDS = 9
LLVM, BLOCKED = "llvm", "blocked"


def implementation(backend: str) -> Implementation:
    """Return sigmoid attention with a backend."""

    def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        return sigattn.sigmoid_attention(q, k, v, is_causal=options.causal, bias=options.bias, backend=backend)

    return Implementation(False, attention, cpu=True)


def measure(n: int, dtype: torch.dtype, causal: bool) -> list[dict[str, Any]]:
    """Check and time both backends and the baselines; return a row for each pass: their time over that of "llvm"."""
    baselines.reset_compiled()
    inputs = random_inputs(1, 8, n, 64, dtype, torch.device("cpu"), causal=causal, contiguous=True)
    peers = {name: CPU_IMPLEMENTATIONS[name] for name in (SDPA, NAIVE, COMPILED_NAIVE)}
    implementations = {**{name: implementation(name) for name in (LLVM, BLOCKED)}, **peers}
    passes: dict[str, dict[str, Any]] = {FORWARD: {}, BACKWARD: {}, TRAINING: {}}
    for name, implemented in implementations.items():
        calls, _ = baselines.checked_passes(implemented, inputs)
        for direction in passes:
            passes[direction][name] = calls[direction]
    rows = []
    for direction, calls in passes.items():
        timing = time_calls(calls, ROUNDS)[0]
        others = {name: round(timing.ratios[name], 3) for name in (BLOCKED, SDPA, NAIVE, COMPILED_NAIVE)}
        case = {"n": n, "dtype": str(dtype).removeprefix("torch."), "causal": causal, "pass": direction}
        rows.append({**case, "llvm_ms": timing.seconds * 1e3, **others})
        print(
            "  ".join(
                f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in rows[-1].items()
            )
        )
    return rows


def main() -> None:
    """Measure at the lengths of the command line."""
    lengths = tuple(int(n) for n in sys.argv[1:]) or LENGTHS
    torch.set_num_threads(2)
    start = time.perf_counter()
    for dtype in DTYPES:
        calls.kernels(dtype)
    seconds = time.perf_counter() - start
    print(f"compiled in {seconds:.2f} s")
    cases = itertools.product(lengths, DTYPES, (False, True))
    rows = [row for case in cases for row in measure(*case)]
    config = {"lengths": lengths, "rounds": ROUNDS, "threads": 2}
    result = {**provenance.describe("llvm", config), "compile_seconds": seconds, "rows": rows}
    provenance.write(Path("runs/benchmarks/llvm.json"), result)


if __name__ == "__main__":
    main()
