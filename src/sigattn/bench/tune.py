"""``sigattn bench tune``: measures tile shapes on the GPU at hand, for the tables in ``ops/triton/tuning.py``.

For each kernel, head size and mask, every candidate that compiles and fits is timed beside the configuration in force,
in one race, after its result was found equal to that one's within rounding. What the tables hold changes only by hand,
with the measurement beside it: the result of this file is advice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sigattn.bench import gpu, provenance
from sigattn.ops.gradients import Needs
from sigattn.ops.problem import UNLIMITED, Problem
from sigattn.ops.triton import launch, launch_hopper, tuning

PASSES = {tuning.FORWARD: None, tuning.KEYS: Needs(False, True, True), tuning.QUERIES: Needs(True, False, False)}
FUSED = "keys, adding dQ"  # against both kernels of the backward together


@dataclass(frozen=True, kw_only=True)
class TuneBenchmark:
    """What to measure.

    Attributes:
        lengths: numbers of tokens n. heads: of a sequence. head_dims: D.
        dtype: "bfloat16" or "float16".
        most_flops: of a forward pass; decides the batch.
        most_candidates: of each kernel, beside the one in force; None is all.
        specialised: measure the Hopper kernels (docs/speed.md) instead of tile shapes, beside the kernel in force.
        rounds, round_seconds: as in ``sigattn bench kernels``.
        seconds: when to stop; what was not reached is named in the results.
        results: folder for the results (JSON).
    """

    lengths: tuple[int, ...] = (4096,)
    heads: int = 16
    head_dims: tuple[int, ...] = (64, 128)
    dtype: str = "bfloat16"
    most_flops: float = 5e11
    most_candidates: int | None = None
    specialised: bool = False
    rounds: int = 3
    round_seconds: float = 0.004
    seconds: float = 300.0
    results: Path = Path("benchmarks/results/tune")


def run(config: TuneBenchmark) -> dict[str, Any]:
    """Measure, print tables, write the results; gives what was written."""
    console = Console()
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    left_out = []
    for n in config.lengths:
        for d in config.head_dims:
            for causal in (False, True):
                for kernel in PASSES if config.specialised else (*PASSES, FUSED):
                    if time.perf_counter() - start > config.seconds:
                        left_out.append([n, d, causal, kernel])
                        continue
                    found = measure(config, n, d, causal, kernel)
                    rows += found
                    console.print(table(found, f"{kernel}, n = {n}, D = {d}, {'causal' if causal else 'full'}"))
    report = {
        **gpu.describe("tune", {**asdict(config), "results": ""}),
        "left_out_for_time": left_out,
        "rows": rows,
    }
    provenance.write(config.results / "tune.json", report)
    console.print(f"results: {config.results}", highlight=False, soft_wrap=True)
    return report


def measure(config: TuneBenchmark, n: int, d: int, causal: bool, kernel: str) -> list[dict[str, Any]]:
    """One kernel on one problem, in all tile shapes: fastest first."""
    batch = max(1, min(64, int(config.most_flops / (4.0 * config.heads * n**2 * d))))
    given = gpu.inputs(batch, config.heads, n, d, gpu.DTYPES[config.dtype], causal)
    problem = Problem(given.query, given.key, given.value, right=0 if causal else UNLIMITED)
    in_force = tuning.configuration
    architecture = launch.architecture(given.query.device)
    own = in_force(tuning.KEYS if kernel == FUSED else kernel, architecture, d, given.query.element_size())
    configs: list[tuning.Config | tuning.HopperConfig] = [own]
    if config.specialised:
        configs += tuning.hopper_candidates(kernel, d)
    else:
        configs += [c for c in tuning.candidates(kernel, d) if c != own]
    if config.most_candidates is not None:
        configs = configs[: 1 + config.most_candidates]
    calls: dict[str, Callable[[], Any]] = {}
    if kernel == FUSED:
        calls["both kernels"] = _call(problem, given, Needs(), None, tuning.KEYS, False)
    rejected: dict[str, str] = {}
    expected: torch.Tensor | None = None
    for candidate in configs:
        needs = Needs() if kernel == FUSED else PASSES[kernel]
        call = _call(problem, given, needs, candidate, tuning.KEYS if kernel == FUSED else kernel, kernel == FUSED)
        try:
            result = call()
        except Exception as error:  # too much shared memory, or the compiler gives up: that is an answer
            rejected[_name(candidate)] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            continue
        expected = result if expected is None else expected
        difference = ((result - expected).abs().max() / expected.abs().max()).item()
        if not difference < gpu.TOLERANCE[given.query.dtype]:
            rejected[_name(candidate)] = f"another result: {difference:.1e}"
            continue
        calls[_name(candidate)] = call
    raced = sorted(gpu.race(calls, config.rounds, config.round_seconds), key=lambda found: found[1])
    first = next(iter(calls))
    place = {"n": n, "head_dim": d, "causal": causal, "kernel": kernel, "batch": batch}
    rows = [
        {
            **place,
            "config": name,
            "ms": seconds * 1e3,
            "in_force_time_over_this": ratios[first],
            "in_force": name == first,
        }
        for name, seconds, ratios in raced
    ]
    return rows + [{**place, "config": name, "rejected": reason} for name, reason in rejected.items()]


def _call(
    problem: Problem,
    given: gpu.Inputs,
    needs: Needs | None,
    candidate: tuning.Config | tuning.HopperConfig | None,
    replaced: str,
    fused: bool,
) -> Callable[[], torch.Tensor]:
    """A pass with one kernel's tile shape replaced; gives one of its results in float32."""

    def call() -> torch.Tensor:
        in_force, atomic, special = tuning.configuration, tuning.ADD_QUERY_ATOMICALLY, tuning.SPECIALISED
        tables = tuning.HOPPER

        def configuration(kernel: str, architecture: int, width: int, itemsize: int) -> tuning.Config:
            if kernel == replaced and isinstance(candidate, tuning.Config):
                return candidate
            return in_force(kernel, architecture, width, itemsize)

        if isinstance(candidate, tuning.HopperConfig):
            prepared = launch.prepare(problem)
            if (reason := launch_hopper.unavailable(prepared, given.grad_out)) is not None:
                raise provenance.BenchmarkError(f"the Hopper kernels cannot serve this problem: {reason}")
            tuning.SPECIALISED = frozenset([replaced])
            tuning.HOPPER = {**tables, replaced: {problem.query.shape[-1]: candidate}}
        else:
            tuning.SPECIALISED = frozenset()
        tuning.configuration = configuration
        tuning.ADD_QUERY_ATOMICALLY = frozenset([launch.architecture(problem.query.device)] if fused else [])
        try:
            if needs is None:
                return launch.forward(problem).float()
            gradients = launch.backward(problem, given.grad_out, needs)
            found = gradients.query if needs.query else gradients.key
            assert found is not None
            return found.float()
        finally:
            tuning.configuration, tuning.ADD_QUERY_ATOMICALLY, tuning.SPECIALISED = in_force, atomic, special
            tuning.HOPPER = tables

    return call


def _name(candidate: tuning.Config | tuning.HopperConfig) -> str:
    kind = "Gluon " if isinstance(candidate, tuning.HopperConfig) else ""
    return kind + ", ".join(str(part) for part in candidate)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The ten fastest."""
    result = Table(title=title)
    for column in ("queries, keys, warps, stages, σ", "ms", "× in force"):
        result.add_column(column, justify="right")
    for r in [r for r in rows if "ms" in r][:10]:
        mark = " (in force)" if r["in_force"] else ""
        result.add_row(r["config"] + mark, f"{r['ms']:.3f}", f"{r['in_force_time_over_this']:.2f}")
    return result
