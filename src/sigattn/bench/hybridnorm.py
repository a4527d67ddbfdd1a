"""``sigattn bench hybridnorm``: from which length sigmoid attention and a norm after it beat softmax attention.

Hybrid-norm puts a LayerNorm on the output of sigmoid attention (Sect. 6 and the paper's table of T*). It costs memory
traffic linear in n, and sigmoid attention gains time quadratic in n, so there is a length T* from which it pays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from sigattn.bench import gpu, provenance
from sigattn.bench.contestants import CONTESTANTS, OURS
from sigattn.validation import check_among, check_at_least, check_not_empty, check_not_negative


@dataclass(frozen=True, kw_only=True)
class HybridNormBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of tokens n.
        heads: of one sequence (batch 1).
        head_dim: features of a head.
        dtype: "bfloat16", "float16" or "float32".
        rounds: how often each contestant is timed.
        round_seconds: the least time of a round.
        compiled: whether torch.compile fuses the norm, as in the paper; without, PyTorch's own kernel does it.
        results: folder for the results (JSON).
    """

    lengths: tuple[int, ...] = (64, 256, 576, 1024, 2048, 4096, 5184, 8192, 10000, 12544, 16384, 32768, 60000)
    heads: int = 12
    head_dim: int = 64
    dtype: str = "bfloat16"
    rounds: int = 7
    round_seconds: float = 0.01
    compiled: bool = True
    results: Path = Path("runs/bench/hybridnorm")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "heads", "head_dim", "rounds")
        check_not_negative(self, "round_seconds")
        check_among(tuple(gpu.DTYPES), self, "dtype")
        check_not_empty(self, "lengths")


def run(config: HybridNormBenchmark) -> dict[str, Any]:
    """Measure, print tables, write the results; gives what was written."""
    absent: dict[str, str] = {}
    rows = [r for causal in (False, True) for n in config.lengths for r in measure(config, n, causal, absent)]
    crossings = [crossing(rows, causal, norm) for causal in (False, True) for norm in NORMS]
    report = {
        **gpu.describe("hybridnorm", {**asdict(config), "results": ""}),
        "absent": absent,
        "rows": rows,
        "crossings": crossings,
    }
    provenance.write(config.results / "hybridnorm.json", report)
    console = Console()
    console.print(table(crossings))
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return report


NORMS = ("affine", "no affine")


def measure(config: HybridNormBenchmark, n: int, causal: bool, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Forward times at one length: sigmoid with either norm, and the softmaxes."""
    dtype = gpu.DTYPES[config.dtype]
    problem = gpu.inputs(1, config.heads, n, config.head_dim, dtype, causal)
    q, k, v = problem.query, problem.key, problem.value
    weight, shift = torch.ones(2, config.heads * config.head_dim, device=q.device, dtype=dtype).unbind()

    def norm(out: Tensor, affine: bool) -> Tensor:  # (B, H, n, D) → (B, n, H·D)
        flat = out.transpose(1, 2).flatten(2)
        return F.layer_norm(flat, flat.shape[-1:], weight if affine else None, shift if affine else None)

    normed = torch.compile(norm, dynamic=False) if config.compiled and torch.cuda.is_available() else norm
    ours = CONTESTANTS[OURS].call
    calls: dict[str, Callable[[], object]] = {
        name: lambda affine=name == "affine": normed(ours(q, k, v, problem.options), affine)  # type: ignore[misc]
        for name in NORMS
    }
    for name, contestant in CONTESTANTS.items():
        if not contestant.softmax or name == "Flex softmax":
            continue
        reason = contestant.unavailable(gpu.device(), dtype, problem.options)
        if reason is not None:
            absent[name] = reason
            continue
        calls[name] = lambda call=contestant.call: call(q, k, v, problem.options)  # type: ignore[misc]
    with torch.no_grad():
        return [
            {
                "n": n,
                "causal": causal,
                "contestant": name,
                "ms": seconds * 1e3,
                "softmax_time_over_this": {o: r for o, r in ratios.items() if o not in NORMS},
            }
            for name, seconds, ratios in gpu.race(calls, config.rounds, config.round_seconds)
        ]


def crossing(rows: list[dict[str, Any]], causal: bool, norm: str) -> dict[str, Any]:
    """T*: the least length from which on sigmoid with this norm is always faster; None if it is not at the longest."""
    own = sorted((r for r in rows if r["causal"] == causal and r["contestant"] == norm), key=lambda r: r["n"])
    result: dict[str, Any] = {"causal": causal, "norm": norm, "over": {}}
    for other in own[0]["softmax_time_over_this"] if own else ():
        ratios = [(r["n"], r["softmax_time_over_this"][other]) for r in own]
        after = []
        for n, ratio in reversed(ratios):
            if ratio <= 1:
                break
            after.append((n, ratio))
        result["over"][other] = {
            "from": after[-1][0] if after else None,
            "percent": 100 * statistics.mean(1 - 1 / ratio for _, ratio in after) if after else None,
        }
    return result


def table(crossings: list[dict[str, Any]]) -> Table:
    """T* and the mean gain from there on."""
    result = Table(title="T*: from here on sigmoid + LayerNorm is faster, and by how much")
    for column in ("mask", "LayerNorm", "than", "T*", "gain"):
        result.add_column(column)
    for c in crossings:
        for other, found in c["over"].items():
            start, gain = found["from"], found["percent"]
            result.add_row(
                "causal" if c["causal"] else "full",
                c["norm"],
                other,
                "–" if start is None else str(start),
                "–" if gain is None else f"{gain:.1f} %",
            )
    return result
