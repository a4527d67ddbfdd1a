"""``python -m benchmarks parts``: what backend "llvm" spends its time on, next to ``torch.matmul``, in float32.

A part's time is that of a pass less that of the same pass without the part: kernels compiled without σ, or without
copies of keys and values in the order of the products, and no kernels at all. All run in turns. "products" is the time
that the products would take at the speed of ``torch.matmul`` with square matrices of 1,024, of causal masks half of
them; "hidden" is that of the other half, as far as microtiles compute it. "rest" is what remains of the whole.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.inputs import check_not_empty
from benchmarks.provenance import BenchmarkError, describe, write
from benchmarks.tables import print_rows
from benchmarks.timing import time_calls
from sigattn.ops import llvm
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.llvm import calls, copies, microtiles
from sigattn.ops.llvm.arguments import FORWARD_ROWS, KernelArguments
from sigattn.ops.problem import UNLIMITED, Problem
from sigattn.validation import check_among, check_at_least, check_output_file

PARTS = ("products", "hidden", "sigmoid", "packing", "threads", "host", "rest")
_COLUMNS = {
    "n": ("n", "d"),
    "mask": ("causal", ""),
    "pass": ("pass", ""),
    "ms": ("median_ms", ".3f"),
    **{part: (part, ".2f") for part in PARTS},
}
_MATMUL_SIZE = 1024
_PRODUCTS = {"forward": 2, "backward": 5}  # of matrices of n queries, n keys and the features of a head
_WHOLE, _NO_SIGMOID, _NO_PACKING, _NO_KERNELS, _MATMUL = "whole", "no σ", "no packing", "no kernels", "matmul"


@dataclass(frozen=True, kw_only=True)
class PartsBenchmark:
    """Configuration of the measurement of parts.

    Attributes:
        lengths: numbers of tokens n.
        num_heads: heads of the one sequence.
        head_dim: features of a head.
        passes: "forward", without what a gradient needs, and "backward", which computes all weights again.
        threads: PyTorch's threads.
        rounds: how often each variant is timed.
        results: where to write the results (JSON).
    """

    lengths: tuple[int, ...] = (64, 256, 1024, 4096)
    num_heads: int = 8
    head_dim: int = 64
    passes: tuple[str, ...] = ("forward", "backward")
    threads: int = 2
    rounds: int = 15
    results: Path = Path("runs/benchmarks/parts.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "num_heads", "head_dim", "threads", "rounds")
        check_among(tuple(_PRODUCTS), self, "passes")
        check_not_empty(self, "lengths", "passes")
        check_output_file(self.results)


def benchmark_parts(config: PartsBenchmark) -> dict[str, Any]:
    """Measure the parts of the forward and the backward pass of backend "llvm".

    Returns:
        The content of the results file.

    Raises:
        BenchmarkError: if the backend does not run on this machine.
    """
    if (reason := llvm.machine_unavailable()) is not None:
        raise BenchmarkError(f"parts: backend 'llvm' does not run here: {reason}")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    kernels, rows = variants(), []
    try:
        for n in config.lengths:
            cases = [(causal, direction) for causal in (False, True) for direction in config.passes]
            rows += [measure(config, kernels, n, causal, direction) for causal, direction in cases]
    finally:
        torch.set_num_threads(threads)
    print_rows("shares of the time", rows, _COLUMNS)
    report = {**describe("parts", asdict(config)), "rows": rows}
    write(config.results, report)
    print(f"results: {config.results}")
    return report


def variants() -> dict[str, calls.Kernels]:
    """Return the kernels, and those without a part, which compute nonsense."""
    no_sigmoid = mock.patch.object(microtiles, "sigmoid", lambda _, logits: logits)
    no_packing = mock.patch.object(copies.Copies, "pack", return_value=None)
    found = {}
    for name, patch in ((_WHOLE, ExitStack()), (_NO_SIGMOID, no_sigmoid), (_NO_PACKING, no_packing)):
        with patch:
            found[name] = calls.Kernels(per_word=1)
    found[_NO_KERNELS] = copy.copy(found[_WHOLE])
    found[_NO_KERNELS]._parallel = lambda *_: None
    return found


def measure(
    config: PartsBenchmark, kernels: dict[str, calls.Kernels], n: int, causal: bool, direction: str
) -> dict[str, Any]:
    """Time a pass and its variants; return the shares of its parts."""
    # small, so that numbers in the place of weights are finite
    query, key, value, grad_out = (torch.randn(4, 1, config.num_heads, n, config.head_dim) / 8).unbind()
    problem = Problem(query, key, value, right=0 if causal else UNLIMITED)
    result = calls.forward(problem, None, {})
    backward = direction == "backward"

    def run(variant: calls.Kernels) -> None:
        calls._compiled[torch.float32] = variant
        calls.backward(problem, grad_out, result, NeedsGrad(), {}) if backward else calls.forward(problem, None, {})

    matrices = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE)
    timed: dict[str, Callable[[], object]] = {name: lambda k=k: run(k) for name, k in kernels.items()}  # type: ignore[misc]
    timed[_MATMUL] = lambda: matrices[0] @ matrices[1]
    whole, empty = kernels[_WHOLE], KernelArguments()
    timed["threads"] = lambda: whole._parallel(whole._addresses[direction], ctypes.addressof(empty), config.threads, 0)
    with mock.patch.dict(calls._compiled):
        (timing,) = (t for t in time_calls(timed, config.rounds) if t.name == _WHOLE)
    of_whole = timing.ratios
    needed, computed = weights(n, causal, direction, whole.rows, whole.tile)
    shares = {
        "products": _PRODUCTS[direction] * config.num_heads * needed * config.head_dim / _MATMUL_SIZE**3
        * of_whole[_MATMUL],
        "sigmoid": 1 - of_whole[_NO_SIGMOID],
        "packing": 1 - of_whole[_NO_PACKING],
        "threads": of_whole["threads"] * (2 if direction == "forward" and n > FORWARD_ROWS else 1),
        "host": of_whole[_NO_KERNELS],
    }  # fmt: skip
    shares["hidden"] = shares["products"] * (computed / needed - 1)
    shares["rest"] = 1 - sum(shares.values())
    return {"n": n, "causal": causal, "pass": direction, "median_ms": timing.seconds * 1e3, **shares}


def weights(n: int, causal: bool, direction: str, rows: int, tile: int) -> tuple[float, int]:
    """Return the numbers of a head's weights that a pass needs (half of them if causal), and that it computes."""
    size = -(-n // tile) * tile
    if not causal:
        return n * n, n * size
    needed = n * n / 2
    if direction == "backward":
        # a tile of keys, with the queries from a microtile's first row on
        return needed, sum((n - first // rows * rows) * min(tile, size - first) for first in range(0, n, tile))
    computed = 0
    for block in range(0, n, FORWARD_ROWS):
        for row in range(block, min(block + FORWARD_ROWS, n), rows):
            count = min(rows, block + FORWARD_ROWS - row, n - row)
            pairs = -(-(row + count) // (2 * tile))  # of tiles with a key that one of the rows sees
            computed += count * min(pairs * 2 * tile, size)
    return needed, computed
