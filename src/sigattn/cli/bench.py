"""Subcommands of ``sigattn bench``."""

from __future__ import annotations

from collections.abc import Callable

from sigattn.bench import accuracy, cpu, decode, hybridnorm, kernels, overhead, static, training, tune


def bench_cpu(options: cpu.CpuBenchmark) -> None:
    """Compare sigattn with softmax SDPA and with naive and compiled naive sigmoid on the CPU: time, error, memory."""
    cpu.benchmark_cpu(options)


def bench_static(options: static.StaticBenchmark) -> None:
    """Compile the GPU kernels without a GPU, and report registers, spills and instructions per score."""
    static.benchmark_static(options)


def bench_kernels(options: kernels.KernelBenchmark) -> None:
    """Compare the GPU kernels with every installed baseline at lengths from 64 to 78k: TFLOP/s, errors, plots."""
    kernels.benchmark_kernels(options)


def bench_accuracy(options: accuracy.AccuracyBenchmark) -> None:
    """Measure the error of weights and outputs over n, b = -log n, of sigattn and its baselines, in each dtype."""
    accuracy.benchmark_accuracy(options)


def bench_decode(options: decode.DecodeBenchmark) -> None:
    """Time one new token with a cache of 1k to 1M keys, compared with softmax and a copy: GB/s, on a GPU or a CPU."""
    decode.benchmark_decode(options)


def bench_hybridnorm(options: hybridnorm.HybridNormBenchmark) -> None:
    """Find the length from which sigmoid attention followed by a LayerNorm is faster than softmax on this GPU."""
    hybridnorm.benchmark_hybridnorm(options)


def bench_overhead(options: overhead.OverheadBenchmark) -> None:
    """Measure the host time of a short call on this GPU."""
    overhead.benchmark_overhead(options)


def bench_tune(options: tune.TuneBenchmark) -> None:
    """Time tile shapes of the GPU kernels on this GPU, compared with those in use."""
    tune.tune_kernels(options)


def bench_training(options: training.TrainingBenchmark) -> None:
    """Train language models and a ViT on this GPU with sigmoid and softmax: tokens per second, memory, loss."""
    training.benchmark_training(options)


BENCHMARKS: dict[str, Callable[..., None]] = {
    "cpu": bench_cpu,
    "static": bench_static,
    "kernels": bench_kernels,
    "accuracy": bench_accuracy,
    "decode": bench_decode,
    "hybridnorm": bench_hybridnorm,
    "overhead": bench_overhead,
    "tune": bench_tune,
    "training": bench_training,
}
