"""``sigattn bench hybridnorm``: from which length sigmoid attention and a norm after it beat softmax attention.

Hybrid-norm puts a LayerNorm on the output of sigmoid attention (Sect. 6 and the paper's table of T*). It costs memory
traffic linear in n, and sigmoid attention gains time quadratic in n, so there is a length T* from which it pays.
"""

from __future__ import annotations

import functools
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

from sigattn.bench import gpu
from sigattn.bench.baselines import IMPLEMENTATIONS, OURS, Implementation, compiled
from sigattn.bench.results_file import Report
from sigattn.validation import check_among, check_at_least, check_not_empty, check_not_negative


@dataclass(frozen=True, kw_only=True)
class HybridNormBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of tokens n.
        heads: of one sequence (batch 1).
        head_dim: features of a head.
        dtype: "bfloat16", "float16" or "float32".
        rounds: how often each implementation is timed.
        round_seconds: the least time of a round.
        compiled: whether torch.compile fuses the norm, as in the paper; without, PyTorch's own kernel does it.
        resume: continue the results in the folder instead of replacing them.
        results: folder for the results (JSON).
    """

    lengths: tuple[int, ...] = (64, 256, 576, 1024, 2048, 4096, 5184, 8192, 10000, 12544, 16384, 32768, 60000)
    heads: int = 12
    head_dim: int = 64
    dtype: str = "bfloat16"
    rounds: int = 7
    round_seconds: float = 0.01
    compiled: bool = True
    resume: bool = False
    results: Path = Path("runs/bench/hybridnorm")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "heads", "head_dim", "rounds")
        check_not_negative(self, "round_seconds")
        check_among(tuple(gpu.DTYPES), self, "dtype")
        check_not_empty(self, "lengths")


def run(config: HybridNormBenchmark) -> dict[str, Any]:
    """Measure, print tables, write the results after each length; return what was written."""
    described = gpu.describe("hybridnorm", {**asdict(config), "results": ""})
    with Report(config.results / "hybridnorm.json", described, resume=config.resume) as report:
        for n, causal in report.remaining([(n, causal) for n in config.lengths for causal in (False, True)]):
            report.add((n, causal), measure(config, n, causal, report.data["absent"]))
        crossings = [crossing(report.data["rows"], causal, norm) for causal in (False, True) for norm in NORMS]
        result = report.write(crossings=crossings)
    console = Console()
    console.print(table(crossings))
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return result


NORMS = ("affine", "no affine")


def measure(config: HybridNormBenchmark, n: int, causal: bool, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Forward times at one length: sigmoid with either norm, and the softmaxes."""
    dtype = gpu.DTYPES[config.dtype]
    problem = gpu.inputs(1, config.heads, n, config.head_dim, dtype, causal)
    q, k, v = problem.query, problem.key, problem.value
    weight, shift = torch.ones(2, config.heads * config.head_dim, device=q.device, dtype=dtype).unbind()

    norm = _compiled_norm() if config.compiled and torch.cuda.is_available() else _norm
    affine = {"affine": (weight, shift), "no affine": (None, None)}
    ours = IMPLEMENTATIONS[OURS].call
    calls: dict[str, Callable[[], object]] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        if name == "Flex softmax" or not (implementation.softmax or name == OURS):
            continue
        reason = implementation.unavailable(gpu.device(), dtype, problem.options) or _wrong(implementation, problem)
        if reason is not None:
            absent[f"{name}, n = {n}"] = reason
        elif name == OURS:
            calls |= {
                kind: lambda given=affine[kind]: norm(ours(q, k, v, problem.options), *given)  # type: ignore[misc]
                for kind in NORMS
            }
        else:
            calls[name] = lambda call=implementation.call: call(q, k, v, problem.options)  # type: ignore[misc]
    with torch.no_grad():
        return [
            {
                "n": n,
                "causal": causal,
                "implementation": name,
                "ms": seconds * 1e3,
                "softmax_time_over_this": {o: r for o, r in ratios.items() if o not in NORMS},
            }
            for name, seconds, ratios in gpu.race(calls, config.rounds, config.round_seconds)
        ]


def _norm(out: Tensor, weight: Tensor | None, shift: Tensor | None) -> Tensor:
    """LayerNorm over the heads of a token: (B, H, n, D) → (B, n, H·D)."""
    flat = out.transpose(1, 2).flatten(2)
    return F.layer_norm(flat, flat.shape[-1:], weight, shift)


@functools.cache
def _compiled_norm() -> Callable[..., Any]:
    return compiled(_norm, dynamic=True)  # once for all lengths


def _wrong(implementation: Implementation, problem: gpu.Inputs) -> str | None:
    """Why an implementation is not timed: it fails, or its output is not that of the formula."""
    try:
        with torch.no_grad():
            out = implementation.call(problem.query, problem.key, problem.value, problem.options)
        error, _ = gpu.errors(problem, implementation.softmax, out, None)
    except Exception as failure:  # a peer may fail in ways of its own
        return f"{type(failure).__name__}: {failure}"[:300]
    return None if error <= gpu.TOLERANCE[out.dtype] else f"it is wrong: relative error {error}"


def crossing(rows: list[dict[str, Any]], causal: bool, norm: str) -> dict[str, Any]:
    """T*: the least length from which on sigmoid with this norm is always faster; None if it is not at the longest."""
    own = sorted((r for r in rows if r["causal"] == causal and r["implementation"] == norm), key=lambda r: r["n"])
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
