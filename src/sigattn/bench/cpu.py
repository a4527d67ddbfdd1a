"""``sigattn bench cpu``: our operator beside its peers on a CPU, in one run.

Peers: softmax by PyTorch's own ``scaled_dot_product_attention``, and sigmoid attention as a user would write it, plain
and compiled. Each is checked against float64 first, and what is wrong is not timed. Machines are noisy, so look at the
ratios: every round goes through all implementations in turn, and a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import sigattn
from sigattn.bench import memory, provenance
from sigattn.validation import check_among, check_at_least, check_not_empty, check_not_negative

SOFTMAX, NAIVE, COMPILED, OURS = "SDPA softmax", "naive sigmoid", "compiled naive sigmoid", "sigattn"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of the largest value of the truth; a wrong formula exceeds it
SAMPLES = 64  # queries and keys whose results are compared with float64


@dataclass(frozen=True, kw_only=True)
class CpuBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of tokens n.
        heads: of one sequence (batch 1).
        head_dim: features of a head.
        dtypes: "float32", "bfloat16".
        threads: PyTorch's threads.
        rounds: how often each implementation is timed (fewer beyond 4096 tokens).
        compiled: also time the compiled naive formula.
        memory: also measure peak memory, at 4096 tokens and, with one head, 65,536.
        naive_limit_gib: leave the naive formula out where its matrices would take more than this.
        results: where to write the results as JSON.
    """

    lengths: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    heads: int = 8
    head_dim: int = 64
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: int = 2
    rounds: int = 9
    compiled: bool = True
    memory: bool = True
    naive_limit_gib: float = 3.0
    results: Path = Path("runs/bench/cpu.json")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "heads", "head_dim", "threads", "rounds")
        check_not_negative(self, "naive_limit_gib")
        check_among(tuple(DTYPES), self, "dtypes")
        check_not_empty(self, "lengths", "dtypes")


@dataclass(frozen=True)
class Inputs:
    """One problem: query, key, value and the output's gradient, each (1, heads, n, head_dim); b = -log n."""

    tensors: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    causal: bool

    @property
    def bias(self) -> float:
        """The paper's."""
        return sigattn.log_length_bias(self.grad_out.shape[2])


Implementation = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor, _: float, causal: bool) -> Tensor:
    """PyTorch's softmax attention, its flash kernel on a CPU."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def naive(q: Tensor, k: Tensor, v: Tensor, bias: float, causal: bool) -> Tensor:
    """Sigmoid attention in one line, as users write it."""
    p = torch.sigmoid(q @ k.mT * q.shape[-1] ** -0.5 + bias)
    return (p.tril() if causal else p) @ v


def ours(q: Tensor, k: Tensor, v: Tensor, bias: float, causal: bool) -> Tensor:
    """This library's."""
    return sigattn.sigmoid_attention(q, k, v, is_causal=causal, bias=bias)


def implementations(config: CpuBenchmark, n: int) -> dict[str, Implementation]:
    """Who takes part at a length."""
    result: dict[str, Implementation] = {SOFTMAX: softmax, OURS: ours}
    if 4 * config.heads * n * n / 2**30 <= config.naive_limit_gib / 4:  # logits, weights and two gradients in float32
        result[NAIVE] = naive
        if config.compiled:
            result[COMPILED] = torch.compile(naive)
    return result


def run(config: CpuBenchmark) -> dict[str, Any]:
    """Measure, print tables, write the results; gives what was written."""
    console = Console()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    rows = []
    try:
        # timing a backward many times keeps its graph, which the compiled formula allows only without donated buffers
        with torch._functorch.config.patch(donated_buffer=False):
            for n in config.lengths:
                for dtype in config.dtypes:
                    for causal in (False, True):
                        rows += measure(config, n, DTYPES[dtype], causal)
                console.print(table(rows, n))
    finally:
        torch.set_num_threads(before)
    used = memory.cases(config.heads, config.head_dim, config.threads) if config.memory else []
    if used:
        console.print(memory.table(used))
    report = {**provenance.describe("cpu", asdict(config)), "rows": rows, "memory": used}
    provenance.write(config.results, report)
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return report


def measure(config: CpuBenchmark, n: int, dtype: torch.dtype, causal: bool) -> list[dict[str, Any]]:
    """All implementations on one problem: a row for each implementation and pass."""
    torch.manual_seed(n)
    q, k, v, g = torch.randn(4, 1, config.heads, n, config.head_dim).to(dtype).unbind()
    inputs = Inputs((q, k, v), g, causal)
    torch._dynamo.reset()  # each problem is compiled for its own sizes, as a user's would be
    passes: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    errors: dict[str, tuple[float, float]] = {}
    for name, function in implementations(config, n).items():
        errors[name] = check(name, function, inputs)
        passes["forward"][name] = _forward(function, inputs)
        passes["backward"][name] = _backward(function, inputs)
    rounds = config.rounds if n <= 4096 else max(3, config.rounds // 3)
    rows = []
    for at, (direction, calls) in enumerate(passes.items()):
        for name, seconds, ratios in race(calls, rounds):
            rows.append(
                {
                    "n": n,
                    "dtype": str(dtype).removeprefix("torch."),
                    "causal": causal,
                    "pass": direction,
                    "implementation": name,
                    "median_ms": seconds * 1e3,
                    "softmax_time_over_this": ratios[SOFTMAX],
                    "naive_time_over_this": ratios.get(NAIVE),
                    "relative_error": errors[name][at],
                }
            )
    return rows


def _forward(function: Implementation, inputs: Inputs) -> Callable[[], object]:
    return lambda: function(*inputs.tensors, inputs.bias, inputs.causal)


def _backward(function: Implementation, inputs: Inputs) -> Callable[[], object]:
    leaves = q, k, v = _leaves(inputs)
    out = function(q, k, v, inputs.bias, inputs.causal)
    return lambda: torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True)


