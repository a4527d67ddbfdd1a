"""The CPU benchmark: its implementations, the check of their results, its rows."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import baselines, cpu, memory
from benchmarks.baselines import CPU_IMPLEMENTATIONS, NAIVE, OURS, SDPA
from benchmarks.reference import WrongResultError


def test_a_wrong_implementation_is_not_timed(monkeypatch):
    def without_bias(q, k, v, o):
        return baselines.naive_sigmoid(q, k, v, replace(o, bias=0.0))

    def nan_in_one_gradient(q, k, v, o):
        (k := k * 1).register_hook(lambda grad: grad * torch.nan)
        return baselines.naive_sigmoid(q, k, v, o)

    config = cpu.CpuBenchmark(num_heads=2, head_dim=8, threads=1, rounds=1, compiled=False)
    for wrong in (without_bias, nan_in_one_gradient):
        with monkeypatch.context() as patched:
            patched.setitem(CPU_IMPLEMENTATIONS, OURS, baselines.Implementation(False, wrong, cpu=True))
            with pytest.raises(WrongResultError, match=r"\(1, 2, 37, 8\)"):
                cpu.measure(config, 37, "float32", False)


def test_results_and_their_provenance(tmp_path):
    config = cpu.CpuBenchmark(
        lengths=(16, 64), num_heads=2, threads=1, rounds=2, compiled=False, memory=False, results=tmp_path / "r.json"
    )
    cpu.benchmark_cpu(config)
    report = json.loads((tmp_path / "r.json").read_text())
    described = {"benchmark", "date", "commit", "source", "device", "versions", "configuration"}
    assert described | {"rows", "memory"} == report.keys()
    assert report["configuration"]["num_heads"] == 2
    seen = {(r["n"], r["dtype"], r["causal"], r["pass"], r["implementation"]) for r in report["rows"]}
    assert len(seen) == len(report["rows"]) == 2 * 2 * 2 * 3 * 3
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


def extra_mib(name, length, heads, dtype):
    return memory.measure_in_subprocess(name, length, heads, 64, dtype, True, 2)["extra_mib"]


def test_memory_is_far_below_that_of_the_weights():
    """One head, 8,192 tokens. Typical: 24 MiB, and 34 with the quadratic bias; the weights take 256."""
    plain, quadratic = (extra_mib(name, 8192, 1, "float32") for name in (OURS, memory.QUADRATIC))
    assert 0 < plain < 64
    assert plain < quadratic < plain + 32


def test_memory_in_bfloat16_is_not_hidden_by_a_conversion_of_the_inputs():
    """At least one tile of weights, 4 MiB; inputs drawn in float32 first would leave 20 MiB free below the peak."""
    assert 4 < extra_mib(OURS, 4096, 8, "bfloat16") < 64


def test_the_memory_of_a_plain_formula_is_measured():
    """The plain formula at n = 4096 holds several matrices of 64 MiB."""
    assert extra_mib(NAIVE, 4096, 1, "float32") > 128
