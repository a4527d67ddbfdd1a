"""``python -m benchmarks tune``: time tile shapes on this GPU, for the tables in ``ops/triton/tuning.py``.

All candidates are first compiled and run once in subprocesses. For each kernel, head size and mask, those that work are
compared with float64 (a sample) and with one another (everything), then timed in turns with the current configuration.
The result is advice: the tables are changed only by hand, together with the measurement.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import gpu, provenance, reference, subprocesses, tile_shapes
from benchmarks.inputs import DTYPES, Inputs, check_not_empty, random_inputs
from benchmarks.results_file import ResultsFile
from benchmarks.tables import mask_name, print_rows
from benchmarks.timing import TimedBenchmark, synchronize, time_calls
from sigattn import validation
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.problem import UNLIMITED, Problem
from sigattn.ops.triton import kernel_args, launch, tuning

_COLUMNS = {
    "tile, warps, stages, σ": ("config", ""),
    "ms": ("ms", ".3f"),
    "× current": ("current_time_over_this", ".2f"),
    "": ("mark", ""),
}
CURRENT_AGAIN = "current, again"  # the deviation of its time from the current configuration's is the noise
Candidate = tuning.Config | tuning.HopperConfig
PASSES = {
    tuning.FWD: None,
    tuning.DKDV: NeedsGrad(False, True, True),
    tuning.DQ: NeedsGrad(True, False, False),
}


@dataclass(frozen=True, kw_only=True)
class TuneBenchmark(TimedBenchmark):
    """Configuration of the tuning benchmark.

    Attributes:
        lengths: numbers of tokens n.
        head_dims: features of a head.
        dtype: "bfloat16" or "float16".
        max_flops: FLOPs of a forward pass; determines the batch size.
        max_candidates: candidates of each kernel in addition to the current configuration; None is all.
        max_seconds: when to stop; cases that were not reached are listed in the results.
        results: folder for the results (JSON).
    """

    lengths: tuple[int, ...] = (4096,)
    num_heads: int = 16
    head_dims: tuple[int, ...] = (64, 128)
    dtype: str = "bfloat16"
    max_flops: float = 5e11
    max_candidates: int | None = None
    rounds: int = 3
    round_seconds: float = 0.004
    max_seconds: float = 300.0
    results: Path = Path("runs/benchmarks/tune")

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.check_at_least(1, self, "lengths", "head_dims", "max_candidates")
        validation.check_positive(self, "max_flops", "max_seconds")
        validation.check_among(("bfloat16", "float16"), self, "dtype")
        check_not_empty(self, "lengths", "head_dims")


class Case(NamedTuple):
    """A kernel on a problem."""

    n: int
    head_dim: int
    causal: bool
    kernel: str


def tune_kernels(config: TuneBenchmark) -> dict[str, Any]:
    """Time tile shapes of the GPU kernels on this GPU, compared with those in use.

    Returns:
        The content of the results file.

    Raises:
        BenchmarkError: without a GPU, unless kernels are interpreted.
    """
    gpu.device()
    start = time.perf_counter()
    # the kernels of one problem are compiled together before they are timed
    batches = [
        [Case(n, d, causal, kernel) for kernel in PASSES]
        for n in config.lengths
        for causal in (False, True)
        for d in config.head_dims
    ]
    with ResultsFile.of("tune", config) as results:
        for cases in batches:
            candidates = {case: candidates_of(config, case) for case in cases if not results.has(case)}
            in_time = time.perf_counter() - start <= config.max_seconds
            tasks = {case: [(config, case, c) for c in found] for case, found in candidates.items()}
            failed = subprocesses.find_failures("benchmarks.tune:try_once", tasks, chunk=4) if in_time else {}
            for case in results.remaining(cases, None if in_time else -1.0):
                rows = results.add(case, measure(config, case, candidates[case], failed[case]))
                _print_fastest(rows, case)
        left_out = [case for cases in batches for case in cases if not results.has(case)]
        written = results.write(left_out_for_time=left_out)
    print(f"results: {config.results}")
    return written


def candidates_of(config: TuneBenchmark, case: Case) -> list[Candidate]:
    """Return the candidates of a case, the current configuration first: tile shapes, and Hopper kernels on an H100."""
    architecture, itemsize = kernel_args.architecture(gpu.device()), DTYPES[config.dtype].itemsize
    portable = tuning.kernel_config(case.kernel, architecture, case.head_dim, itemsize, True)
    found: list[Candidate] = [portable, *tile_shapes.candidates(case.kernel, case.head_dim)]
    if architecture == 90 and case.head_dim == launch_hopper.WIDTHS[case.kernel]:
        found = [tuning.HOPPER_CONFIGS[case.kernel], *tile_shapes.hopper_candidates(case.kernel), *found]
    found = list(dict.fromkeys(found))
    return found if config.max_candidates is None else found[: 1 + config.max_candidates]


def problem_of(config: TuneBenchmark, case: Case, batch_size: int) -> tuple[Problem, Inputs]:
    """Return random inputs of a case, also as a problem of the operator."""
    shape = (batch_size, config.num_heads, case.n, case.head_dim)
    inputs = random_inputs(*shape, DTYPES[config.dtype], gpu.device(), causal=case.causal)
    return Problem(inputs.query, inputs.key, inputs.value, right=0 if case.causal else UNLIMITED), inputs


def try_once(task: tuple[TuneBenchmark, Case, Candidate]) -> None:
    """Compile and run a candidate on one sample."""
    config, case, candidate = task
    _call(*problem_of(config, case, 1), case.kernel, candidate)()
    synchronize()


def measure(
    config: TuneBenchmark, case: Case, candidates: list[Candidate], failed: dict[int, str]
) -> list[dict[str, Any]]:
    """Time the candidates of one case, except those that failed; return a row for each, fastest first."""
    batch_size = max(1, min(64, int(config.max_flops / (4.0 * config.num_heads * case.n**2 * case.head_dim))))
    problem, inputs = problem_of(config, case, batch_size)
    rejected = {_name(candidates[at]): reason for at, reason in failed.items()}
    working = {_name(c): c for c in candidates if _name(c) not in rejected}
    calls, errors = _checked_calls(case, problem, inputs, working, rejected)
    current = _name(candidates[0])
    first = next(iter(calls), "")
    if calls:
        calls[CURRENT_AGAIN] = calls[first]
    timings = sorted(time_calls(calls, config.rounds, config.round_seconds), key=lambda timing: timing.seconds)
    noise = next((abs(t.ratios[first] - 1) for t in timings if t.name == CURRENT_AGAIN), 0.0)
    about = {**case._asdict(), "batch_size": batch_size}
    rows: list[dict[str, Any]] = [
        {
            **about,
            "config": name,
            "ms": seconds * 1e3,
            "current_time_over_this": ratios[first],
            "current": name == current,
            "faster": current in calls and ratios[first] > 1 + max(0.01, 2 * noise),
            "error": errors.get(name),
        }
        for name, seconds, ratios in timings
    ]
    return rows + [{**about, "config": name, "rejected": reason} for name, reason in rejected.items()]


def _checked_calls(
    case: Case, problem: Problem, inputs: Inputs, candidates: dict[str, Candidate], rejected: dict[str, str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return the calls of the candidates that agree with float64 and with one another, and their errors.

    rejected: receives the reasons of the others.
    """
    at = reference.positions(inputs)
    out, *gradients = reference.reference_results(inputs, at, softmax=False)  # dQ, dK, dV
    expected = {tuning.FWD: [out], tuning.DKDV: gradients[1:], tuning.DQ: gradients[:1]}
    agreed: list[torch.Tensor] = []  # results of the first correct candidate
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for name, candidate in candidates.items():
        call = _call(problem, inputs, case.kernel, candidate)
        results = [t.float() for t in call()]
        pairs = zip(results, expected[case.kernel], strict=True)
        found = [reference.relative_error(t, e, at) for t, e in pairs]
        limit = reference.tolerance(inputs.query)
        correct = all(error < limit for error in found)  # False for NaN
        agreed = agreed or (results if correct else [])
        others = [((r - e).abs().max() / e.abs().max()).item() for r, e in zip(results, agreed, strict=False)]
        if correct and all(error < limit for error in others):
            calls[name], errors[name] = call, max(found)
        else:
            rejected[name] = f"wrong result: relative errors {found} from float64, {others} from other candidates"
    return calls, errors


