"""``sigattn bench tune``: measures tile shapes on the GPU at hand, for the tables in ``ops/triton/tuning.py``.

All candidates are first compiled and run once in subprocesses. For each kernel, head size and mask, those that work are
compared with float64 (a sample) and with one another (everything), then timed in turns with the current configuration.
The result is advice: the tables are changed only by hand, together with the measurement.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from sigattn.bench import gpu, provenance, subprocesses
from sigattn.bench.results_file import Report
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.problem import UNLIMITED, Problem
from sigattn.ops.triton import kernel_args, launch, tuning
from sigattn.validation import (
    SettingsError,
    check_among,
    check_at_least,
    check_not_empty,
    check_not_negative,
    check_positive,
)

BOTH, BOTH_GLUON, BOTH_TMA = "both kernels", "both Gluon kernels", "both kernels with TMA"
AGAIN = "in force, again"  # how far its time is from that of the same in force is the noise of the race
# A tile shape, a configuration of a Hopper kernel, or for the two parts of the backward, BOTH_GLUON: the tables' Hopper
# kernels, BOTH_TMA: the tables' portable kernels with TMA; or None: the tables' portable kernels.
Candidate = tuning.Config | tuning.HopperConfig | str | None
PASSES = {
    tuning.FWD: None,
    tuning.DKDV: NeedsGrad(False, True, True),
    tuning.DQ: NeedsGrad(True, False, False),
    tuning.FUSED: NeedsGrad(),  # against both kernels of the backward together
}


@dataclass(frozen=True, kw_only=True)
class TuneBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of tokens n.
        heads: of a sequence.
        head_dims: features of a head.
        dtype: "bfloat16" or "float16".
        most_flops: of a forward pass; decides the batch.
        most_candidates: of each kernel, beside the one in force; None is all.
        specialised: measure the Hopper kernels (docs/speed.md) instead of tile shapes, beside the kernel in force.
        variants: measure, instead of all tile shapes, one of each way to compute: TMA, the Hopper kernels, the backward
            in one kernel.
        rounds: how often each candidate is timed.
        round_seconds: the least time of a round.
        seconds: when to stop; what was not reached is named in the results.
        resume: continue the results in the folder instead of replacing them.
        results: folder for the results (JSON).
    """

    lengths: tuple[int, ...] = (4096,)
    heads: int = 16
    head_dims: tuple[int, ...] = (64, 128)
    dtype: str = "bfloat16"
    most_flops: float = 5e11
    most_candidates: int | None = None
    specialised: bool = False
    variants: bool = False
    rounds: int = 3
    round_seconds: float = 0.004
    seconds: float = 300.0
    resume: bool = False
    results: Path = Path("runs/bench/tune")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lengths", "heads", "head_dims", "most_candidates", "rounds")
        check_positive(self, "most_flops", "seconds")
        check_not_negative(self, "round_seconds")
        check_among(("bfloat16", "float16"), self, "dtype")
        check_not_empty(self, "lengths", "head_dims")
        if self.specialised and self.variants:
            raise SettingsError("specialised and variants exclude each other")


class Case(NamedTuple):
    """A kernel on a problem."""

    n: int
    head_dim: int
    causal: bool
    kernel: str


def run(config: TuneBenchmark) -> dict[str, Any]:
    """Measure, print tables, write the results after each case; return what was written."""
    console = Console()
    start = time.perf_counter()
    masks = (False, True)
    # the kernels of one problem are compiled together ahead of their timing, and all at once if there are few
    together = [
        [Case(n, d, causal, k) for k in PASSES] for n in config.lengths for causal in masks for d in config.head_dims
    ]
    if config.variants:
        together = [[case for cases in together for case in cases]]
    described = gpu.describe("tune", {**asdict(config), "results": ""})
    with Report(config.results / "tune.json", described, resume=config.resume) as report:
        for cases in together:
            candidates = {case: candidates_of(config, case) for case in cases if not report.has(case)}
            in_time = time.perf_counter() - start <= config.seconds
            tasks = {case: [(config, case, c) for c in found] for case, found in candidates.items()}
            chunk = 2 if config.variants else 4
            failed = subprocesses.find_failures("sigattn.bench.tune:try_once", tasks, chunk=chunk) if in_time else {}
            for case in report.remaining(cases, None if in_time else -1.0):
                found = report.add(case, measure(config, case, candidates[case], failed[case]))
                title = f"{case.kernel}, n = {case.n}, D = {case.head_dim}, {'causal' if case.causal else 'full'}"
                console.print(table(found, title))
        left_out = [case for cases in together for case in cases if not report.has(case)]
        result = report.write(left_out_for_time=left_out)
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return result


