"""``sigattn bench kernels``: the GPU kernels beside every peer present, in the paper's set-up (App. F).

12 heads, n from 64 to 78k, full and causal, inference (forward) and training (forward and backward), on random data;
D = 64, and beyond the paper D = 128 and ALiBi. Every implementation is checked against float64 before it is timed, and
what is wrong is not timed. TFLOP/s count 4·B·H·n²·D for a forward pass, 2.5 times that for a backward, half when
causal. A speed-up over a softmax is 1 - t / t_softmax, averaged over n as in the paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sigattn.bench import gpu, subprocesses
from sigattn.bench.baselines import IMPLEMENTATIONS, OURS, Implementation, Options, reset_compiled
from sigattn.bench.results_file import Report
from sigattn.validation import check_among, check_at_least, check_not_empty, check_not_negative, check_positive

FORWARD, BACKWARD, TRAINING = "forward", "backward", "training"
_NONE: Mapping[tuple[str, Setting], str] = {}
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class KernelBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of tokens n.
        heads: of a sequence.
        head_dims: features of a head.
        batch: sequences, fewer where ``most_flops`` says so.
        dtype: "bfloat16", "float16" or "float32".
        alibi: also measure with ALiBi, for the first head_dim.
        most_flops: the largest forward pass; bounds the batch, and so the time that a length takes.
        rounds: how often each implementation is timed.
        round_seconds: the least time of a round.
        graphs_up_to: tokens up to which forward and training are also timed as CUDA graphs, without the launching.
        baselines: names of the baselines compared with ours; empty for all.
        precompile: first compile and run each implementation in processes of its own, several at a time; one that
            crashes or hangs is left out.
        seconds: when to stop; settings that were not reached are named in the results.
        profile: also list the time of each of our kernels.
        draw: also draw plots.
        resume: continue the results in the folder instead of replacing them.
        results: folder for the results (JSON) and plots.
    """

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 78000)
    heads: int = 12
    head_dims: tuple[int, ...] = (64, 128)
    batch: int = 32
    dtype: str = "bfloat16"
    alibi: bool = True
    most_flops: float = 1e13
    rounds: int = 5
    round_seconds: float = 0.01
    graphs_up_to: int = 2048
    baselines: tuple[str, ...] = ()
    precompile: bool = True
    seconds: float = 240.0
    profile: bool = True
    draw: bool = True
    resume: bool = False
    results: Path = Path("runs/bench/kernels")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "heads", "head_dims", "batch", "rounds")
        check_at_least(0, self, "graphs_up_to")
        check_positive(self, "most_flops", "seconds")
        check_not_negative(self, "round_seconds")
        check_among(tuple(gpu.DTYPES), self, "dtype")
        check_among(tuple(IMPLEMENTATIONS), self, "baselines")
        check_not_empty(self, "lengths", "head_dims")


class Setting(NamedTuple):
    """One problem of the benchmark."""

    n: int
    head_dim: int
    causal: bool
    alibi: bool


def settings(config: KernelBenchmark) -> list[Setting]:
    """Plain before ALiBi; in each, lengths in turn, so that a run cut short has measured every length."""
    kinds = [(d, causal) for d in config.head_dims for causal in (False, True)]
    plain = [Setting(n, d, causal, False) for n, (d, causal) in _in_turn(config.lengths, kinds)]
    alibi = [Setting(n, config.head_dims[0], True, True) for n in config.lengths] if config.alibi else []
    return plain + alibi


