"""``sigattn bench overhead``: what a short call costs, of a ViT's 196 tokens: Python's time, and the GPU's own.

Eager calls one after another, and the same calls as CUDA graphs. "relaunched" is ours where a call that was made before
starts its compiled kernels itself (``ops/triton/repeats.py``), which is not the default before this has been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sigattn.bench import gpu, provenance
from sigattn.bench.contestants import CONTESTANTS, OURS
from sigattn.ops.triton import tuning

RELAUNCHED = f"{OURS}, relaunched"


@dataclass(frozen=True, kw_only=True)
class OverheadBenchmark:
    """What to measure.

    Attributes:
        n: tokens. heads: of a sequence. head_dim: D. batches: sequences.
        dtype: "bfloat16", "float16" or "float32".
        rounds, round_seconds: as in ``sigattn bench kernels``.
        results: where to write the results as JSON.
    """

    n: int = 196
    heads: int = 12
    head_dim: int = 64
    batches: tuple[int, ...] = (1, 8, 64)
    dtype: str = "bfloat16"
    rounds: int = 7
    round_seconds: float = 0.01
    results: Path = Path("benchmarks/results/overhead.json")


def run(config: OverheadBenchmark) -> dict[str, Any]:
    """Measure, print a table, write the results; gives what was written."""
    absent: dict[str, str] = {}
    in_force = tuning.RELAUNCH
    try:
        rows = [row for batch in config.batches for row in measure(config, batch, absent)]
    finally:
        tuning.RELAUNCH = in_force
    report = {**gpu.describe("overhead", {**asdict(config), "results": ""}), "absent": absent, "rows": rows}
    provenance.write(config.results, report)
    console = Console()
    console.print(table(rows))
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return report


def measure(config: OverheadBenchmark, batch: int, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Microseconds of a forward without gradient, and of forward and backward, of everyone who is right."""
    problem = gpu.inputs(batch, config.heads, config.n, config.head_dim, gpu.DTYPES[config.dtype], False)
    eager: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "training": {}}
    for name in (*CONTESTANTS, RELAUNCHED):
        contestant = CONTESTANTS[OURS if name == RELAUNCHED else name]
        reason = contestant.unavailable(gpu.device(), problem.query.dtype, problem.options)
        if reason is None:
            calls = _calls(contestant.call, problem, contestant.backward, relaunch=name == RELAUNCHED)
            reason = _wrong(calls, problem, contestant.softmax)
        if reason is not None:
            absent[name] = reason
            continue
        for direction, call in calls.items():
            eager[direction][name] = call
    rows = []
    for direction, calls in eager.items():
        graphs = {name: replay for name, call in calls.items() if (replay := gpu.captured(call)) is not None}
        bare = {name: t for name, t, _ in gpu.race(graphs, config.rounds, config.round_seconds)} if graphs else {}
        for name, seconds, ratios in gpu.race(calls, config.rounds, config.round_seconds):
            softmax = [ratio for other, ratio in ratios.items() if other in CONTESTANTS and CONTESTANTS[other].softmax]
            rows.append(
                {
                    "batch": batch,
                    "pass": direction,
                    "contestant": name,
                    "microseconds": seconds * 1e6,
                    "fastest_softmax_time_over_this": min(softmax, default=None),
                    "graph_microseconds": bare[name] * 1e6 if name in bare else None,
                }
            )
    return rows


def _calls(
    call: Callable[..., torch.Tensor], problem: gpu.Inputs, backward: bool, *, relaunch: bool
) -> dict[str, Callable[[], Any]]:
    """The passes of a contestant."""
    leaves = gpu.leaves(problem)
    q, k, v = (t.detach() for t in leaves)

    def forward() -> torch.Tensor:
        tuning.RELAUNCH = relaunch
        with torch.no_grad():
            return call(q, k, v, problem.options)

    def training() -> tuple[torch.Tensor, ...]:
        tuning.RELAUNCH = relaunch
        return torch.autograd.grad(call(*leaves, problem.options), leaves, problem.grad_out)

    return {"forward": forward, **({"training": training} if backward else {})}


def _wrong(calls: dict[str, Callable[[], Any]], problem: gpu.Inputs, softmax: bool) -> str | None:
    """Why a contestant takes no part: it fails, or its second call (the first may have been kept) is wrong."""
    try:
        for call in calls.values():
            call()
        found = gpu.errors(problem, softmax, calls["forward"](), calls["training"]() if "training" in calls else None)
    except Exception as error:  # a peer may fail in ways of its own: it is left out, and the results say why
        return f"{type(error).__name__}: {error}".splitlines()[0]
    wrong = not max(e for e in found if e is not None) <= gpu.TOLERANCE[problem.query.dtype]
    return f"it is wrong: relative errors {found}" if wrong else None


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows."""
    result = Table(title="microseconds of a short call")
    for column in ("batch", "pass", "", "eager", "× softmax", "as graph"):
        result.add_column(column, justify="left" if column in ("pass", "") else "right")
    for r in rows:
        ratio, graph = r["fastest_softmax_time_over_this"], r["graph_microseconds"]
        result.add_row(
            str(r["batch"]),
            r["pass"],
            r["contestant"],
            f"{r['microseconds']:.1f}",
            "–" if ratio is None else f"{ratio:.2f}",
            "–" if graph is None else f"{graph:.1f}",
        )
    return result
