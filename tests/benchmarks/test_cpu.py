"""The CPU benchmark: its implementations, the check of their results, its rows."""

import json

import pytest

from benchmarks import cpu, memory
from benchmarks.baselines import CPU_IMPLEMENTATIONS, NAIVE, OURS, SDPA


def test_results_and_their_provenance(tmp_path):
    config = cpu.CpuBenchmark(
        lengths=(16, 64), num_heads=2, threads=1, rounds=2, compiled=False, memory=False, results=tmp_path / "r.json",
        backends=("blocked",),
    )  # fmt: skip
    cpu.benchmark_cpu(config)
    report = json.loads((tmp_path / "r.json").read_text())
    described = {"benchmark", "date", "commit", "source", "device", "versions", "configuration", "rows", "memory"}
    assert described == report.keys()
    assert report["configuration"]["num_heads"] == 2
    seen = {(r["n"], r["dtype"], r["causal"], r["pass"], r["implementation"]) for r in report["rows"]}
    assert len(seen) == len(report["rows"]) == 2 * 2 * 2 * 3 * 4
    for row in report["rows"]:
        assert row["median_ms"] > 0
        assert row["relative_error"] < 0.06
        if row["implementation"] == SDPA:
            assert row["softmax_time_over_this"] == 1


@pytest.mark.filterwarnings("ignore:.*[Dd]eprecat")
def test_the_compiled_formula_is_timed(tmp_path, monkeypatch):
    measure = cpu.measure  # each compilation takes seconds
    monkeypatch.setattr(cpu, "measure", lambda *a: measure(*a) if a[-1] else [])
    config = cpu.CpuBenchmark(
        lengths=(16,), num_heads=1, dtypes=("float32",), threads=1, rounds=1, memory=False, results=tmp_path / "r.json"
    )
    rows = cpu.benchmark_cpu(config)["rows"]
    assert {row["implementation"] for row in rows} == set(CPU_IMPLEMENTATIONS)


def test_the_plain_formula_is_omitted_where_it_would_not_fit():
    config = cpu.CpuBenchmark(max_naive_gib=1.0, compiled=False)
    assert NAIVE in cpu.implementations(config, 2048)
    assert NAIVE not in cpu.implementations(config, 16384)


@pytest.mark.parametrize(
    ("name", "length", "heads", "dtype", "least", "most"),
    [
        (memory.QUADRATIC, 4096, 1, "float32", 0, 48),  # the weights take 64 MiB
        # packed keys and values, or a tile; inputs drawn in float32 first would leave 10 MiB free below the peak
        (OURS, 2048, 8, "bfloat16", 2, 64),
        (NAIVE, 4096, 1, "float32", 128, 1024),  # several matrices of 64 MiB
    ],
)
def test_memory(name, length, heads, dtype, least, most):
    row = memory.measure_in_subprocess(name, length, heads, 64, dtype, True, 2)
    assert least < max(row["forward_mib"], row["extra_mib"]) < most
