"""Implementations are checked against a reference in float64 before they are timed."""

import functools
import math

import pytest
import torch

from benchmarks import accuracy, baselines, decode, hybridnorm, kernels, reference
from benchmarks.baselines import IMPLEMENTATIONS, OURS, Implementation, naive_sigmoid
from benchmarks.inputs import random_inputs
from benchmarks.provenance import BenchmarkError
from sigattn.ops.triton import tuning

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.sh is the test on a GPU")


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_reference_equals_autograd_in_float64(softmax, causal, alibi):
    inputs = random_inputs(1, 2, 37, 8, torch.float64, torch.device("cpu"), causal=causal, alibi=alibi)
    q, k, v = inputs.leaves()
    out = naive_sigmoid(q, k, v, inputs.options)
    if softmax:
        i = torch.arange(37)
        slopes = inputs.options.slopes.double()[:, None, None] if alibi else 0.0
        mask = (-slopes * (i[:, None] - i).abs()).expand(2, 37, 37)
        mask = mask.masked_fill(i[:, None] < i, -math.inf) if causal else mask.double()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.grad_out)
    at = torch.tensor([0, 5, 36])
    for ours, theirs in zip(reference.reference_results(inputs, at, softmax), (out, *gradients), strict=True):
        torch.testing.assert_close(ours, theirs[0, :, at].detach())


@WITHOUT_GPU
def test_a_wrong_kernel_is_not_timed(monkeypatch):
    ours = IMPLEMENTATIONS[OURS].call

    def broken(*_):
        raise RuntimeError("no kernel image")

    def nan_in_one_gradient(q, k, v, o):
        k = k * 1
        if k.requires_grad:
            k.register_hook(lambda grad: grad * math.nan)
        return ours(q, k, v, o)

    wrong = {"wrong": lambda *args: ours(*args) * 1.1, "broken": broken, "NaN": nan_in_one_gradient}
    for name, call in wrong.items():
        monkeypatch.setitem(IMPLEMENTATIONS, name, Implementation(False, call, cpu=True))
    absent = {}
    config = kernels.KernelBenchmark(num_heads=1, batch_size=1, dtype="float32", rounds=1, round_seconds=0.0)
    rows = kernels.measure(config, kernels.Setting(16, 16, False, False), absent)
    assert wrong.keys().isdisjoint(row["implementation"] for row in rows)
    assert all(max(row["error"], row["gradient_error"]) < 1e-5 for row in rows)
    reasons = {name.split(",")[0]: reason for name, reason in absent.items()}
    for name, reason in (("wrong", "WrongResultError"), ("NaN", "WrongResultError"), ("broken", "no kernel image")):
        assert reason in reasons[name]


def test_wrong_decoding_is_not_timed():
    cache = decode.CacheInputs(torch.randn(1, 1, 2, 8), *torch.randn(2, 1, 16, 2, 8).unbind())
    for value in (0.0, torch.nan):
        with pytest.raises(reference.WrongResultError, match="sigattn is wrong"):
            decode.check("sigattn", functools.partial(torch.full, (1, 1, 2, 8), value), cache)


def test_an_eager_call_does_not_count_as_compiled(monkeypatch):
    """After too many recompilations, or with torch.compile disabled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    call = baselines.compiled(lambda x: x + 1)
    with torch._dynamo.config.patch(recompile_limit=2):
        baselines.reset_compiled()
        for n in (1, 2):
            torch.testing.assert_close(call(torch.zeros(n)), torch.ones(n))
        with pytest.raises((BenchmarkError, torch._dynamo.exc.FailOnRecompileLimitHit)):
            call(torch.zeros(3))
    baselines.reset_compiled()
    # not by monkeypatch, which would delete the setting afterwards and break every later compilation
    with torch._dynamo.config.patch(disable=True), pytest.raises(BenchmarkError, match="eagerly"):
        call(torch.zeros(9))


@WITHOUT_GPU
def test_accuracy_of_float16_at_65536_keys(tmp_path, monkeypatch):
    """With b = -log n, weights of 1/n stay as exact as the dtype's own rounding (2^-11 and 2^-8)."""
    # the interpreter's time is that of the tiles, whatever their size
    monkeypatch.setattr(tuning, "kernel_config", lambda *_: tuning.Config(16, 2048, 4, 1))
    shared = {"queries": 16, "head_dim": 16, "all_queries": False, "results": tmp_path}
    for dtype, lengths, rounding in (("float16", (64, 65536), 2**-11), ("bfloat16", (64, 8192), 2**-8)):
        config = accuracy.AccuracyBenchmark(lengths=lengths, dtypes=(dtype,), **shared)
        rows = [row for row in accuracy.benchmark_accuracy(config)["rows"] if row["implementation"] == OURS]
        assert [row["n"] for row in rows] == [*lengths]
        for row in rows:
            assert row["weights_max"] < 2.2 * rounding, row  # of the weight, and of the output
            assert max(row["weights_mean"], row["output"]) < rounding, row
    assert (tmp_path / "accuracy.png").exists()


def test_sigmoid_is_faster_from_the_last_crossing_on():
    def crossing(ratios):
        row = {"causal": False, "implementation": "affine"}
        rows = [{**row, "n": n, "softmax_time_over_this": {} if r is None else {"x": r}} for n, r in ratios.items()]
        return hybridnorm.crossing(rows, False, "affine")["over"]["x"]

    last = {"from": 256, "percent": pytest.approx(100 * (0.2 + 0.5) / 2)}
    assert crossing({64: 1.2, 128: 0.9, 256: 1.25, 512: 2.0}) == last
    assert crossing({64: 0.9}) == {"from": None, "percent": None}
    assert crossing({64: 2.0, 128: None})["from"] == 64  # softmax ran out of memory at 128
