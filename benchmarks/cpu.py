"""``python -m benchmarks cpu``: the operator compared with its baselines on a CPU.

Baselines are softmax by PyTorch's ``scaled_dot_product_attention`` and sigmoid attention as a plain formula, eager and
compiled. Each is checked against float64 before it is timed. Use the ratios: absolute times vary with the load of the
machine, a ratio is the median over rounds in which all ran in turn. "of matmul" is the share of the speed of
``torch.matmul`` with square matrices of 1,024, in the same rounds: of the products alone, half of them if causal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import baselines, isa, memory, provenance
from benchmarks.baselines import (
    BACKWARD,
    COMPILED_NAIVE,
    CPU_IMPLEMENTATIONS,
    FORWARD,
    NAIVE,
    OURS,
    SDPA,
    TRAINING,
    Implementation,
    with_backend,
)
from benchmarks.inputs import DTYPES, check_not_empty, random_inputs
from benchmarks.tables import print_rows
from benchmarks.timing import time_calls
from sigattn.validation import check_among, check_at_least, check_not_negative, check_output_file

_COLUMNS = {
    "pass": ("pass", ""),
    "dtype": ("dtype", ""),
    "mask": ("causal", ""),
    "": ("implementation", ""),
    "ms": ("median_ms", ".3f"),
    "× softmax": ("softmax_time_over_this", ".2f"),
    "× naive": ("naive_time_over_this", ".2f"),
    "of matmul": ("of_matmul", ".2f"),
    "error": ("relative_error", ".1e"),
}


_MATMUL, _MATMUL_SIZE = "torch.matmul", 1024
_PRODUCTS = {FORWARD: 2, BACKWARD: 5, TRAINING: 7}  # of matrices of n queries, n keys and the features of a head


@dataclass(frozen=True, kw_only=True)
class CpuBenchmark:
    """Configuration of the CPU benchmark.

    Attributes:
        lengths: numbers of tokens n that are timed; none measures memory alone.
        num_heads: heads of the one sequence.
        head_dim: features of a head.
        dtypes: "float32", "bfloat16".
        threads: PyTorch's threads.
        rounds: how often each implementation is timed (a third as often beyond 4096 tokens).
        compiled: also time the compiled plain formula.
        backends: also time these backends of sigattn, "blocked" and "llvm", besides its default.
        matmul: also time torch.matmul, slow for bfloat16 on a processor without instructions for it.
        memory: also measure peak memory, at 4096 tokens and, with one head, 65,536.
        isa: "avx2" or "avx512" (without BF16 and AMX): hold PyTorch, oneDNN, MKL and our kernels to these
            instructions, in a process of its own; None for all that the processor has.
        max_naive_gib: omit the plain formula where its matrices would take more.
        results: where to write the results (JSON).
    """

    lengths: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    num_heads: int = 8
    head_dim: int = 64
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: int = 2
    rounds: int = 9
    compiled: bool = True
    backends: tuple[str, ...] = ()
    matmul: bool = True
    memory: bool = True
    isa: str | None = None
    max_naive_gib: float = 3.0
    results: Path = Path("runs/benchmarks/cpu.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "num_heads", "head_dim", "threads", "rounds")
        check_not_negative(self, "max_naive_gib")
        check_among(("float32", "bfloat16"), self, "dtypes")
        check_among(("blocked", "llvm"), self, "backends")
        if self.isa is not None:
            check_among(tuple(isa.ISAS), self, "isa")
        check_not_empty(self, "dtypes", *(() if self.memory else ("lengths",)))
        check_output_file(self.results)


def benchmark_cpu(config: CpuBenchmark) -> dict[str, Any]:
    """Compare sigattn with softmax SDPA and with naive and compiled naive sigmoid on the CPU: time, error, memory.

    Returns:
        The content of the results file.

    Raises:
        WrongResultError: if an implementation is wrong.
        BenchmarkError: if the processor lacks the instructions of ``config.isa``.
    """
    if config.isa is not None and not isa.is_held(config.isa):
        settings = {**asdict(config), "results": str(config.results)}
        code = "from pathlib import Path; from benchmarks.cpu import *; "
        code += f"benchmark_cpu(CpuBenchmark(**{{**(s := {settings!r}), 'results': Path(s['results'])}}))"
        return isa.run_held(config.isa, code, config.results)
    isa.hold_kernels(config.isa)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    rows = []
    try:
        for n in config.lengths:
            found = [
                row for dtype in config.dtypes for causal in (False, True) for row in measure(config, n, dtype, causal)
            ]
            print_rows(f"n = {n}", found, _COLUMNS)
            rows += found
    finally:
        torch.set_num_threads(threads)
    used = []
    if config.memory:
        used = memory.measure_all(config.dtypes, config.num_heads, config.head_dim, config.threads, config.isa)
        print_rows("peak memory of forward and backward, beyond inputs and outputs", used, memory.COLUMNS)
    report = {**provenance.describe("cpu", asdict(config)), "rows": rows, "memory": used}
    provenance.write(config.results, report)
    print(f"results: {config.results}")
    return report


def implementations(config: CpuBenchmark, n: int) -> dict[str, Implementation]:
    """Return the implementations that are timed at a length."""
    naive_gib = 4 * 4 * config.num_heads * n * n / 2**30  # logits, weights and two gradients in float32
    omitted = {NAIVE, COMPILED_NAIVE} if naive_gib > config.max_naive_gib else set()
    if not config.compiled:
        omitted.add(COMPILED_NAIVE)
    chosen = {name: found for name, found in CPU_IMPLEMENTATIONS.items() if name not in omitted}
    return chosen | {f"{OURS}, {name}": Implementation(False, with_backend(name), cpu=True) for name in config.backends}


def measure(config: CpuBenchmark, n: int, dtype: str, causal: bool) -> list[dict[str, Any]]:
    """Time all implementations on one problem; return a row for each implementation and pass."""
    if config.compiled:
        baselines.reset_compiled()  # each problem is compiled for its own sizes, as a user's would be
    shape = (1, config.num_heads, n, config.head_dim)
    inputs = random_inputs(*shape, DTYPES[dtype], torch.device("cpu"), causal=causal, contiguous=True)
    passes: dict[str, dict[str, Callable[[], object]]] = {FORWARD: {}, BACKWARD: {}, TRAINING: {}}
    errors = {}
    for name, implementation in implementations(config, n).items():
        calls, errors[name] = baselines.checked_passes(implementation, inputs)
        for direction in passes:
            passes[direction][name] = calls[direction]
    if config.matmul:
        matrices = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE).to(DTYPES[dtype])
        for calls in passes.values():
            calls[_MATMUL] = lambda: matrices[0] @ matrices[1]
    rounds = config.rounds if n <= 4096 else max(3, config.rounds // 3)
    one_product = config.num_heads * n * n * config.head_dim / _MATMUL_SIZE**3 / (2 if causal else 1)
    return [
        {
            "n": n,
            "dtype": dtype,
            "causal": causal,
            "pass": direction,
            "implementation": name,
            "median_ms": seconds * 1e3,
            "softmax_time_over_this": ratios[SDPA],
            "naive_time_over_this": ratios.get(NAIVE),
            "compiled_time_over_this": ratios.get(COMPILED_NAIVE),
            "of_matmul": _PRODUCTS[direction] * one_product * ratios[_MATMUL] if config.matmul else None,
            "relative_error": errors[name][direction != FORWARD],
        }
        for direction, calls in passes.items()
        for name, seconds, ratios in time_calls(calls, rounds)
        if name != _MATMUL
    ]
