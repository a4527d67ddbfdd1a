"""What the GPU benchmarks share: the device, problems, their truth, and a race that waits for the device.

On a machine without a GPU they run as well, on a CPU and with interpreted kernels, at tiny sizes: so that they work on
the day there is one. Such runs say so in their results, and their times mean nothing.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigattn.bench import provenance
from sigattn.bench.baselines import Options

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.float32: 1e-2}  # of the largest value; TF32 included
SAMPLES = 32  # queries and keys whose results are compared with float64


def device() -> torch.device:
    """The GPU, or where there is none, the CPU with interpreted kernels.

    Raises:
        BenchmarkError: if there is neither.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise provenance.BenchmarkError(
        "this benchmark needs a GPU; to try it without one, at tiny sizes, set TRITON_INTERPRET=1"
    )


def describe(benchmark: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Where the measurement comes from."""
    report = provenance.describe(benchmark, configuration)
    import triton

    report["versions"]["triton"] = triton.__version__
    if torch.cuda.is_available():
        report["device"] = torch.cuda.get_device_name()
        report["versions"]["cuda"] = torch.version.cuda or torch.version.hip
    else:
        report["device"] += ", kernels interpreted: times mean nothing"
    return report


@dataclass(frozen=True)
class Inputs:
    """Query, key, value and the output's gradient, each (B, H, n, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    options: Options

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, n, d = self.query.shape
        return b, h, n, d


def inputs(batch: int, heads: int, n: int, d: int, dtype: torch.dtype, causal: bool, alibi: bool = False) -> Inputs:
    """Random ones, laid out as projections give them, (B, n, H, D); b = -log n."""
    generator = torch.Generator(device()).manual_seed(n)
    q, k, v, g = (
        torch.randn(batch, n, heads, d, generator=generator, device=device()).to(dtype).transpose(1, 2)
        for _ in range(4)
    )
    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device()) if alibi else None
    return Inputs(q, k, v, g, Options(-math.log(n), causal, slopes))


def leaves(problem: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh ones, that collect gradients."""
    q, k, v = (t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value))
    return q, k, v


def truth(problem: Inputs, at: Tensor, softmax: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, dQ, dK and dV of sample 0, the first and last head, at some queries and keys, in float64.

    Each (2, len(at), D), by the definition.
    """
    heads = [0, problem.shape[1] - 1]
    q, k, v, g = (t[0, heads].double() for t in (problem.query, problem.key, problem.value, problem.grad_out))
    o = problem.options
    n, scale = q.shape[1], q.shape[2] ** -0.5
    everything = torch.arange(n, device=q.device)

    def logits(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        s = scale * q[:, rows] @ k[:, columns].mT
        if o.slopes is not None:
            s = s - o.slopes[heads].double()[:, None, None] * (rows[:, None] - columns).abs()
        return s, (rows[:, None] >= columns) | (not o.causal)

    def sigmoid(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        s, seen = logits(rows, columns)
        p = torch.sigmoid(s + o.bias) * seen
        return p, p * (1 - p) * (g[:, rows] @ v[:, columns].mT)

    mass, delta = _softmax_statistics(logits, v, g, n) if softmax else (q, q)

    def weights(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        s, seen = logits(rows, columns)
        p = (s - mass[:, rows]).exp() * seen
        return p, p * (g[:, rows] @ v[:, columns].mT - delta[:, rows])

    both = weights if softmax else sigmoid
    p, ds = both(at, everything)
    p_keys, ds_keys = both(everything, at)
    return p @ v, scale * ds @ k, scale * ds_keys.mT @ q, p_keys.mT @ g


def _softmax_statistics(
    logits: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], v: Tensor, g: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    masses, deltas = [], []
    columns = torch.arange(n, device=v.device)
    for rows in columns.split(2048):
        s, seen = logits(rows, columns)
        s = s.masked_fill(~seen, -math.inf)
        masses.append(s.logsumexp(-1, keepdim=True))
        deltas.append((g[:, rows] * (s.softmax(-1) @ v)).sum(-1, keepdim=True))
    return torch.cat(masses, 1), torch.cat(deltas, 1)


def errors(
    problem: Inputs, softmax: bool, out: Tensor, gradients: tuple[Tensor, ...] | None
) -> tuple[float, float | None]:
    """Of the output and of the worst gradient, relative to the largest value."""
    at = sample(problem)
    expected = truth(problem, at, softmax)
    worst = None
    if gradients is not None:
        worst = largest(error(t, e, at) for t, e in zip(gradients, expected[1:], strict=True))
    return error(out, expected[0], at), worst


def largest(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if one is NaN (``max`` may pass over it)."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found)


def sample(problem: Inputs) -> Tensor:
    """Return the positions of the queries and keys whose results are compared with float64."""
    n = problem.shape[2]
    return torch.linspace(0, n - 1, min(n, SAMPLES), device=problem.query.device).long()


def error(t: Tensor, expected: Tensor, at: Tensor) -> float:
    """Return the largest error of a result at the positions that ``truth`` has, relative to the largest value."""
    found = t[0, [0, t.shape[1] - 1]][:, at].double()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def memory() -> float:
    """Return the bytes of the GPU's memory, or 32 GB without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 32e9


def free_memory() -> None:
    """Give memory that PyTorch keeps for later back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(call: Callable[[], object]) -> Callable[[], None] | None:
    """A call as a CUDA graph, launched in no time, as by a compiled model; None where it cannot be captured."""
    if not torch.cuda.is_available():
        return None
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except Exception:  # whatever a peer does while it is captured: it has no such time then
        synchronize()
        return None
    return graph.replay


def race(
    calls: Mapping[str, Callable[[], object]], rounds: int, least_seconds: float
) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Time the calls in turn; yield name, median seconds and the ratios of the others' times to its own (medians).

    A round repeats a call until it fills ``least_seconds``. Of short calls this is the time that Python and PyTorch
    take to launch them (``captured`` leaves that out).
    """
    repeats = {}
    for name, call in calls.items():
        call()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        repeats[name] = max(1, min(1000, int(least_seconds / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            synchronize()
            times[name].append((time.perf_counter() - start) / repeats[name])
    for name, own in times.items():
        ratios = {other: statistics.median(a / b for a, b in zip(t, own, strict=True)) for other, t in times.items()}
        yield name, statistics.median(own), ratios
