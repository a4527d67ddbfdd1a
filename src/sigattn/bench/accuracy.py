"""``sigattn bench accuracy``: how exact the weights and outputs stay as n grows, with b = -log n.

A typical weight is then 1/n. An error that is absolute, as that of the hardware's tanh, is small beside 1 and grows
beside 1/n; ours is to stay what the dtype's own rounding is. The weights P are read off the output by values that are
one-hot: key j has its one entry in column c where j is the c-th of 64 chosen keys.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sigattn.bench import gpu
from sigattn.bench.baselines import IMPLEMENTATIONS, Options, reset_compiled
from sigattn.bench.results_file import Report
from sigattn.validation import check_among, check_at_least, check_not_empty


@dataclass(frozen=True, kw_only=True)
class AccuracyBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of keys n.
        queries: number of queries measured at each length.
        head_dim: D, and the number of weights read per query.
        dtypes: "float16", "bfloat16", "float32".
        whole: whether the sequence has as many queries as keys, as a peer may want; otherwise only those measured.
        draw: also draw a plot.
        resume: continue the results in the folder instead of replacing them.
        results: folder for the results (JSON) and the plot.
    """

    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    queries: int = 64
    head_dim: int = 64
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    whole: bool = True
    draw: bool = True
    resume: bool = False
    results: Path = Path("runs/bench/accuracy")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "queries", "head_dim")
        check_among(tuple(gpu.DTYPES), self, "dtypes")
        check_not_empty(self, "lengths", "dtypes")


def run(config: AccuracyBenchmark) -> dict[str, Any]:
    """Measure, print a table, write the results after each length, then the plot; return what was written."""
    described = gpu.describe("accuracy", {**asdict(config), "results": ""})
    with Report(config.results / "accuracy.json", described, resume=config.resume) as report:
        for n, dtype in report.remaining([(n, dtype) for dtype in config.dtypes for n in config.lengths]):
            report.add((n, dtype), measure(config, n, dtype, report.data["absent"]))
        result, rows = report.data, report.data["rows"]
    console = Console()
    for dtype in config.dtypes:
        console.print(table(rows, dtype))
    if config.draw:
        plot(rows, config)
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return result


def measure(config: AccuracyBenchmark, n: int, dtype: str, absent: dict[str, str]) -> list[dict[str, Any]]:
    """Every sigmoid that there is, at one length in one dtype."""
    reset_compiled()
    kind, device = gpu.DTYPES[dtype], gpu.device()
    generator = torch.Generator(device).manual_seed(n)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    options = Options(-math.log(n))
    q, k, v = randn(1, 1, n, config.head_dim), randn(1, 1, n, config.head_dim), randn(1, 1, n, config.head_dim)
    rows_at = torch.linspace(0, n - 1, min(config.queries, n), device=device).long()
    chosen = torch.linspace(0, n - 1, config.head_dim, device=device).long().unique()
    one_hot = torch.zeros_like(v)
    # about n, and exact in each dtype: in float16 a weight of 1/n would be lost in the output, not in the kernel
    unit = 2.0 ** min(int(math.log2(n)), 15)
    one_hot[0, 0, chosen, torch.arange(len(chosen), device=device)] = unit
    if not config.whole:
        q = q[:, :, rows_at]
        rows_at = torch.arange(len(rows_at), device=device)
    p = torch.sigmoid(q[0, 0, rows_at].double() @ k[0, 0].double().mT * config.head_dim**-0.5 + options.bias)
    rows = []
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.softmax or (implementation.quadratic and n > 20_000):
            continue
        reason = implementation.unavailable(device, kind, options)
        if reason is not None:
            absent[f"{name}, {dtype}"] = reason
            continue
        try:
            with torch.no_grad():
                weights = implementation.call(q, k, one_hot, options)[0, 0, rows_at, : len(chosen)].double() / unit
                out = implementation.call(q, k, v, options)[0, 0, rows_at].double()
        except Exception as error:  # a peer may fail in ways of its own: it is left out, and the results say why
            absent[f"{name}, {dtype}, n = {n}"] = f"{type(error).__name__}: {error}".splitlines()[0]
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


def table(rows: list[dict[str, Any]], dtype: str) -> Table:
    """The rows of one dtype."""
    result = Table(title=f"{dtype}: error relative to float64, b = -log n")
    for column in ("n", "", "P, mean", "P, largest", "O"):
        result.add_column(column, justify="left" if not column else "right")
    for r in (r for r in rows if r["dtype"] == dtype):
        numbers = (f"{r[key]:.1e}" for key in ("weights_mean", "weights_max", "output"))
        result.add_row(str(r["n"]), r["implementation"], *numbers)
    return result


def plot(rows: list[dict[str, Any]], config: AccuracyBenchmark) -> None:
    """The mean relative error of the weights over n, a panel for each dtype."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(config.dtypes), figsize=(5 * len(config.dtypes), 4), layout="constrained")
    for axis, dtype in zip([axes] if len(config.dtypes) == 1 else axes, config.dtypes, strict=True):
        for at, name in enumerate(IMPLEMENTATIONS):
            own = [(r["n"], r["weights_mean"]) for r in rows if (r["dtype"], r["implementation"]) == (dtype, name)]
            if own:
                axis.plot(*zip(*own, strict=True), marker=".", color=f"C{at}", label=name)
        axis.set(xscale="log", yscale="log", xlabel="keys n", ylabel="mean relative error of P", title=dtype)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(config.results / "accuracy.png", dpi=110)
    plt.close(figure)