def _call(problem: Problem, inputs: Inputs, kernel: str, candidate: Candidate) -> Callable[[], list[torch.Tensor]]:
    """Return a pass with one kernel replaced; it returns its results."""
    needs = PASSES[kernel]

    def call() -> list[torch.Tensor]:
        with _tables_for(kernel, candidate, problem, inputs):
            if needs is None:
                return [launch.forward(problem).out]
            return [t for t in launch.backward(problem, inputs.grad_out, needs) if t is not None]

    return call


@contextlib.contextmanager
def _tables_for(changed: str, candidate: Candidate, problem: Problem, inputs: Inputs) -> Iterator[None]:
    """Change the tables for one call, so that it uses the candidate."""
    changing = ("kernel_config", "HOPPER_CONFIGS", "TMA_MIN_WEIGHTS")
    before = {name: getattr(tuning, name) for name in changing}

    def kernel_config(
        kernel: str, architecture: int, head_dim: int, itemsize: int, tma: bool = False, precision: str = "ieee"
    ) -> tuning.Config:
        if kernel == changed and isinstance(candidate, tuning.Config):
            return candidate
        config: tuning.Config = before["kernel_config"](kernel, architecture, head_dim, itemsize, tma, precision)
        return config

    special = {changed: candidate} if isinstance(candidate, tuning.HopperConfig) else {}
    if special and not launch_hopper.supports(kernel_args.prepare(problem), changed, inputs.grad_out):
        raise provenance.BenchmarkError("the Hopper kernels do not support this problem")
    try:
        tuning.kernel_config, tuning.HOPPER_CONFIGS, tuning.TMA_MIN_WEIGHTS = kernel_config, special, 0
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # that a smaller tile shape is launched instead
            yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


def _name(candidate: Candidate) -> str:
    fields = [
        name if value is True else str(value) for name, value in candidate._asdict().items() if value is not False
    ]
    return ("Gluon " if isinstance(candidate, tuning.HopperConfig) else "") + ", ".join(fields)


def _print_fastest(rows: list[dict[str, Any]], case: Case) -> None:
    title = f"{case.kernel}, n = {case.n}, D = {case.head_dim}, {mask_name(case.causal)}"
    timed = [row for row in rows if "ms" in row][:10]
    marks = ["current" if row["current"] else "candidate for the default" if row["faster"] else "" for row in timed]
    print_rows(title, [{**row, "mark": mark} for row, mark in zip(timed, marks, strict=True)], _COLUMNS)
