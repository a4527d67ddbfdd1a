"""Benchmarks on a CPU that are held to an instruction set."""

import json

import pytest
import torch

from benchmarks import isa
from benchmarks.cpu import CpuBenchmark, benchmark_cpu
from benchmarks.provenance import BenchmarkError
from sigattn.ops import llvm

has_avx2 = pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx2"), reason="needs AVX2")


@has_avx2
def test_the_results_name_the_instruction_set(tmp_path):
    """They are those of a process that is held to it, else it would start another one."""
    sizes = {"lengths": (8,), "num_heads": 1, "dtypes": ("float32",), "threads": 1, "rounds": 1}
    config = CpuBenchmark(**sizes, compiled=False, memory=False, isa="avx2", results=tmp_path / "r.json")
    report = benchmark_cpu(config)
    assert report["configuration"]["isa"] == "avx2"
    assert report["device"].endswith("(AVX2)")
    assert report == json.loads(config.results.read_text())


@has_avx2
@pytest.mark.skipif(llvm.machine_unavailable() is not None, reason="needs llvmlite")
def test_kernels_are_held_to_it(monkeypatch):
    from sigattn.ops.llvm import compilation, processor

    monkeypatch.setattr(compilation, "host_processor", None)
    monkeypatch.setattr(llvm, "_FAST", {})
    isa.hold_kernels("avx2")
    assert compilation.host_processor() == processor.Processor(processor.AVX2, "haswell")
    assert {torch.float32: True, torch.bfloat16: False} == llvm._FAST


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(BenchmarkError, match="isa avx2: this processor lacks fma3"):
        benchmark_cpu(CpuBenchmark(isa="avx2", results=tmp_path / "r.json"))
