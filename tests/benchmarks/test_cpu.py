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


@pytest.mark.parametrize(("dtype", "weights_mib"), [("float32", 1024), ("bfloat16", 512)])
def test_memory_is_far_below_that_of_the_weights(dtype, weights_mib):
    """One head, 16,384 tokens. Typical: 88 and 46 MiB; the allocator once kept 128 in float32."""
    row = memory.measure_in_subprocess(OURS, 16_384, 1, 64, dtype, True, 2)
    assert 0 < row["extra_mib"] < weights_mib / 4


def test_memory_of_converted_attention():
    """More than without the fitted bias, by some tensors of the inputs' size, 4 MiB each."""
    rows = [memory.measure_in_subprocess(name, 16_384, 1, 64, "float32", True, 2) for name in (OURS, memory.CONVERTED)]
    plain, converted = (row["extra_mib"] for row in rows)
    assert plain < converted < plain + 64


def test_the_memory_of_a_plain_formula_is_measured():
    """The plain formula at n = 4096 holds several matrices of 64 MiB."""
    assert memory.measure_in_subprocess(NAIVE, 4096, 1, 64, "float32", False, 2)["extra_mib"] > 128


def test_memory_in_bfloat16_is_not_hidden_by_a_conversion_of_the_inputs():
    """At least one tile of weights, 4 MiB; inputs drawn in float32 first would leave 20 MiB free below the peak."""
    assert memory.measure_in_subprocess(OURS, 4096, 8, 64, "bfloat16", False, 2)["extra_mib"] > 4
