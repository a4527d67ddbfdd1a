"""Benchmarks of the operator, its kernels and training; ``sigattn bench`` runs them.

Each benchmark is a configuration class and a function that takes it, prints tables and writes the results (JSON).
Baselines are in ``baselines``, the timing in ``timing``, and the check before it in ``reference``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sigattn.bench.accuracy import AccuracyBenchmark, benchmark_accuracy
    from sigattn.bench.cpu import CpuBenchmark, benchmark_cpu
    from sigattn.bench.decode import DecodeBenchmark, benchmark_decode
    from sigattn.bench.hybridnorm import HybridNormBenchmark, benchmark_hybridnorm
    from sigattn.bench.kernels import KernelBenchmark, benchmark_kernels
    from sigattn.bench.overhead import OverheadBenchmark, benchmark_overhead
    from sigattn.bench.provenance import BenchmarkError
    from sigattn.bench.reference import WrongResultError
    from sigattn.bench.static import StaticBenchmark, benchmark_static
    from sigattn.bench.steps import StepsBenchmark, benchmark_steps
    from sigattn.bench.training import TrainingBenchmark, benchmark_training
    from sigattn.bench.tune import TuneBenchmark, tune_kernels

__all__ = [
    "AccuracyBenchmark",
    "BenchmarkError",
    "CpuBenchmark",
    "DecodeBenchmark",
    "HybridNormBenchmark",
    "KernelBenchmark",
    "OverheadBenchmark",
    "StaticBenchmark",
    "StepsBenchmark",
    "TrainingBenchmark",
    "TuneBenchmark",
    "WrongResultError",
    "benchmark_accuracy",
    "benchmark_cpu",
    "benchmark_decode",
    "benchmark_hybridnorm",
    "benchmark_kernels",
    "benchmark_overhead",
    "benchmark_static",
    "benchmark_steps",
    "benchmark_training",
    "tune_kernels",
]

if not TYPE_CHECKING:  # imported at first use, because each benchmark needs other packages
    _MODULES = {
        "AccuracyBenchmark": "accuracy",
        "BenchmarkError": "provenance",
        "CpuBenchmark": "cpu",
        "DecodeBenchmark": "decode",
        "HybridNormBenchmark": "hybridnorm",
        "KernelBenchmark": "kernels",
        "OverheadBenchmark": "overhead",
        "StaticBenchmark": "static",
        "StepsBenchmark": "steps",
        "TrainingBenchmark": "training",
        "TuneBenchmark": "tune",
        "WrongResultError": "reference",
        "tune_kernels": "tune",
    }

    def __getattr__(name: str) -> Any:
        module = _MODULES.get(name) or name.removeprefix("benchmark_")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
