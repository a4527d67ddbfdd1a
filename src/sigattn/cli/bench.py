"""Subcommands of ``sigattn bench``."""

from __future__ import annotations

from collections.abc import Callable

from sigattn import bench

BENCHMARKS: dict[str, Callable[..., object]] = {
    "cpu": bench.benchmark_cpu,
    "static": bench.benchmark_static,
    "kernels": bench.benchmark_kernels,
    "accuracy": bench.benchmark_accuracy,
    "decode": bench.benchmark_decode,
    "hybridnorm": bench.benchmark_hybridnorm,
    "overhead": bench.benchmark_overhead,
    "steps": bench.benchmark_steps,
    "tune": bench.tune_kernels,
    "training": bench.benchmark_training,
}
