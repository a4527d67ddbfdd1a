"""``sigattn bench``."""

from __future__ import annotations

from collections.abc import Callable

from sigattn.bench import accuracy, cpu, decode, hybridnorm, kernels, overhead, static, training, tune


def bench_cpu(options: cpu.CpuBenchmark) -> None:
    """Ours, softmax SDPA, naive and compiled naive sigmoid on the CPU, side by side: time, error, memory."""
    cpu.run(options)


def bench_static(options: static.StaticBenchmark) -> None:
    """What the compiler makes of the GPU kernels, without a GPU: registers, spills, instructions per score."""
    static.run(options)


def bench_kernels(options: kernels.KernelBenchmark) -> None:
    """The GPU kernels beside every peer present, over lengths from 64 to 78k: TFLOP/s, ratios, errors, plots."""
    kernels.run(options)


def bench_accuracy(options: accuracy.AccuracyBenchmark) -> None:
    """How exact weights and outputs stay as n grows, with b = -log n: ours and each sigmoid peer, in each dtype."""
    accuracy.run(options)


def bench_decode(options: decode.DecodeBenchmark) -> None:
    """One new token against a cache of 1k to 1M keys, beside softmax and a plain copy: GB/s, on a GPU or a CPU."""
    decode.run(options)


def bench_hybridnorm(options: hybridnorm.HybridNormBenchmark) -> None:
    """From which length sigmoid attention with a LayerNorm after it beats softmax on this GPU."""
    hybridnorm.run(options)


def bench_overhead(options: overhead.OverheadBenchmark) -> None:
    """What a short call costs before the GPU begins."""
    overhead.run(options)


def bench_tune(options: tune.TuneBenchmark) -> None:
    """Time the tile shapes of the GPU kernels on this GPU, beside those in force."""
    tune.run(options)


def bench_training(options: training.TrainingBenchmark) -> None:
    """Language models and a ViT trained on this GPU, sigmoid beside softmax: tokens a second, memory, loss."""
    training.run(options)


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
