"""The CPU benchmark: its truth, its gate, its results."""

import json

import pytest
import torch

from sigattn.bench import cpu, memory


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [cpu.SOFTMAX, cpu.NAIVE])
def test_truth_is_what_autograd_says(name, causal):
    q, k, v, g = torch.randn(4, 1, 2, 37, 8, dtype=torch.float64).unbind()
    inputs = cpu.Inputs((q, k, v), g, causal)
    function = cpu.softmax if name == cpu.SOFTMAX else cpu.naive
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, inputs.bias, causal)
    gradients = torch.autograd.grad(out, leaves, g)
    at = torch.tensor([0, 5, 36])
    for ours, theirs in zip(cpu.truth(inputs, at, name == cpu.SOFTMAX), (out.detach(), *gradients), strict=True):
        torch.testing.assert_close(ours, theirs[:, :, at])


def test_a_wrong_implementation_is_not_timed():
    q, k, v, g = torch.randn(4, 1, 2, 37, 8).unbind()
    with pytest.raises(RuntimeError, match="forgetful is wrong at n=37"):
        cpu.check("forgetful", lambda q, k, v, b, c: cpu.naive(q, k, v, 0.0, c), cpu.Inputs((q, k, v), g, False))

    def nan_in_one_gradient(q, k, v, b, c):
        (k := k * 1).register_hook(lambda grad: grad * torch.nan)
        return cpu.naive(q, k, v, b, c)

    with pytest.raises(RuntimeError, match="NaN is wrong at n=37"):
        cpu.check("NaN", nan_in_one_gradient, cpu.Inputs((q, k, v), g, False))


def test_results_and_their_provenance(tmp_path):
    config = cpu.CpuBenchmark(
        lengths=(16, 64), heads=2, rounds=2, compiled=False, memory=False, results=tmp_path / "r.json"
    )
    cpu.run(config)
    report = json.loads((tmp_path / "r.json").read_text())
    described = {"benchmark", "date", "commit", "source", "device", "versions", "configuration"}
    assert described | {"rows", "memory"} == report.keys()
    assert report["configuration"]["heads"] == 2
    seen = {(r["n"], r["dtype"], r["causal"], r["pass"], r["implementation"]) for r in report["rows"]}
    assert len(seen) == len(report["rows"]) == 2 * 2 * 2 * 2 * 3
    for row in report["rows"]:
        assert row["median_ms"] > 0
        assert row["relative_error"] < 0.06
        if row["implementation"] == cpu.SOFTMAX:
            assert row["softmax_time_over_this"] == 1


@pytest.mark.filterwarnings("ignore:.*[Dd]eprecat")
def test_the_compiled_formula_takes_part(tmp_path, monkeypatch):
    measure = cpu.measure  # each compilation takes seconds
    monkeypatch.setattr(cpu, "measure", lambda *a: measure(*a) if a[-1] else [])
    config = cpu.CpuBenchmark(
        lengths=(16,), heads=1, dtypes=("float32",), rounds=1, memory=False, results=tmp_path / "r.json"
    )
    rows = cpu.run(config)["rows"]
    assert {row["implementation"] for row in rows} == {cpu.SOFTMAX, cpu.OURS, cpu.NAIVE, cpu.COMPILED}


def test_naive_is_left_out_where_it_would_not_fit():
    config = cpu.CpuBenchmark(naive_limit_gib=1.0, compiled=False)
    assert cpu.NAIVE in cpu.implementations(config, 2048)
    assert cpu.NAIVE not in cpu.implementations(config, 16384)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_linear_in_the_length(dtype):
    """One head, 16,384 tokens: the weights alone would be 1 GiB in float32."""
    row = memory.in_own_process("sigattn", 16_384, 1, 64, dtype, True, 2)
    assert 0 < row["extra_mib"] < 128


def test_the_measure_of_memory_sees_what_a_formula_needs():
    """The plain formula at n = 4096 holds several matrices of 64 MiB."""
    assert memory.in_own_process("naive sigmoid", 4096, 1, 64, "float32", False, 2)["extra_mib"] > 128
