"""``python -m benchmarks kernels``: the GPU kernels and every installed baseline, in the paper's set-up (App. F).

12 heads, n from 64 to 78k, full and causal, inference (forward) and training (forward and backward), on random data;
D = 64, and beyond the paper D = 128 and ALiBi. Every implementation is checked against float64 before it is timed.
TFLOP/s count 4·B·H·n²·D for a forward pass, 2.5 times that for a backward, half when causal. A speed-up over a softmax
is 1 - t / t_softmax, averaged over n as in the paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import baselines, gpu, subprocesses
from benchmarks.baselines import BACKWARD, FORWARD, IMPLEMENTATIONS, OURS, TRAINING, ratio_to_fastest_softmax
from benchmarks.inputs import DTYPES, Inputs, Options, check_not_empty, random_inputs
from benchmarks.results_file import ResultsFile
from benchmarks.tables import mask_name, print_rows
from benchmarks.timing import TimedBenchmark, synchronize, time_calls, time_graphs
from sigattn.validation import check_among, check_at_least, check_positive

_COLUMNS = {
    "pass": ("pass", ""),
    "": ("implementation", ""),
    "ms": ("ms", ".3f"),
    "as graph": ("graph_ms", ".3f"),
    "TFLOP/s": ("tflops", ".1f"),
    "× softmax": ("fastest_softmax_time_over_this", ".2f"),
    "error": ("error", ".1e"),
    "gradient error": ("gradient_error", ".1e"),
}
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class KernelBenchmark(TimedBenchmark):
    """Configuration of the GPU kernel benchmark.

    Attributes:
        lengths: numbers of tokens n.
        head_dims: features of a head.
        batch_size: sequences; fewer where ``max_flops`` requires it.
        dtype: "bfloat16", "float16" or "float32".
        alibi: also measure with ALiBi, for the first head_dim.
        max_flops: FLOPs of the largest forward pass; bounds the batch, and so the time that a length takes.
        max_graph_length: tokens up to which forward and training are also timed as CUDA graphs, without launch time.
        baselines: names of the baselines compared with ours; empty for all.
        precompile: first compile and run each implementation in subprocesses; one that crashes or hangs is left out.
        max_seconds: when to stop; settings that were not reached are listed in the results.
        plot: also draw plots.
        results: folder for the results (JSON) and plots.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 78000)
    head_dims: tuple[int, ...] = (64, 128)
    batch_size: int = 32
    dtype: str = "bfloat16"
    alibi: bool = True
    max_flops: float = 1e13
    rounds: int = 5
    max_graph_length: int = 2048
    baselines: tuple[str, ...] = ()
    precompile: bool = True
    max_seconds: float = 240.0
    plot: bool = True
    results: Path = Path("runs/benchmarks/kernels")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "lengths", "head_dims", "batch_size")
        check_at_least(0, self, "max_graph_length")
        check_positive(self, "max_flops", "max_seconds")
        check_among(tuple(DTYPES), self, "dtype")
        check_among(tuple(IMPLEMENTATIONS), self, "baselines")
        check_not_empty(self, "lengths", "head_dims")


class Setting(NamedTuple):
    """One problem of the benchmark."""

    n: int
    head_dim: int
    causal: bool
    alibi: bool


def settings(config: KernelBenchmark) -> list[Setting]:
    """Return all problems, those with ALiBi last, lengths alternating: an interrupted run has measured every length."""
    kinds = [(d, causal) for d in config.head_dims for causal in (False, True)]
    plain = [Setting(n, d, causal, False) for n, (d, causal) in _interleave(config.lengths, kinds)]
    if not config.alibi:
        return plain
    return plain + [Setting(n, config.head_dims[0], c, True) for n, c in _interleave(config.lengths, (True, False))]


