"""The benchmarks on the command line: ``python -m benchmarks NAME``, from the root of the repository."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.accuracy import benchmark_accuracy
from benchmarks.cpu import benchmark_cpu
from benchmarks.decode import benchmark_decode
from benchmarks.hybridnorm import benchmark_hybridnorm
from benchmarks.kernels import benchmark_kernels
from benchmarks.microtiles import benchmark_microtiles
from benchmarks.overhead import benchmark_overhead
from benchmarks.parts import benchmark_parts
from benchmarks.static import benchmark_static
from benchmarks.steps import benchmark_steps
from benchmarks.training import benchmark_training
from benchmarks.tune import tune_kernels
from sigattn.cli.errors import exit_on_errors
from sigattn.cli.parsing import run_command

BENCHMARKS: dict[str, Callable[..., object]] = {
    "cpu": benchmark_cpu,
    "static": benchmark_static,
    "kernels": benchmark_kernels,
    "accuracy": benchmark_accuracy,
    "decode": benchmark_decode,
    "hybridnorm": benchmark_hybridnorm,
    "microtiles": benchmark_microtiles,
    "overhead": benchmark_overhead,
    "parts": benchmark_parts,
    "steps": benchmark_steps,
    "tune": tune_kernels,
    "training": benchmark_training,
}
DESCRIPTION = "Benchmarks of the attention on the CPU or GPU. ``NAME --help`` lists the arguments of a benchmark."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark; ``sigattn.cli.errors`` lists the exit codes."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with exit_on_errors("benchmarks"):
        run_command(BENCHMARKS, arguments, "python -m benchmarks", DESCRIPTION)


if __name__ == "__main__":
    main()
