"""Benchmarks on a CPU that are held to an instruction set."""

import json

import pytest
import torch

from benchmarks import isa
from benchmarks.cpu import CpuBenchmark, benchmark_cpu
from benchmarks.provenance import BenchmarkError
from sigattn.ops import llvm

CODE = """
import json, os, pathlib, torch
from benchmarks import isa
from sigattn.ops.llvm import calls
isa.hold_kernels("avx2")
found = {"torch": torch.backends.cpu.get_cpu_capability(), "tile": calls.kernels(torch.float32).tile, **os.environ}
pathlib.Path(PATH).write_text(json.dumps(found))
"""


has_avx2 = pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx2"), reason="needs AVX2")


@has_avx2
@pytest.mark.skipif(llvm.machine_unavailable() is not None, reason="needs llvmlite")
def test_all_are_held_to_avx2(tmp_path):
    file = tmp_path / "found.json"
    found = isa.run_held("avx2", CODE.replace("PATH", repr(str(file))), file)
    assert (found["torch"], found["tile"]) == ("AVX2", 16)
    assert (found["ONEDNN_MAX_CPU_ISA"], found["MKL_ENABLE_INSTRUCTIONS"]) == ("AVX2", "AVX2")


@has_avx2
def test_the_results_name_the_instruction_set(tmp_path):
    sizes = {"lengths": (8,), "num_heads": 1, "dtypes": ("float32",), "threads": 1, "rounds": 1}
    config = CpuBenchmark(**sizes, compiled=False, memory=False, isa="avx2", results=tmp_path / "r.json")
    report = benchmark_cpu(config)
    assert report["configuration"]["isa"] == "avx2"
    assert report == json.loads(config.results.read_text())


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(BenchmarkError, match="isa avx2: this processor lacks fma3"):
        benchmark_cpu(CpuBenchmark(isa="avx2", results=tmp_path / "r.json"))
