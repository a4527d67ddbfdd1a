"""``python -m benchmarks overhead``: time of a short call, of a ViT's 196 tokens: on the host and on the GPU.

Calls are timed eagerly, one after another, and as CUDA graphs. "launched through Triton" is our operator without direct
launches from the launch cache (``tuning.DIRECT_LAUNCH``, ``ops/triton/launch_cache.py``). Without a GPU, only the host
time before a kernel starts is measured, with kernels that do nothing.
"""

from __future__ import annotations

import contextlib
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import baselines, gpu
from benchmarks.baselines import FORWARD, IMPLEMENTATIONS, OURS, TRAINING, Implementation, ratio_to_fastest_softmax
from benchmarks.inputs import DTYPES, Options, random_inputs
from benchmarks.results_file import ResultsFile
from benchmarks.tables import print_rows
from benchmarks.timing import TimedBenchmark, time_calls, time_graphs
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem
from sigattn.ops.triton import kernel_args, launch, launch_cache, tuning
from sigattn.validation import check_among, check_at_least, check_not_empty, check_output_file

_COLUMNS = {
    "batch size": ("batch_size", "d"),
    "pass": ("pass", ""),
    "": ("implementation", ""),
    "eager": ("microseconds", ".1f"),
    "× softmax": ("fastest_softmax_time_over_this", ".2f"),
    "as graph": ("graph_microseconds", ".1f"),
}
THROUGH_TRITON = f"{OURS}, launched through Triton"


@dataclass(frozen=True, kw_only=True)
class OverheadBenchmark(TimedBenchmark):
    """Configuration of the overhead benchmark.

    Attributes:
        n: tokens of a sequence.
        head_dim: features of a head.
        batch_sizes: numbers of sequences.
        dtype: "bfloat16", "float16" or "float32".
        results: where to write the results (JSON).
    """

    n: int = 196
    head_dim: int = 64
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    dtype: str = "bfloat16"
    results: Path = Path("runs/benchmarks/overhead.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "n", "head_dim", "batch_sizes")
        check_among(tuple(DTYPES), self, "dtype")
        check_not_empty(self, "batch_sizes")
        check_output_file(self.results)


def benchmark_overhead(config: OverheadBenchmark) -> dict[str, Any]:
    """Measure the host time of a short call, and on a GPU its whole time; on a CPU, with kernels that do nothing.

    Returns:
        The content of the results file.
    """
    with ResultsFile.of("overhead", config) as results:
        for batch_size in results.remaining(config.batch_sizes if gpu.kernels_run() else ()):
            with mock.patch.object(tuning, "DIRECT_LAUNCH", True):  # each implementation sets its own
                results.add(batch_size, measure(config, batch_size, results.data["absent"]))
        written = results.write(host_times=host_times(config))
    if written["rows"]:
        print_rows("microseconds of a short call", written["rows"], _COLUMNS)
    for r in written["host_times"]:
        print(
            f"{r['pass']}: {r['cached_microseconds']:.1f} µs before a kernel starts, {r['first_microseconds']:.1f} at "
            f"the first call, {r['uncached_microseconds']:.1f} without the launch cache"
        )
    print(f"results: {config.results}")
    return written


class _NoOpKernel:
    """No-op with the parameters of another kernel."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: None


@contextlib.contextmanager
def _no_op_kernels() -> Iterator[None]:
    names = ("fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel")
    kernels: dict[str, Any] = {name: _NoOpKernel(getattr(launch, name)) for name in names}
    try:
        with mock.patch.multiple(launch, **kernels):
            launch_cache.clear()
            yield
    finally:
        launch_cache.clear()  # its entries launch the no-ops


def host_times(config: OverheadBenchmark) -> list[dict[str, Any]]:
    """Return the microseconds of a pass on the host before its kernels start.

    first: with an empty launch cache. cached: from the cache. uncached: without a cache.
    """
    shape = (1, config.n, config.num_heads, config.head_dim)
    q, k, v, grad = (torch.randn(shape).to(DTYPES[config.dtype]).transpose(1, 2) for _ in range(4))
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
        call()  # the second call is stored
        repeats = max(1, int(config.round_seconds / timeit.timeit(call, number=10) * 10))
        return min(timeit.repeat(call, number=repeats, repeat=config.rounds)) / repeats * 1e6

    rows = []
    with _no_op_kernels():
        for name, (call, uncached) in passes.items():

            def first(call: Callable[[], Any] = call) -> None:
                launch_cache.clear()
                call()

            found = {"first": time(first), "cached": time(call), "uncached": time(uncached)}
            rows.append({"pass": name, **{f"{key}_microseconds": value for key, value in found.items()}})
    return rows


def measure(config: OverheadBenchmark, batch_size: int, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Time forward without gradients, and forward and backward; return a row for each implementation and pass.

    absent: receives the reasons of the implementations that are not timed.
    """
    baselines.reset_compiled()
    dtype = DTYPES[config.dtype]
    inputs = random_inputs(batch_size, config.num_heads, config.n, config.head_dim, dtype, gpu.device())
    ours = IMPLEMENTATIONS[OURS]
    compared = {
        **IMPLEMENTATIONS,
        OURS: replace(ours, call=_with_direct_launch(ours, True)),
        THROUGH_TRITON: replace(ours, call=_with_direct_launch(ours, False)),
    }
    # a call is stored the second time, compared with a direct launch the third, and launched directly the fourth
    passes, _ = baselines.available_passes(compared, inputs, absent, checks=4)
    rows = []
    for direction in (FORWARD, TRAINING):
        calls = passes[direction]
        graphs = time_graphs(calls, config.rounds, config.round_seconds)
        for timing in time_calls(calls, config.rounds, config.round_seconds):
            graph = graphs.get(timing.name)
            rows.append(
                {
                    "batch_size": batch_size,
                    "pass": direction,
                    "implementation": timing.name,
                    "microseconds": timing.seconds * 1e6,
                    "fastest_softmax_time_over_this": ratio_to_fastest_softmax(timing),
                    "graph_microseconds": graph.seconds * 1e6 if graph else None,
                }
            )
    return rows


def _with_direct_launch(
    ours: Implementation, direct_launch: bool
) -> Callable[[Tensor, Tensor, Tensor, Options], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        tuning.DIRECT_LAUNCH = direct_launch
        return ours.call(q, k, v, options)

    return call