def _in_turn(first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """Every pair once, such that any ``len(first)`` pairs in a row have each of ``first``, and so for ``second``."""
    period = math.lcm(len(first), len(second))
    return [(first[k % len(first)], second[(k + k // period) % len(second)]) for k in range(len(first) * len(second))]


def run(config: KernelBenchmark) -> dict[str, Any]:
    """Measure, print tables, write the results after each setting, then plots; return what was written."""
    console = Console()
    described = gpu.describe("kernels", {**asdict(config), "results": ""})
    with Report(config.results / "kernels.json", described, resume=config.resume) as report:
        failed = _failures(config, report) if config.precompile else {}
        for setting in report.remaining(settings(config), config.seconds):
            rows = report.add(setting, measure(config, setting, report.data["absent"], failed))
            console.print(table(rows, setting), highlight=False)
        rows = report.data["rows"]
        speed = speed_ups(rows)
        profile = report.data.get("profile") or (_profile(config) if config.profile else [])
        result = report.write(average_speed_up=speed, profile=profile)
    for line in speed:
        console.print(f"{line}", highlight=False, soft_wrap=True)
    if config.draw:
        plots(rows, config.results)
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return result


def _failures(config: KernelBenchmark, report: Report) -> dict[tuple[str, Setting], str]:
    """Compile and run each implementation on each problem once, in processes of its own; return why some failed."""
    groups: dict[Hashable, list[Any]] = {}
    for s in settings(config):
        for name in names(config):
            if not report.has(s) and _absent(config, name, s) is None:
                length = s.n if IMPLEMENTATIONS[name].recompiles else 0
                groups.setdefault((name, s.head_dim, s.causal, s.alibi, length), []).append((config, name, s))
    found = subprocesses.find_failures("sigattn.bench.kernels:try_once", groups, seconds=90)
    return {
        groups[key][at][1:]: reason
        for key, reasons in found.items()
        for at, reason in reasons.items()
        if "OutOfMemoryError" not in reason  # it shared the GPU's memory with the others
    }


def try_once(task: tuple[KernelBenchmark, str, Setting]) -> None:
    """Compile and run an implementation; whether it is right is checked before it is timed."""
    config, name, s = task
    problem = inputs(config, s)
    leaves = gpu.leaves(problem)
    out = IMPLEMENTATIONS[name].call(*leaves, problem.options)
    if IMPLEMENTATIONS[name].backward:
        torch.autograd.grad(out, leaves, problem.grad_out)
    with torch.no_grad():
        IMPLEMENTATIONS[name].call(*leaves, problem.options)
    gpu.synchronize()


def names(config: KernelBenchmark) -> list[str]:
    """Ours and the implementations that were asked for."""
    return [name for name in IMPLEMENTATIONS if not config.baselines or name in (OURS, *config.baselines)]


def inputs(config: KernelBenchmark, s: Setting) -> gpu.Inputs:
    """Random inputs of a problem."""
    dtype = gpu.DTYPES[config.dtype]
    return gpu.inputs(batch_of(config, s), config.heads, s.n, s.head_dim, dtype, s.causal, s.alibi)


def _absent(config: KernelBenchmark, name: str, s: Setting) -> str | None:
    """Why an implementation cannot take part, or None."""
    if IMPLEMENTATIONS[name].quadratic and 2 * batch_of(config, s) * config.heads * s.n**2 > gpu.memory() / 16:
        return "it would hold all the weights"
    options = Options(0.0, s.causal, torch.ones(config.heads) if s.alibi else None)
    return IMPLEMENTATIONS[name].unavailable(gpu.device(), gpu.DTYPES[config.dtype], options)


def batch_of(config: KernelBenchmark, s: Setting) -> int:
    """As many sequences as ``most_flops`` allows, at least one."""
    one = 4.0 * config.heads * s.n**2 * s.head_dim / (2 if s.causal else 1)
    return max(1, min(config.batch, int(config.most_flops / one)))


def measure(
    config: KernelBenchmark, s: Setting, absent: dict[str, str], failed: Mapping[tuple[str, Setting], str] = _NONE
) -> list[dict[str, Any]]:
    """Measure all implementations that there are on one problem; return a row for each implementation and pass.

    failed: implementations that are left out, with the reason.
    """
    reset_compiled()
    gpu.free_memory()
    batch, problem = batch_of(config, s), inputs(config, s)
    passes: dict[str, dict[str, Callable[[], object]]] = {FORWARD: {}, BACKWARD: {}, TRAINING: {}}
    errors: dict[str, tuple[float, float | None]] = {}
    for name in names(config):
        reason = failed.get((name, s)) or _absent(config, name, s)
        if reason is None:
            reason = _enter(name, IMPLEMENTATIONS[name], problem, passes, errors)
        if reason is not None:
            absent[f"{name}, {s}"] = reason
    rows: list[dict[str, Any]] = []
    for direction, calls in passes.items():
        # a backward on its own belongs to the stream of a forward outside of the graph
        whole = s.n <= config.graphs_up_to and direction != BACKWARD
        graphs = {name: gpu.captured(call) for name, call in calls.items()} if whole else {}
        replays = {name: replay for name, replay in graphs.items() if replay is not None}
        bare = {name: (t, _over_softmax(ratios)) for name, t, ratios in _race(replays, config)}
        for name, seconds, ratios in _race(calls, config):
            graph_seconds, graph_ratio = bare.get(name, (None, None))
            rows.append(
                {
                    **s._asdict(),
                    "batch": batch,
                    "pass": direction,
                    "implementation": name,
                    "ms": seconds * 1e3,
                    "tflops": flops(config, s, direction, batch) / (graph_seconds or seconds) / 1e12,
                    "fastest_softmax_time_over_this": _over_softmax(ratios),
                    "graph_ms": None if graph_seconds is None else graph_seconds * 1e3,
                    "fastest_softmax_graph_time_over_this": graph_ratio,
                    "error": errors[name][0],
                    "gradient_error": errors[name][1],
                }
            )
    return rows


def _race(
    calls: Mapping[str, Callable[[], object]], config: KernelBenchmark
) -> Iterable[tuple[str, float, dict[str, float]]]:
    return gpu.race(calls, config.rounds, config.round_seconds) if calls else ()


def _over_softmax(ratios: dict[str, float]) -> float | None:
    """How many times as long the fastest softmax takes."""
    return min((ratio for other, ratio in ratios.items() if IMPLEMENTATIONS[other].softmax), default=None)


def _enter(
    name: str,
    implementation: Implementation,
    problem: gpu.Inputs,
    passes: dict[str, dict[str, Callable[[], object]]],
    errors: dict[str, tuple[float, float | None]],
) -> str | None:
    """Check an implementation and enter it for the passes it has; or say why it is not entered."""
    leaves = gpu.leaves(problem)
    q, k, v = (t.detach() for t in leaves)
    o, grad = problem.options, problem.grad_out
    try:
        out = implementation.call(*leaves, o)
        gradients = torch.autograd.grad(out, leaves, grad, retain_graph=True) if implementation.backward else None
        found = gpu.errors(problem, implementation.softmax, out.detach(), gradients)
    except Exception as error:  # a peer may fail in ways of its own: it is left out, and the results say why
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not gpu.largest(e for e in found if e is not None) <= gpu.TOLERANCE[problem.query.dtype]:
        return f"it is wrong: relative errors {found}"
    errors[name] = found

    def training(call: Callable[..., Tensor] = implementation.call) -> object:
        return torch.autograd.grad(call(*leaves, o), leaves, grad)

    def inference() -> object:
        with torch.no_grad():
            return implementation.call(q, k, v, o)

    passes[FORWARD][name] = inference
    if implementation.backward:
        passes[BACKWARD][name] = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
        passes[TRAINING][name] = training
    return None


def flops(config: KernelBenchmark, s: Setting, direction: str, batch: int) -> float:
    """By the field's convention."""
    one = 4.0 * batch * config.heads * s.n**2 * s.head_dim / (2 if s.causal else 1)
    return one * {FORWARD: 1.0, BACKWARD: 2.5, TRAINING: 3.5}[direction]


def speed_ups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over each softmax, averaged over n as the paper counts it: 1 - t / t_softmax, in percent.

    Of short sequences the GPU's time counts, where both have one, not that of launching.
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
                gain = statistics.mean(1 - 1 / _ratio(theirs[n], own[n]) for n in shared)
                names = dict(zip(("head_dim", "causal", "alibi", "pass"), key, strict=True))
                result.append({**names, "over": other, "percent": 100 * gain, "lengths": shared})
    return result


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Time of one over that of another, as graphs if both were captured."""
    which = "ms" if a["graph_ms"] is None or b["graph_ms"] is None else "graph_ms"
    found: float = a[which] / b[which]
    return found


def _profile(config: KernelBenchmark) -> list[dict[str, Any]]:
    """The time of each kernel of a training step of ours, at the middle length, from PyTorch's profiler."""
    n = sorted(config.lengths)[len(config.lengths) // 2]
    setting = Setting(n, config.head_dims[0], True, False)
    batch = batch_of(config, setting)
    problem = gpu.inputs(batch, config.heads, n, setting.head_dim, gpu.DTYPES[config.dtype], True)
    leaves = gpu.leaves(problem)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def step() -> None:
        out = IMPLEMENTATIONS[OURS].call(*leaves, problem.options)
        torch.autograd.grad(out, leaves, problem.grad_out)
        gpu.synchronize()

    step()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    return [
        {"n": n, "batch": batch, "kernel": event.key, "ms": event.self_device_time_total / 1e3, "calls": event.count}
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]


def table(rows: Iterable[dict[str, Any]], s: Setting) -> Table:
    """The rows of one problem."""
    kind = f"{'causal' if s.causal else 'full'}{', ALiBi' if s.alibi else ''}"
    result = Table(title=f"n = {s.n}, D = {s.head_dim}, {kind}")
    for column in ("pass", "", "ms", "as graph", "TFLOP/s", "× softmax", "error"):
        result.add_column(column, justify="left" if column in ("pass", "") else "right")
    for r in rows:
        ratio = r["fastest_softmax_time_over_this"]
        error = r["error"] if r["pass"] == FORWARD else r["gradient_error"]
        result.add_row(
            r["pass"],
            r["implementation"],
            f"{r['ms']:.3f}",
            "–" if r["graph_ms"] is None else f"{r['graph_ms']:.3f}",
            f"{r['tflops']:.1f}",
            "–" if ratio is None else f"{ratio:.2f}",
            "–" if error is None else f"{error:.1e}",
        )
    return result


def plots(rows: list[dict[str, Any]], folder: Path) -> None:
    """For each head size, mask and pass, TFLOP/s over n, as in the paper's figures for the H100."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    keys = sorted({(r["head_dim"], r["alibi"]) for r in rows})
    for head_dim, alibi in keys:
        here = [r for r in rows if (r["head_dim"], r["alibi"]) == (head_dim, alibi)]
        masks = sorted({r["causal"] for r in here})
        figure, axes = plt.subplots(len(masks), 3, figsize=(15, 4 * len(masks)), squeeze=False, layout="constrained")
        names = [name for name in IMPLEMENTATIONS if any(r["implementation"] == name for r in here)]
        for row, causal in zip(axes, masks, strict=True):
            for axis, direction in zip(row, (FORWARD, BACKWARD, TRAINING), strict=True):
                _plot(axis, [r for r in here if r["causal"] == causal and r["pass"] == direction], names)
                axis.set_title(f"{direction}, {'causal' if causal else 'full'}, D = {head_dim}")
        axes[0][0].legend(fontsize="small")
        figure.savefig(folder / f"d{head_dim}{'_alibi' if alibi else ''}.png", dpi=110)
        plt.close(figure)


def _plot(axis: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    for at, name in enumerate(names):
        own = sorted((r["n"], r["tflops"]) for r in rows if r["implementation"] == name)
        if own:
            style = "-" if not IMPLEMENTATIONS[name].softmax else "--"
            x, y = zip(*own, strict=True)
            axis.plot(x, y, style, marker=".", color=f"C{at}", label=name, linewidth=2 if name == OURS else 1)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens n")
    axis.set_ylabel("TFLOP/s")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
