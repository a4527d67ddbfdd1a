"""Timing of several calls in turns, on a CPU or a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sigattn.validation import check_at_least, check_not_negative


@dataclass(frozen=True, kw_only=True)
class TimedBenchmark:
    """Settings of the benchmarks that time calls and can be resumed.

    Attributes:
        num_heads: heads of a sequence.
        rounds: how often each implementation is timed.
        round_seconds: shortest time of a round.
        resume: continue the results instead of replacing them.
    """

    num_heads: int = 12
    rounds: int = 7
    round_seconds: float = 0.01
    resume: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_heads", "rounds")
        check_not_negative(self, "round_seconds")


class Timing(NamedTuple):
    """Time of one call.

    Attributes:
        name: of the call.
        seconds: median over the rounds.
        ratios: by name, the median over the rounds of the other call's time divided by this one's.
    """

    name: str
    seconds: float
    ratios: dict[str, float]


def time_calls(calls: Mapping[str, Callable[[], object]], rounds: int, min_seconds: float = 0.01) -> list[Timing]:
    """Time calls in turns: every round runs each of them, so that a slow phase of the machine affects all.

    Within a round a call is repeated until ``min_seconds`` are filled, at most 1000 times, and the device is
    synchronised before and after. The time of a short call on a GPU is that of launching it from Python; a captured
    graph (``capture_graph``) excludes that.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, min(1000, int(min_seconds / _seconds_per_call(call, 1))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds_per_call(call, repeats[name]))
    return [
        Timing(
            name,
            statistics.median(own),
            {other: statistics.median(a / b for a, b in zip(t, own, strict=True)) for other, t in times.items()},
        )
        for name, own in times.items()
    ]


def _seconds_per_call(call: Callable[[], object], repeats: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - start) / repeats


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def capture_graph(call: Callable[[], object]) -> Callable[[], None] | None:
    """Return the replay of a call captured as a CUDA graph; None without a GPU or if it cannot be captured."""
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
    except Exception:  # baselines raise various errors during capture
        synchronize()
        return None
    return graph.replay


def time_graphs(calls: Mapping[str, Callable[[], object]], rounds: int, min_seconds: float) -> dict[str, Timing]:
    """Time those of the calls that can be captured as CUDA graphs; return the timings by name."""
    graphs = {name: graph for name, call in calls.items() if (graph := capture_graph(call)) is not None}
    return {timing.name: timing for timing in time_calls(graphs, rounds, min_seconds)}
