"""``python -m benchmarks overhead``: time of a short call, of a ViT's 196 tokens: on the host and on the GPU.

Calls are timed eagerly, one after another, and as CUDA graphs. "launched through Triton" is our operator without direct
launches from the launch cache (``tuning.DIRECT_LAUNCH``, ``ops/triton/launch_cache.py``). Without a GPU, only our time
on the host is measured, for each kind of call, with kernels that do nothing.
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
from benchmarks.inputs import DTYPES, Options, check_not_empty, random_inputs
from benchmarks.results_file import ResultsFile
from benchmarks.tables import print_rows
from benchmarks.timing import TimedBenchmark, time_calls, time_graphs
from sigattn import sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from sigattn.ops import call_cache
from sigattn.ops import triton as backend
from sigattn.ops.kvcache import KV_CACHE
from sigattn.ops.triton import launch, tuning
from sigattn.ops.varlen import VARLEN
from sigattn.validation import check_among, check_at_least, check_output_file

_COLUMNS = {
    "batch size": ("batch_size", "d"),
    "pass": ("pass", ""),
    "": ("implementation", ""),
    "eager": ("microseconds", ".1f"),
    "× softmax": ("fastest_softmax_time_over_this", ".2f"),
    "as graph": ("graph_microseconds", ".1f"),
}
_HOST_COLUMNS = {
    "call": ("call", ""),
    "pass": ("pass", ""),
    "µs": ("microseconds", ".1f"),
    "first call": ("first_microseconds", ".1f"),
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
    print_rows(
        "microseconds of a call on the host, without Triton and the driver", written["host_times"], _HOST_COLUMNS
    )
    print(f"results: {config.results}")
    return written


class _NoOpKernel:
    """No-op with the parameters of another kernel, launched by its caller or "compiled"."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda **arguments: _NoOpCompiledKernel()


def _supports_all(device: torch.device) -> None:
    """Support a device; without the overhead of a mock."""


def _unchanged(problem: Any) -> Any:
    return problem


class _NoOpCompiledKernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: None


@contextlib.contextmanager
def _no_op_kernels() -> Iterator[None]:
    """Replace the kernels by no-ops, and use CPU tensors as if they were on a GPU: their values are not checked."""
    with contextlib.ExitStack() as stack:
        stack.callback(call_cache.clear)  # its entries launch the no-ops
        for name in ("fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel", "decode_kernel"):
            stack.enter_context(mock.patch.object(launch, name, _NoOpKernel(getattr(launch, name))))
        stack.enter_context(mock.patch.object(backend, "_device_unavailable", _supports_all))
        for op in (VARLEN, KV_CACHE):
            stack.enter_context(mock.patch.object(op, "checked", _unchanged))
        call_cache.clear()
        yield


def host_calls(config: OverheadBenchmark) -> dict[str, Callable[[], Tensor]]:
    """Return short calls of each kind, by name; those with a gradient require it."""
    n, heads, head_dim = config.n, config.num_heads, config.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(DTYPES[config.dtype])

    def dense(**options: Any) -> Callable[[], Tensor]:
        q, k, v = (random(1, n, heads, head_dim).transpose(1, 2).requires_grad_() for _ in range(3))
        return lambda: sigmoid_attention(q, k, v, backend="triton", **options)

    q, k, v = (random(2 * n, heads, head_dim).requires_grad_() for _ in range(3))
    starts = torch.tensor([0, n, 2 * n], dtype=torch.int32)
    query, keys, values = random(1, 1, heads, head_dim), *random(2, 1, 16 * n, heads, head_dim)
    lengths, new = torch.tensor([8 * n], dtype=torch.int32), random(2, 1, 1, heads, head_dim)
    return {
        "dense": dense(),
        "normalize, causal": dense(normalize=True, is_causal=True),
        "bias tensor": dense(bias=torch.full((heads, 1, 1), -4.0)),
        "mask": dense(attn_mask=torch.ones(n, n, dtype=torch.bool)),
        "dropout": dense(dropout_p=0.1),
        "packed": lambda: sigmoid_varlen_attention(q, k, v, starts, starts, n, n, backend="triton"),
        "cached": lambda: sigmoid_kvcache_attention(
            query, keys, values, bias=-4.0, cache_seqlens=lengths, backend="triton"
        ),
        "cached, appended": lambda: sigmoid_kvcache_attention(
            query, keys, values, *new, bias=-4.0, cache_seqlens=lengths, backend="triton"
        ),
    }


def host_times(config: OverheadBenchmark) -> list[dict[str, Any]]:
    """Return the microseconds of a call on the host without those of Triton and of the driver.

    microseconds: of a call whose signature is known. first_microseconds: of one whose signature is new.
    """

    def time(call: Callable[[], Any]) -> float:
        call()
        call()  # the second call is stored
        repeats = max(1, int(config.round_seconds / timeit.timeit(call, number=10) * 10))
        return min(timeit.repeat(call, number=repeats, repeat=config.rounds)) / repeats * 1e6

    def train(call: Callable[[], Tensor]) -> Callable[[], Any]:
        out = call()
        node, gradient = out.grad_fn, torch.randn_like(out)
        assert node is not None
        leaves: list[Any] = [getattr(function, "variable", None) for function, _ in node.next_functions]
        leaves = [leaf for leaf in leaves if leaf is not None]
        return lambda: torch.autograd.grad(call(), leaves, gradient)

    rows = []
    with _no_op_kernels():
        for name, call in host_calls(config).items():
            passes = {FORWARD: torch.no_grad()(call)}
            if call().requires_grad:
                passes[TRAINING] = train(call)
            for direction, timed in passes.items():
                row = {"call": name, "pass": direction, "microseconds": time(timed)}
                rows.append({**row, "first_microseconds": time(_first(timed))})
    return rows


def _first(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that is made as if it were the first."""

    def first() -> Any:
        call_cache.clear()
        return call()

    return first


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
