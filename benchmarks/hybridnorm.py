"""``python -m benchmarks hybridnorm``: the length from which sigmoid attention and a norm are faster than softmax.

Hybrid norm applies a LayerNorm to the output of sigmoid attention (App. G.6, with the paper's table of T*). Its cost is
linear in n and the gain of sigmoid attention quadratic, so there is a length T* from which it pays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import baselines, gpu
from benchmarks.baselines import FORWARD, IMPLEMENTATIONS, OURS, AttentionFunction
from benchmarks.inputs import DTYPES, Inputs, check_not_empty, random_inputs
from benchmarks.results_file import ResultsFile
from benchmarks.tables import print_rows
from benchmarks.timing import TimedBenchmark, time_calls
from sigattn.validation import check_among, check_at_least

NORMS = ("affine", "no affine")
_COLUMNS = {
    "mask": ("causal", ""),
    "LayerNorm": ("norm", ""),
    "than": ("other", ""),
    "T*": ("from", "d"),
    "mean gain, %": ("percent", ".1f"),
}


@dataclass(frozen=True, kw_only=True)
class HybridNormBenchmark(TimedBenchmark):
    """Configuration of the hybrid-norm benchmark.

    Attributes:
        lengths: numbers of tokens n.
        head_dim: features of a head.
        dtype: "bfloat16", "float16" or "float32".
        compiled: fuse the norm with torch.compile on a GPU, as in the paper; otherwise PyTorch's kernel computes it.
        results: folder for the results (JSON).
    """

    lengths: tuple[int, ...] = (64, 256, 576, 1024, 2048, 4096, 5184, 8192, 10000, 12544, 16384, 32768, 60000)
    head_dim: int = 64
    dtype: str = "bfloat16"
    compiled: bool = True
    results: Path = Path("runs/benchmarks/hybridnorm")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "lengths", "head_dim")
        check_among(tuple(DTYPES), self, "dtype")
        check_not_empty(self, "lengths")


def benchmark_hybridnorm(config: HybridNormBenchmark) -> dict[str, Any]:
    """Find the length from which sigmoid attention followed by a LayerNorm is faster than softmax on this GPU.

    Returns:
        The content of the results file.

    Raises:
        BenchmarkError: without a GPU, unless kernels are interpreted.
    """
    gpu.device()
    with ResultsFile.of("hybridnorm", config) as results:
        for n, causal in results.remaining([(n, causal) for n in config.lengths for causal in (False, True)]):
            results.add((n, causal), measure(config, n, causal, results.data["absent"]))
        crossings = [crossing(results.data["rows"], causal, norm) for causal in (False, True) for norm in NORMS]
        written = results.write(crossings=crossings)
    rows = [{**c, "other": other, **found} for c in crossings for other, found in c["over"].items()]
    print_rows("T*: the length from which sigmoid + LayerNorm is faster", rows, _COLUMNS)
    print(f"results: {config.results}")
    return written


def measure(config: HybridNormBenchmark, n: int, causal: bool, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Time the forward pass of sigmoid attention with either norm and of every softmax, at one length.

    absent: receives the reasons of those that are not timed.
    """
    dtype, device = DTYPES[config.dtype], gpu.device()
    inputs = random_inputs(1, config.num_heads, n, config.head_dim, dtype, device, causal=causal)
    compared = {k: v for k, v in IMPLEMENTATIONS.items() if (v.softmax and k != "Flex softmax") or k == OURS}
    passes, _ = baselines.available_passes(compared, inputs, absent, f", n = {n}", backward=False)
    calls = passes[FORWARD]
    if calls.pop(OURS, None) is not None:
        calls |= _with_norms(config, IMPLEMENTATIONS[OURS].call, inputs)
    with torch.no_grad():
        return [
            {
                "n": n,
                "causal": causal,
                "implementation": name,
                "ms": seconds * 1e3,
                "softmax_time_over_this": {other: r for other, r in ratios.items() if other not in NORMS},
            }
            for name, seconds, ratios in time_calls(calls, config.rounds, config.round_seconds)
        ]


def _with_norms(
    config: HybridNormBenchmark, attention: AttentionFunction, inputs: Inputs
) -> dict[str, Callable[[], object]]:
    """Return sigmoid attention followed by a LayerNorm, with and without an affine map."""
    q, k, v, options = inputs.query, inputs.key, inputs.value, inputs.options
    norm = _compiled_norm if config.compiled and q.is_cuda else _norm
    weight, shift = torch.ones(2, config.num_heads * config.head_dim, device=q.device, dtype=q.dtype).unbind()
    return {
        "affine": lambda: norm(attention(q, k, v, options), weight, shift),
        "no affine": lambda: norm(attention(q, k, v, options), None, None),
    }


def _norm(out: Tensor, weight: Tensor | None, shift: Tensor | None) -> Tensor:
    """LayerNorm over all heads of a token: (B, H, n, D) → (B, n, H·D)."""
    flat = out.transpose(1, 2).flatten(2)
    return F.layer_norm(flat, flat.shape[-1:], weight, shift)


_compiled_norm = baselines.compiled(_norm, dynamic=True)  # one compilation for all lengths


def crossing(rows: list[dict[str, Any]], causal: bool, norm: str) -> dict[str, Any]:
    """Return T* compared with each softmax, and the mean gain from there on in percent."""
    own = sorted((r for r in rows if r["causal"] == causal and r["implementation"] == norm), key=lambda r: r["n"])
    result: dict[str, Any] = {"causal": causal, "norm": norm, "over": {}}
    for other in dict.fromkeys(name for r in own for name in r["softmax_time_over_this"]):
        # a softmax may be absent at some length, for example because it runs out of memory
        ratios = [(r["n"], 1 / times[other]) for r in own if other in (times := r["softmax_time_over_this"])]
        start = crossing_length(ratios)
        after = [1 - ratio for n, ratio in ratios if start is not None and n >= start]
        result["over"][other] = {"from": start, "percent": 100 * statistics.mean(after) if after else None}
    return result


def crossing_length(ratios: Iterable[tuple[int, float]]) -> int | None:
    """Return the least n from which on every ratio of times is below 1; None if the last is not.

    ratios: pairs of n and the time divided by that of softmax.
    """
    start = None
    for n, ratio in sorted(ratios, reverse=True):
        if ratio >= 1:
            break
        start = n
    return start
