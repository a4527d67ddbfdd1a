"""The GPU benchmarks at tiny sizes with interpreted kernels."""

import functools
import itertools
import json
import math

import pytest
import torch

from benchmarks import accuracy, baselines, hybridnorm, kernels, overhead, subprocesses, timing, training, tune
from benchmarks.baselines import IMPLEMENTATIONS, NAIVE, OURS, SDPA, Implementation
from benchmarks.inputs import random_inputs
from benchmarks.provenance import BenchmarkError
from sigattn.ops.triton import tuning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.sh is the test on a GPU")
TINY = {
    "lengths": (16,), "num_heads": 1, "head_dims": (16,), "batch_size": 1, "dtype": "float32", "rounds": 1,
    "round_seconds": 0.0, "precompile": False,
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """Call the formula instead of interpreted kernels, which other tests here call."""
    formula = Implementation(False, baselines.with_backend("reference"), cpu=True, alibi=True)
    monkeypatch.setitem(IMPLEMENTATIONS, OURS, formula)


def test_kernels(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(timing, "capture_graph", lambda call: call)
    report = kernels.benchmark_kernels(kernels.KernelBenchmark(**TINY, results=tmp_path))
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"] == json.loads(json.dumps(report["rows"]))
    ours = {(r["n"], r["causal"], r["alibi"], r["pass"]) for r in report["rows"] if r["implementation"] == OURS}
    assert ours == set(itertools.product((16,), (False, True), (False, True), ("forward", "backward", "training")))
    for r in report["rows"]:
        assert max(r["error"], r["gradient_error"]) < 1e-5
        assert (r["graph_ms"] is None) == (r["pass"] == "backward")
    assert any("it needs a GPU" in reason for reason in report["absent"].values())
    assert {r["over"] for r in report["average_speed_up"]} == {SDPA}
    assert "interpreted" in report["device"]
    assert {p.name for p in tmp_path.glob("*.png")} == {"d16.png", "d16_alibi.png"}


def test_kernels_stop_in_time(tmp_path):
    report = kernels.benchmark_kernels(kernels.KernelBenchmark(max_seconds=1e-9, precompile=False, results=tmp_path))
    assert not report["rows"]
    assert len(report["left_out_for_time"]) == 11 * (4 + 2)


def test_an_implementation_that_fails_in_its_subprocess_is_not_timed(monkeypatch, tmp_path, quick):
    options = {**TINY, "precompile": True, "alibi": False, "plot": False, "baselines": (NAIVE, SDPA)}

    def failures(function, groups, **_):
        assert function == "benchmarks.kernels:try_once"
        kernels.try_once(groups[NAIVE, 16, True, False, 0][0])
        return {key: {0: "no end after 30 s"} if key[0] == SDPA else {} for key in groups}

    monkeypatch.setattr(subprocesses, "find_failures", failures)
    report = kernels.benchmark_kernels(kernels.KernelBenchmark(**options, results=tmp_path))
    assert {r["implementation"] for r in report["rows"]} == {OURS, NAIVE}
    assert set(report["absent"].values()) == {"no end after 30 s"}


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
        torch.testing.assert_close(call(torch.zeros(9)), torch.ones(9))
    baselines.reset_compiled()
    # not by monkeypatch, which would delete the setting afterwards and break every later compilation
    with torch._dynamo.config.patch(disable=True), pytest.raises(BenchmarkError, match="eagerly"):
        call(torch.zeros(9))


def test_a_wrong_implementation_is_not_timed(monkeypatch):
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
    assert wrong.keys().isdisjoint(r["implementation"] for r in rows)
    reasons = {name.split(",")[0]: reason for name, reason in absent.items()}
    for name, reason in (("wrong", "WrongResultError"), ("NaN", "WrongResultError"), ("broken", "no kernel image")):
        assert reason in reasons[name]


def test_accuracy_of_float16_at_65536_keys(tmp_path, monkeypatch):
    """With b = -log n, weights of 1/n stay as exact as the dtype's own rounding (2^-11 and 2^-8)."""
    # the interpreter's time is that of the tiles, whatever their size
    monkeypatch.setattr(tuning, "kernel_config", lambda *_: tuning.Config(16, 2048, 4, 1))
    rows = []
    for dtype, lengths in (("float16", (64, 65536)), ("bfloat16", (64, 8192))):
        config = accuracy.AccuracyBenchmark(
            lengths=lengths, queries=16, head_dim=16, all_queries=False, dtypes=(dtype,), results=tmp_path
        )
        rows += [r for r in accuracy.benchmark_accuracy(config)["rows"] if r["implementation"] == OURS]
    assert len(rows) == 4
    for r in rows:
        rounding = {"float16": 2**-11, "bfloat16": 2**-8}[r["dtype"]]
        assert r["weights_max"] < 2.2 * rounding, r  # of the weight, and of the output
        assert r["weights_mean"] < rounding, r
        assert r["output"] < rounding, r
    assert (tmp_path / "accuracy.png").exists()


def test_hybridnorm(tmp_path, quick):
    config = hybridnorm.HybridNormBenchmark(
        lengths=(16,), num_heads=1, head_dim=16, dtype="float32", rounds=1, round_seconds=0.0, results=tmp_path
    )
    crossings = hybridnorm.benchmark_hybridnorm(config)["crossings"]
    assert len({(c["causal"], c["norm"]) for c in crossings}) == 4


def test_crossing_is_the_last_one():
    assert hybridnorm.crossing_length([(64, 0.9), (128, 1.1), (256, 0.8), (512, 0.7)]) == 256
    assert hybridnorm.crossing_length([(64, 0.9), (128, 1.1)]) is None

    def crossing(ratios):
        row = {"causal": False, "implementation": "affine"}
        rows = [{**row, "n": n, "softmax_time_over_this": {} if r is None else {"x": r}} for n, r in ratios.items()]
        return hybridnorm.crossing(rows, False, "affine")["over"]["x"]

    found = crossing({64: 1.2, 128: 0.9, 256: 1.25, 512: 2.0})
    assert found == {"from": 256, "percent": pytest.approx(100 * (0.2 + 0.5) / 2)}
    assert crossing({64: 0.9}) == {"from": None, "percent": None}
    assert crossing({64: 2.0, 128: None})["from"] == 64  # softmax ran out of memory at 128


def test_a_fault_of_the_gpu_is_no_reason_to_leave_out_what_follows(monkeypatch):
    def fault(*_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(baselines, "checked_passes", lambda *_, **__: fault())
    inputs = random_inputs(1, 1, 8, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        baselines.available_passes(baselines.IMPLEMENTATIONS, inputs, {})


def test_overhead(tmp_path, quick):
    config = overhead.OverheadBenchmark(
        n=20, num_heads=1, head_dim=16, batch_sizes=(1,), dtype="float32", rounds=1, round_seconds=0.0,
        results=tmp_path / "overhead.json",
    )  # fmt: skip
    report = overhead.benchmark_overhead(config)
    ours = {(r["implementation"], r["pass"]) for r in report["rows"]}
    assert ours >= set(itertools.product((OURS, overhead.THROUGH_TRITON), ("forward", "training")))
    assert tuning.DIRECT_LAUNCH
    assert json.loads((tmp_path / "overhead.json").read_text())["rows"] == report["rows"]
    assert {(r["call"], r["pass"]) for r in report["host_times"]} >= {("dense", "training"), ("cached", "forward")}
    assert all(row["microseconds"] > 0 < row["uncached_microseconds"] for row in report["host_times"])


def test_tune(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocesses, "find_failures", lambda function, tasks, **_: {case: {} for case in tasks})
    config = tune.TuneBenchmark(
        lengths=(32,), num_heads=1, head_dims=(16,), max_flops=1.0, max_candidates=1, rounds=1, round_seconds=0.0,
        results=tmp_path,
    )  # fmt: skip
    rows = tune.tune_kernels(config)["rows"]
    assert {r["kernel"] for r in rows} == {tuning.FWD, tuning.DKDV, tuning.DQ}
    assert all("ms" in r for r in rows), rows


def test_training(tmp_path):
    quick = {"kappas": (1,), "seconds": 60.0, "max_steps": 2, "batch_size": 1, "upscale": 1, "num_layers": 1}
    training.benchmark_training(training.TrainingBenchmark(results=tmp_path, **quick))
    runs = json.loads((tmp_path / "training.json").read_text())["rows"]
    found = [(r["model"].partition(",")[0], r["activation"]) for r in runs]
    assert found == list(itertools.product(("language", "ViT-S"), ("sigmoid", "softmax")))
    assert all(r["steps"] == 2 and r["tokens_or_images_per_second"] > 0 for r in runs)


def test_without_a_gpu_and_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BenchmarkError, match="needs a GPU"):
        kernels.benchmark_kernels(kernels.KernelBenchmark())