def _interleave(first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """Return every pair once; any ``len(first)`` pairs in a row contain each of ``first``, and likewise ``second``."""
    period = math.lcm(len(first), len(second))
    return [(first[k % len(first)], second[(k + k // period) % len(second)]) for k in range(len(first) * len(second))]


def benchmark_kernels(config: KernelBenchmark) -> dict[str, Any]:
    """Compare the GPU kernels with every installed baseline at lengths from 64 to 78k: TFLOP/s, errors, plots.

    Returns:
        The content of the results file.

    Raises:
        BenchmarkError: without a GPU, unless kernels are interpreted.
    """
    gpu.device()
    with ResultsFile.of("kernels", config) as results:
        failed = _failures(config, results) if config.precompile else {}
        for setting in results.remaining(settings(config), config.max_seconds):
            rows = results.add(setting, measure(config, setting, results.data["absent"], failed))
            kind = f"{mask_name(setting.causal)}{', ALiBi' if setting.alibi else ''}"
            print_rows(f"n = {setting.n}, D = {setting.head_dim}, {kind}", rows, _COLUMNS)
        rows = results.data["rows"]
        speed_ups = average_speed_ups(rows)
        written = results.write(average_speed_up=speed_ups)
    for line in speed_ups:
        print(line)
    if config.plot:
        plot_speed(rows, config.results)
    print(f"results: {config.results}")
    return written


def _failures(config: KernelBenchmark, results: ResultsFile) -> dict[tuple[str, Setting], str]:
    """Compile and run each implementation on each problem once, in subprocesses; return why some failed."""
    groups: dict[Hashable, list[Any]] = {}
    for s in settings(config):
        for name in names(config):
            if not results.has(s) and _unavailable(config, name, s) is None:
                length = s.n if IMPLEMENTATIONS[name].recompiles else 0
                groups.setdefault((name, s.head_dim, s.causal, s.alibi, length), []).append((config, name, s))
    found = subprocesses.find_failures("benchmarks.kernels:try_once", groups, seconds=90)
    return {
        groups[key][at][1:]: reason
        for key, reasons in found.items()
        for at, reason in reasons.items()
        if "OutOfMemoryError" not in reason  # the subprocesses share the GPU's memory
    }


def try_once(task: tuple[KernelBenchmark, str, Setting]) -> None:
    """Compile and run an implementation; its result is not checked."""
    config, name, s = task
    inputs = make_inputs(config, s)
    implementation, leaves = IMPLEMENTATIONS[name], inputs.leaves()
    out = implementation.call(*leaves, inputs.options)
    if implementation.backward:
        torch.autograd.grad(out, leaves, inputs.grad_out)
    with torch.no_grad():
        implementation.call(*leaves, inputs.options)
    synchronize()


def names(config: KernelBenchmark) -> list[str]:
    """Return the names of ours and of the chosen baselines."""
    return [name for name in IMPLEMENTATIONS if not config.baselines or name in (OURS, *config.baselines)]


def make_inputs(config: KernelBenchmark, s: Setting) -> Inputs:
    """Return random inputs of a problem."""
    shape = (batch_size_of(config, s), config.num_heads, s.n, s.head_dim)
    return random_inputs(*shape, DTYPES[config.dtype], gpu.device(), causal=s.causal, alibi=s.alibi)


def _unavailable(config: KernelBenchmark, name: str, s: Setting) -> str | None:
    """Return the reason why an implementation cannot run, or None."""
    matrix_bytes = 2 * batch_size_of(config, s) * config.num_heads * s.n**2
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 32e9
    if IMPLEMENTATIONS[name].quadratic and matrix_bytes > memory / 16:
        return "its matrix of weights would be too large"
    options = Options(0.0, s.causal, torch.ones(config.num_heads) if s.alibi else None)
    return IMPLEMENTATIONS[name].unavailable(gpu.device(), DTYPES[config.dtype], options)


def batch_size_of(config: KernelBenchmark, s: Setting) -> int:
    """Return the number of sequences: as many as ``max_flops`` allows, at least one."""
    return max(1, min(config.batch_size, int(config.max_flops / flops(config, s, FORWARD, 1))))


def measure(
    config: KernelBenchmark, s: Setting, absent: dict[str, str], failed: Mapping[tuple[str, Setting], str] | None = None
) -> list[dict[str, Any]]:
    """Time all available implementations on one problem; return a row for each implementation and pass.

    absent: receives the reasons of those that are not timed. failed: known failures, with the reason.
    """
    baselines.reset_compiled()
    torch.cuda.empty_cache()
    inputs, compared = make_inputs(config, s), {}
    for name in names(config):
        if reason := (failed or {}).get((name, s)) or _unavailable(config, name, s):
            absent[f"{name}, {s}"] = reason
        else:
            compared[name] = IMPLEMENTATIONS[name]
    passes, errors = baselines.available_passes(compared, inputs, absent, f", {s}")
    batch_size = len(inputs.query)
    rows: list[dict[str, Any]] = []
    for direction, calls in passes.items():
        # a backward pass alone belongs to the stream of its forward pass, which is not part of the graph
        use_graphs = s.n <= config.max_graph_length and direction != BACKWARD
        graphs = time_graphs(calls if use_graphs else {}, config.rounds, config.round_seconds)
        for timing in time_calls(calls, config.rounds, config.round_seconds):
            graph = graphs.get(timing.name)
            seconds = graph.seconds if graph else timing.seconds
            rows.append(
                {
                    **s._asdict(),
                    "batch_size": batch_size,
                    "pass": direction,
                    "implementation": timing.name,
                    "ms": timing.seconds * 1e3,
                    "tflops": flops(config, s, direction, batch_size) / seconds / 1e12,
                    "fastest_softmax_time_over_this": ratio_to_fastest_softmax(timing),
                    "graph_ms": graph.seconds * 1e3 if graph else None,
                    "fastest_softmax_graph_time_over_this": ratio_to_fastest_softmax(graph) if graph else None,
                    "error": errors[timing.name][0],
                    "gradient_error": errors[timing.name][1],
                }
            )
    return rows


def flops(config: KernelBenchmark, s: Setting, direction: str, batch_size: int) -> float:
    """Return the FLOPs of a pass by the convention of the field."""
    one = 4.0 * batch_size * config.num_heads * s.n**2 * s.head_dim / (2 if s.causal else 1)
    return one * {FORWARD: 1.0, BACKWARD: 2.5, TRAINING: 3.5}[direction]


def average_speed_ups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return our speed-up over each softmax, averaged over n as in the paper: 1 - t / t_softmax, in percent.

    Times of CUDA graphs are used where both have one.
    """
    result = []
    keys = sorted({(r["head_dim"], r["causal"], r["alibi"], r["pass"]) for r in rows})
    for key in keys:
        here = [r for r in rows if (r["head_dim"], r["causal"], r["alibi"], r["pass"]) == key]
        own = {r["n"]: r for r in here if r["implementation"] == OURS}
        for other in sorted({r["implementation"] for r in here if IMPLEMENTATIONS[r["implementation"]].softmax}):
            theirs = {r["n"]: r for r in here if r["implementation"] == other}
            shared = sorted(own.keys() & theirs.keys())
            if shared:
                gain = statistics.mean(1 - 1 / _time_ratio(theirs[n], own[n]) for n in shared)
                setting = dict(zip(("head_dim", "causal", "alibi", "pass"), key, strict=True))
                result.append({**setting, "over": other, "percent": 100 * gain, "lengths": shared})
    return result


def _time_ratio(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the time of a divided by that of b, as graphs if both were captured."""
    which = "ms" if a["graph_ms"] is None or b["graph_ms"] is None else "graph_ms"
    found: float = a[which] / b[which]
    return found


def plot_speed(rows: list[dict[str, Any]], folder: Path) -> None:
    """Plot TFLOP/s over n for each head size, mask and pass, as the paper does for the H100."""
    from benchmarks.plots import new_figure, plot_implementations

    for head_dim, alibi in sorted({(r["head_dim"], r["alibi"]) for r in rows}):
        here = [r for r in rows if (r["head_dim"], r["alibi"]) == (head_dim, alibi)]
        masks = sorted({r["causal"] for r in here})
        figure, axes = new_figure(len(masks), 3)
        for row, causal in zip(axes, masks, strict=True):
            for axis, direction in zip(row, (FORWARD, BACKWARD, TRAINING), strict=True):
                own = [r for r in here if r["causal"] == causal and r["pass"] == direction]
                title = f"{direction}, {mask_name(causal)}, D = {head_dim}"
                plot_implementations(axis, own, "tflops", ylabel="TFLOP/s", title=title)
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0)
        axes[0][0].legend(fontsize="small")
        figure.savefig(folder / f"d{head_dim}{'_alibi' if alibi else ''}.png", dpi=110)