def in_force(config: TuneBenchmark, case: Case) -> tuning.Config:
    """The tables' tile shape; of the whole backward, that of the kernel of the keys."""
    kernel = tuning.DKDV if case.kernel == tuning.FUSED else case.kernel
    itemsize = gpu.DTYPES[config.dtype].itemsize
    return tuning.kernel_config(kernel, kernel_args.architecture(gpu.device()), case.head_dim, itemsize)


def candidates_of(config: TuneBenchmark, case: Case) -> list[Candidate]:
    """What is measured, and first what is in force."""
    own = in_force(config, case)
    found: list[Candidate] = [own]
    if case.kernel == tuning.FUSED:
        found = [None, own] if tuning.supports_atomic_dq(own, kernel_args.architecture(gpu.device())) else [None]
    if config.variants:
        found += [BOTH_TMA, BOTH_GLUON] if case.kernel == tuning.FUSED else []
        found += [own._replace(tma=not own.tma)]
        found += [c for c in (tuning.HOPPER_CONFIGS[case.kernel].get(case.head_dim),) if c is not None]
    elif config.specialised:
        found += [BOTH_GLUON] if case.kernel == tuning.FUSED else []
        found += tuning.hopper_candidates(case.kernel, case.head_dim)
    else:
        found += [c for c in tuning.candidates(case.kernel, case.head_dim) if c != own]
    return found if config.most_candidates is None else found[: 1 + config.most_candidates]


def problem_of(config: TuneBenchmark, case: Case, batch: int) -> tuple[Problem, gpu.Inputs]:
    """Random inputs of a case."""
    given = gpu.inputs(batch, config.heads, case.n, case.head_dim, gpu.DTYPES[config.dtype], case.causal)
    return Problem(given.query, given.key, given.value, right=0 if case.causal else UNLIMITED), given


def try_once(task: tuple[TuneBenchmark, Case, Candidate]) -> None:
    """Compile and run a candidate on one sample."""
    config, case, candidate = task
    _call(*problem_of(config, case, 1), case.kernel, candidate)()
    gpu.synchronize()


def run_once(config: TuneBenchmark) -> None:
    """Run each candidate for the forward and for the whole backward twice: for a profiler to watch."""
    for d in config.head_dims:
        for kernel in (tuning.FWD, tuning.FUSED):
            case = Case(config.lengths[0], d, False, kernel)
            for candidate in candidates_of(config, case):
                try:
                    for _ in range(2):
                        try_once((config, case, candidate))
                except Exception as error:  # the others may still be watched
                    print(f"{case} {_name(candidate)}: {error}", file=sys.stderr)


def measure(
    config: TuneBenchmark, case: Case, configs: list[Candidate], failed: dict[int, str]
) -> list[dict[str, Any]]:
    """One kernel on one problem, in all tile shapes but those that failed: fastest first."""
    batch = max(1, min(64, int(config.most_flops / (4.0 * config.heads * case.n**2 * case.head_dim))))
    problem, given = problem_of(config, case, batch)
    calls: dict[str, Callable[[], Any]] = {}
    rejected = {_name(configs[at]): reason for at, reason in failed.items()}
    at = gpu.sample(given)
    output, *gradients = gpu.truth(given, at, softmax=False)  # dQ, dK, dV
    truth = {tuning.FWD: [output], tuning.DKDV: gradients[1:], tuning.DQ: gradients[:1]}
    expected: list[torch.Tensor] = []
    errors = {}
    for candidate in configs:
        if _name(candidate) in rejected:
            continue
        call = _call(problem, given, case.kernel, candidate)
        result = [t.float() for t in call()]
        wrong = gpu.largest(gpu.error(t, e, at) for t, e in zip(result, truth.get(case.kernel, gradients), strict=True))
        expected = expected or (result if wrong < gpu.TOLERANCE[given.query.dtype] else [])
        other = [((r - e).abs().max() / e.abs().max()).item() for r, e in zip(result, expected, strict=False)]
        if not gpu.largest([wrong, *other]) < gpu.TOLERANCE[given.query.dtype]:
            rejected[_name(candidate)] = f"it is wrong: relative errors {wrong:.1e} from float64, {other} from others"
            continue
        calls[_name(candidate)], errors[_name(candidate)] = call, wrong
    in_force = _name(configs[0])
    if calls:
        calls[AGAIN] = next(iter(calls.values()))
    raced = sorted(gpu.race(calls, config.rounds, config.round_seconds), key=lambda found: found[1])
    first = next(iter(calls), "")
    noise = next((abs(ratios[first] - 1) for name, _, ratios in raced if name == AGAIN), 0.0)
    place = {**case._asdict(), "batch": batch}
    rows: list[dict[str, Any]] = [
        {
            **place,
            "config": name,
            "ms": seconds * 1e3,
            "current_time_over_this": ratios[first],
            "current": name == in_force,
            "faster": in_force in calls and ratios[first] > 1 + max(0.01, 2 * noise),
            "error": errors.get(name),
        }
        for name, seconds, ratios in raced
    ]
    return rows + [{**place, "config": name, "rejected": reason} for name, reason in rejected.items()]


