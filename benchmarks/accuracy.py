"""``python -m benchmarks accuracy``: error of weights and outputs as n grows, with b = -log n.

A typical weight is 1/n. An absolute error, such as that of the hardware's tanh, is small compared with 1 and large
compared with 1/n; the goal is an error of the size of the dtype's rounding. The weights P are read from the output for
values that are one-hot: at most ``head_dim`` keys, spread over the sequence, have one nonzero entry each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu
from benchmarks.baselines import IMPLEMENTATIONS, error_line, reset_compiled
from benchmarks.inputs import DTYPES, Options, check_not_empty
from benchmarks.results_file import ResultsFile
from benchmarks.subprocesses import is_gpu_fault
from benchmarks.tables import print_rows
from sigattn.validation import check_among, check_at_least

_COLUMNS = {
    "n": ("n", "d"),
    "": ("implementation", ""),
    "P, mean": ("weights_mean", ".1e"),
    "P, largest": ("weights_max", ".1e"),
    "O": ("output", ".1e"),
}
_MAX_QUADRATIC = 20_000  # keys up to which implementations that materialise the weights are measured


@dataclass(frozen=True, kw_only=True)
class AccuracyBenchmark:
    """Configuration of the accuracy benchmark.

    Attributes:
        lengths: numbers of keys n.
        queries: number of queries measured at each length.
        head_dim: D, and the number of weights read for each query.
        dtypes: "float16", "bfloat16", "float32".
        all_queries: compute as many queries as keys, which some baselines require; otherwise only those measured.
        plot: also draw a plot.
        resume: continue the results in the folder instead of replacing them.
        results: folder for the results (JSON) and the plot.
    """

    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    queries: int = 64
    head_dim: int = 64
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    all_queries: bool = True
    plot: bool = True
    resume: bool = False
    results: Path = Path("runs/benchmarks/accuracy")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "queries", "head_dim")
        check_among(tuple(DTYPES), self, "dtypes")
        check_not_empty(self, "lengths", "dtypes")


def benchmark_accuracy(config: AccuracyBenchmark) -> dict[str, Any]:
    """Measure the error of weights and outputs over n, b = -log n, of sigattn and its baselines, in each dtype.

    Returns:
        The content of the results file.

    Raises:
        BenchmarkError: without a GPU, unless kernels are interpreted.
    """
    gpu.device()
    with ResultsFile.of("accuracy", config) as results:
        for n, dtype in results.remaining([(n, dtype) for dtype in config.dtypes for n in config.lengths]):
            results.add((n, dtype), measure(config, n, dtype, results.data["absent"]))
        rows = results.data["rows"]
    for dtype in config.dtypes:
        own = [row for row in rows if row["dtype"] == dtype]
        print_rows(f"{dtype}: error relative to float64, b = -log n", own, _COLUMNS)
    if config.plot:
        plot_errors(rows, config)
    print(f"results: {config.results}")
    return results.data


def measure(config: AccuracyBenchmark, n: int, dtype: str, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each sigmoid implementation at one length; ``absent`` receives reasons of missing ones."""
    reset_compiled()
    kind, device = DTYPES[dtype], gpu.device()
    generator = torch.Generator(device).manual_seed(n)
    options = Options(-math.log(n))
    q, k, v = (torch.randn(1, 1, n, config.head_dim, generator=generator, device=device).to(kind) for _ in range(3))
    rows_at = torch.linspace(0, n - 1, min(config.queries, n), device=device).long()
    chosen = torch.linspace(0, n - 1, config.head_dim, device=device).long().unique()
    one_hot = torch.zeros_like(v)
    # about n, and exact in each dtype: a weight of 1/n would underflow in a float16 output, though not in the kernel
    unit = 2.0 ** min(int(math.log2(n)), 15)
    one_hot[0, 0, chosen, torch.arange(len(chosen), device=device)] = unit
    if not config.all_queries:
        q = q[:, :, rows_at]
        rows_at = torch.arange(len(rows_at), device=device)
    p = torch.sigmoid(q[0, 0, rows_at].double() @ k[0, 0].double().mT * config.head_dim**-0.5 + options.bias)

    def results(values: Tensor, call: Any) -> Tensor:
        out: Tensor = call(q, k, values, options)[0, 0, rows_at].double()
        return out

    rows = []
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.softmax or (implementation.quadratic and n > _MAX_QUADRATIC):
            continue
        reason = implementation.unavailable(device, kind, options)
        if reason is not None:
            absent[f"{name}, {dtype}"] = reason
            continue
        try:
            with torch.no_grad():
                weights = results(one_hot, implementation.call)[:, : len(chosen)] / unit
                out = results(v, implementation.call)
        except Exception as error:  # baselines fail in various ways; the results give the reason
            absent[f"{name}, {dtype}, n = {n}"] = error_line(error)
            if is_gpu_fault(error_line(error)):
                raise
            continue
        relative = (weights / p[:, chosen] - 1).abs()
        expected = p @ v[0, 0].double()
        rows.append(
            {
                "n": n,
                "dtype": dtype,
                "implementation": name,
                "weights_mean": relative.mean().item(),
                "weights_max": relative.max().item(),
                "output": ((out - expected).norm() / expected.norm()).item(),
            }
        )
    return rows


def plot_errors(rows: list[dict[str, Any]], config: AccuracyBenchmark) -> None:
    """Plot the mean relative error of the weights over n, a panel for each dtype."""
    from benchmarks.plots import new_figure, plot_implementations

    figure, (axes,) = new_figure(1, len(config.dtypes))
    for axis, dtype in zip(axes, config.dtypes, strict=True):
        own = [r for r in rows if r["dtype"] == dtype]
        scales = {"xscale": "log", "yscale": "log"}
        plot_implementations(axis, own, "weights_mean", ylabel="mean relative error of P", title=dtype, **scales)
        axis.legend(fontsize="small")
    figure.savefig(config.results / "accuracy.png", dpi=110)