def _leaves(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in inputs.tensors)
    return q, k, v


def race(calls: dict[str, Callable[[], object]], rounds: int) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Time the calls in turn; yield name, median seconds and the ratios of the others' times to its own (medians)."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, min(200, int(0.01 / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    for name, own in times.items():
        ratios = {other: statistics.median(a / b for a, b in zip(t, own, strict=True)) for other, t in times.items()}
        yield name, statistics.median(own), ratios


# -- correctness ------------------------------------------------------------------------------------------------------


def check(name: str, function: Implementation, inputs: Inputs) -> tuple[float, float]:
    """The relative errors of output and gradients against float64, on some queries and keys.

    Raises:
        RuntimeError: if an error is beyond what the dtype explains; a wrong implementation is not timed.
    """
    leaves = q, k, v = _leaves(inputs)
    out = function(q, k, v, inputs.bias, inputs.causal)
    gradients = torch.autograd.grad(out, leaves, inputs.grad_out)
    n = out.shape[2]
    at = torch.linspace(0, n - 1, min(n, SAMPLES)).long()
    expected = truth(inputs, at, is_softmax=name == SOFTMAX)
    errors = [
        ((t[:, :, at].double() - e).abs().max() / e.abs().max()).item()
        for t, e in zip((out.detach(), *gradients), expected, strict=True)
    ]
    if not all(error <= TOLERANCE[out.dtype] for error in errors):  # max may pass over NaN
        raise RuntimeError(f"{name} is wrong at n={n}, {out.dtype}, causal={inputs.causal}: relative errors {errors}")
    return errors[0], max(errors[1:])


def truth(inputs: Inputs, at: Tensor, is_softmax: bool) -> Sequence[Tensor]:
    """Output, dQ, dK and dV of the chosen queries and keys, in float64, from the definition."""
    q, k, v, g = (t.double() for t in (*inputs.tensors, inputs.grad_out))
    n, scale = q.shape[2], q.shape[3] ** -0.5
    everything = torch.arange(n)

    def weights(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:  # P and dS, each (1, heads, rows, columns)
        seen = rows[:, None] >= columns if inputs.causal else torch.ones((), dtype=torch.bool)
        s = scale * q[:, :, rows] @ k[:, :, columns].mT
        dp = g[:, :, rows] @ v[:, :, columns].mT
        if not is_softmax:
            p = torch.sigmoid(s + inputs.bias) * seen
            return p, p * (1 - p) * dp
        p = (s - log_mass[:, :, rows]).exp() * seen
        return p, p * (dp - delta[:, :, rows])

    log_mass = delta = torch.zeros(())
    if is_softmax:
        log_mass, delta = _softmax_statistics(q, k, v, g, scale, inputs.causal)
    p, ds = weights(at, everything)
    p_of_keys, ds_of_keys = weights(everything, at)
    return p @ v, scale * ds @ k, scale * ds_of_keys.mT @ q, p_of_keys.mT @ g


def _softmax_statistics(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:  # each (1, heads, n, 1)
    """Each row's log-sum-exp and dO · O, a block of rows at a time."""
    masses, deltas = [], []
    columns = torch.arange(k.shape[2])
    for rows in columns.split(256):
        s = scale * q[:, :, rows] @ k.mT
        if causal:
            s = s.masked_fill(rows[:, None] < columns, -math.inf)
        masses.append(s.logsumexp(-1, keepdim=True))
        deltas.append((g[:, :, rows] * (s.softmax(-1) @ v)).sum(-1, keepdim=True))
    return torch.cat(masses, 2), torch.cat(deltas, 2)


def table(rows: Sequence[dict[str, Any]], n: int) -> Table:
    """The rows of one length."""
    result = Table(title=f"n = {n}")
    for column in ("pass", "dtype", "mask", "", "ms", "× softmax", "× naive", "error"):
        result.add_column(column, justify="left" if column in ("pass", "dtype", "mask", "") else "right")
    for row in (r for r in rows if r["n"] == n):
        over_naive = row["naive_time_over_this"]
        result.add_row(
            row["pass"],
            row["dtype"],
            "causal" if row["causal"] else "full",
            row["implementation"],
            f"{row['median_ms']:.3f}",
            f"{row['softmax_time_over_this']:.2f}",
            "–" if over_naive is None else f"{over_naive:.2f}",
            f"{row['relative_error']:.1e}",
            end_section=row["implementation"] == (COMPILED if over_naive is not None else OURS),
        )
    return result
