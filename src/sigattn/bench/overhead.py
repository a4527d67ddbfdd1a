"""``sigattn bench overhead``: what a short call costs, of a ViT's 196 tokens: Python's time, and the GPU's own.

Eager calls one after another, and the same calls as CUDA graphs. "launched through Triton" is ours without the direct
launches of calls that were made before (``tuning.DIRECT_LAUNCH``, ``ops/triton/launch_cache.py``).
Without a GPU, only what Python does before a kernel starts is timed, with kernels that do nothing.
"""

from __future__ import annotations

import contextlib
import os
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sigattn.bench import gpu, provenance
from sigattn.bench.baselines import IMPLEMENTATIONS, OURS, reset_compiled
from sigattn.bench.results_file import Report
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem
from sigattn.ops.triton import kernel_args, launch, launch_cache, tuning
from sigattn.validation import check_among, check_at_least, check_not_empty, check_not_negative

THROUGH_TRITON = f"{OURS}, launched through Triton"


@dataclass(frozen=True, kw_only=True)
class OverheadBenchmark:
    """What to measure.

    Attributes:
        n: tokens of a sequence.
        heads: of a sequence.
        head_dim: features of a head.
        batches: numbers of sequences.
        dtype: "bfloat16", "float16" or "float32".
        rounds: how often each implementation is timed.
        round_seconds: the least time of a round.
        resume: continue the results in the file instead of replacing them.
        results: where to write the results as JSON.
    """

    n: int = 196
    heads: int = 12
    head_dim: int = 64
    batches: tuple[int, ...] = (1, 8, 64)
    dtype: str = "bfloat16"
    rounds: int = 7
    round_seconds: float = 0.01
    resume: bool = False
    results: Path = Path("runs/bench/overhead.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "n", "heads", "head_dim", "batches", "rounds")
        check_not_negative(self, "round_seconds")
        check_among(tuple(gpu.DTYPES), self, "dtype")
        check_not_empty(self, "batches")


def run(config: OverheadBenchmark) -> dict[str, Any]:
    """Measure, print a table, write the results after each batch size; return what was written."""
    described, runs = {**asdict(config), "results": ""}, _kernels_run()
    where = gpu.describe("overhead", described) if runs else provenance.describe("overhead", described)
    in_force = tuning.DIRECT_LAUNCH
    with Report(config.results, where, resume=config.resume) as report:
        try:
            for batch in report.remaining(config.batches if runs else ()):
                report.add(batch, measure(config, batch, report.data["absent"]))
        finally:
            tuning.DIRECT_LAUNCH = in_force
        result = report.write(preparations=preparations(config))
    rows = result["rows"]
    console = Console()
    if rows:
        console.print(table(rows))
    for r in result["preparations"]:
        console.print(
            f"{r['pass']}: {r['again_microseconds']:.1f} µs before a kernel starts, the first time "
            f"{r['first_microseconds']:.1f}; if nothing were kept {r['not_kept_microseconds']:.1f}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return result


def _kernels_run() -> bool:
    """Return True if there is a GPU, or an interpreter in its place."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


class _NoKernel:
    """Does nothing, with the parameters of another."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: None


@contextlib.contextmanager
def _no_kernels() -> Iterator[None]:
    names = ("fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel")
    kernels = {name: getattr(launch, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(launch, name, _NoKernel(kernel))
        launch_cache.clear()
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(launch, name, kernel)
        launch_cache.clear()  # what does nothing


def preparations(config: OverheadBenchmark) -> list[dict[str, Any]]:
    """Microseconds of a pass on the CPU up to its kernels: of a new kind, of one made before, and if none were kept."""
    shape = (1, config.n, config.heads, config.head_dim)
    q, k, v, grad = (torch.randn(shape).to(gpu.DTYPES[config.dtype]).transpose(1, 2) for _ in range(4))
    problem = Problem(q, k, v)
    passes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (lambda: launch.forward(problem), lambda: launch._forward(kernel_args.prepare(problem))),
        "backward": (
            lambda: launch.backward(problem, grad, NeedsGrad()),
            lambda: launch._backward(kernel_args.prepare(problem), grad, NeedsGrad()),
        ),
    }

    def time(call: Callable[[], Any]) -> float:
        call()
        call()  # the second is kept
        number = max(1, int(config.round_seconds / timeit.timeit(call, number=10) * 10))
        return min(timeit.repeat(call, number=number, repeat=config.rounds)) / number * 1e6

    rows = []
    with _no_kernels():
        for name, (call, not_kept) in passes.items():

            def anew(call: Callable[[], Any] = call) -> None:
                launch_cache.clear()
                call()

            found = {"first": time(anew), "again": time(call), "not_kept": time(not_kept)}
            rows.append({"pass": name, **{f"{key}_microseconds": value for key, value in found.items()}})
    return rows


def measure(config: OverheadBenchmark, batch: int, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Microseconds of a forward without gradient, and of forward and backward, of everyone who is right."""
    reset_compiled()
    problem = gpu.inputs(batch, config.heads, config.n, config.head_dim, gpu.DTYPES[config.dtype], False)
    eager: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "training": {}}
    for name in (*IMPLEMENTATIONS, THROUGH_TRITON):
        implementation = IMPLEMENTATIONS[OURS if name == THROUGH_TRITON else name]
        reason = implementation.unavailable(gpu.device(), problem.query.dtype, problem.options)
        if reason is None:
            calls = _calls(implementation.call, problem, implementation.backward, relaunch=name != THROUGH_TRITON)
            reason = _wrong(calls, problem, implementation.softmax)
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
            softmax = [
                ratio for other, ratio in ratios.items() if other in IMPLEMENTATIONS and IMPLEMENTATIONS[other].softmax
            ]
            rows.append(
                {
                    "batch": batch,
                    "pass": direction,
                    "implementation": name,
                    "microseconds": seconds * 1e6,
                    "fastest_softmax_time_over_this": min(softmax, default=None),
                    "graph_microseconds": bare[name] * 1e6 if name in bare else None,
                }
            )
    return rows


def _calls(
    call: Callable[..., torch.Tensor], problem: gpu.Inputs, backward: bool, *, relaunch: bool
) -> dict[str, Callable[[], Any]]:
    """The passes of an implementation."""
    leaves = gpu.leaves(problem)
    q, k, v = (t.detach() for t in leaves)

    def forward() -> torch.Tensor:
        tuning.DIRECT_LAUNCH = relaunch
        with torch.no_grad():
            return call(q, k, v, problem.options)

    def training() -> tuple[torch.Tensor, ...]:
        tuning.DIRECT_LAUNCH = relaunch
        return torch.autograd.grad(call(*leaves, problem.options), leaves, problem.grad_out)

    return {"forward": forward, **({"training": training} if backward else {})}


def _wrong(calls: dict[str, Callable[[], Any]], problem: gpu.Inputs, softmax: bool) -> str | None:
    """Why an implementation takes no part: it fails, or its second call (the first may have been kept) is wrong."""
    try:
        for call in calls.values():
            call()
        found = gpu.errors(problem, softmax, calls["forward"](), calls["training"]() if "training" in calls else None)
    except Exception as error:  # a peer may fail in ways of its own: it is left out, and the results say why
        return f"{type(error).__name__}: {error}".splitlines()[0]
    wrong = not gpu.largest(e for e in found if e is not None) <= gpu.TOLERANCE[problem.query.dtype]
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
            r["implementation"],
            f"{r['microseconds']:.1f}",
            "–" if ratio is None else f"{ratio:.2f}",
            "–" if graph is None else f"{graph:.1f}",
        )
    return result
