"""The CPU benchmark: its implementations, the check of their results, its rows."""

import functools
import json

import torch

from benchmarks import cpu, memory
from benchmarks.baselines import CPU_IMPLEMENTATIONS, NAIVE, OURS, SDPA


def test_results_and_their_provenance(unchecked, tmp_path, monkeypatch):
    """The compiled formula is not optimised, which takes seconds for each case."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    sizes = {"lengths": (16,), "num_heads": 2, "dtypes": ("bfloat16",), "threads": 1, "rounds": 2, "memory": False}
    cpu.benchmark_cpu(cpu.CpuBenchmark(**sizes, results=tmp_path / "r.json", backends=("blocked",)))
    report = json.loads((tmp_path / "r.json").read_text())
    described = "benchmark date commit source device versions configuration rows memory"
    assert set(described.split()) == report.keys()
    assert report["configuration"]["num_heads"] == 2
    seen = {(r["n"], r["dtype"], r["causal"], r["pass"], r["implementation"]) for r in report["rows"]}
    assert len(seen) == len(report["rows"]) == 2 * 3 * 5
    assert {row["implementation"] for row in report["rows"]} == {*CPU_IMPLEMENTATIONS, f"{OURS}, blocked"}
    for row in report["rows"]:
        assert row["median_ms"] > 0
        assert row["relative_error"] < 0.06
        if row["implementation"] == SDPA:
            assert row["softmax_time_over_this"] == 1


def test_the_plain_formula_is_omitted_where_it_would_not_fit():
    config = cpu.CpuBenchmark(max_naive_gib=1.0, compiled=False)
    assert NAIVE in cpu.implementations(config, 2048)
    assert NAIVE not in cpu.implementations(config, 16384)


def test_memory():
    """Of packed keys and values, or of a tile; the weights, which are not stored, take 64 MiB.

    Inputs drawn in float32 first would leave 10 MiB free below the peak.
    """
    row = memory.measure_in_subprocess(memory.QUADRATIC, 2048, 8, 64, "bfloat16", True, 2)
    assert 2 < max(row["forward_mib"], row["extra_mib"]) < 64
