"""Model of microtiles: loops found in machine code, and rates computed of what llvm-mca prints."""

import pytest

pytest.importorskip("llvmlite")

from benchmarks import microtiles
from benchmarks.provenance import BenchmarkError
from sigattn.ops.llvm.processor import NEON, Processor

STANDIN = """#!/bin/sh
[ "$1" = --version ] || cat > {folder}/loop.s
echo 'LLVM version 19'
echo 'Total Cycles:      1200'
echo '  - V1UnitV0  [ 97.00% ]'
echo '  - Data Dependencies:  [ 98.00% ]'
"""


def test_rates_of_a_loop(tmp_path, monkeypatch):
    tool = tmp_path / "llvm-mca"
    tool.write_text(STANDIN.format(folder=tmp_path))
    tool.chmod(0o755)
    processor = Processor(NEON, "neoverse-n1", triple=microtiles.ARM)
    monkeypatch.setattr(microtiles, "PROCESSORS", ((processor, 32, ""),))
    config = microtiles.MicrotileBenchmark(llvm_mca=str(tool), results=tmp_path / "results.json")
    (row,) = microtiles.benchmark_microtiles(config)["rows"]
    # 24 multiply-adds of 4 lanes in 1,200 / 200 cycles
    assert (row["multiply_adds"], row["of_peak"], row["stack"], row["bottleneck"]) == (16.0, 0.5, 0, "V1UnitV0")
    assert (tmp_path / "loop.s").read_text().count("fmla") == 24


def test_a_missing_program_is_named(tmp_path):
    config = microtiles.MicrotileBenchmark(llvm_mca=str(tmp_path / "none"), results=tmp_path / "results.json")
    with pytest.raises(BenchmarkError, match="none was not found; pass --llvm-mca"):
        microtiles.benchmark_microtiles(config)