def _call(problem: Problem, given: gpu.Inputs, kernel: str, candidate: Candidate) -> Callable[[], list[torch.Tensor]]:
    """A pass with one kernel replaced; gives its results."""
    needs = PASSES[kernel]

    def call() -> list[torch.Tensor]:
        with _in_place_of(kernel, candidate, problem, given):
            if needs is None:
                return [launch.forward(problem)]
            return [t for t in launch.backward(problem, given.grad_out, needs) if t is not None]

    return call


@contextlib.contextmanager
def _in_place_of(changed: str, candidate: Candidate, problem: Problem, given: gpu.Inputs) -> Iterator[None]:
    """The tables changed for one call."""
    changing = ("kernel_config", "ATOMIC_DQ_MIN_QUERIES", "WARP_SPECIALIZED", "HOPPER_CONFIGS", "SHRINK_TILES")
    before = {name: getattr(tuning, name) for name in changing}
    replaced = tuning.DKDV if changed == tuning.FUSED else changed

    def kernel_config(kernel: str, architecture: int, width: int, itemsize: int) -> tuning.Config:
        if kernel == replaced and isinstance(candidate, tuning.Config):
            return candidate
        found: tuning.Config = before["kernel_config"](kernel, architecture, width, itemsize)
        return found._replace(tma=True) if candidate == BOTH_TMA else found

    special: list[str] = []
    if isinstance(candidate, tuning.HopperConfig):
        special = [changed]
        tuning.HOPPER_CONFIGS = {**tuning.HOPPER_CONFIGS, changed: {problem.query.shape[-1]: candidate}}
    elif candidate == BOTH_GLUON:
        special = [tuning.DKDV, tuning.DQ]
    if special and (reason := launch_hopper.unavailable(kernel_args.prepare(problem), given.grad_out)) is not None:
        raise provenance.BenchmarkError(f"the Hopper kernels cannot serve this problem: {reason}")
    atomic = changed == tuning.FUSED and isinstance(candidate, tuning.Config | tuning.HopperConfig)
    tuning.kernel_config, tuning.WARP_SPECIALIZED, tuning.SHRINK_TILES = kernel_config, frozenset(special), False
    tuning.ATOMIC_DQ_MIN_QUERIES = {kernel_args.architecture(problem.query.device): 0} if atomic else {}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


def _name(candidate: Candidate) -> str:
    if candidate is None or isinstance(candidate, str):
        return candidate or BOTH
    fields = [
        name if value is True else str(value) for name, value in candidate._asdict().items() if value is not False
    ]
    return ("Gluon " if isinstance(candidate, tuning.HopperConfig) else "") + ", ".join(fields)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The ten fastest."""
    result = Table(title=title)
    for column in ("tile, warps, stages, σ", "ms", "× in force"):
        result.add_column(column, justify="right")
    for r in [r for r in rows if "ms" in r][:10]:
        mark = " (in force)" if r["current"] else " (faster: candidate for the default)" if r["faster"] else ""
        result.add_row(r["config"] + mark, f"{r['ms']:.3f}", f"{r['current_time_over_this']:.2f}")
    return result
