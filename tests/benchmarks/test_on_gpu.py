"""The checks and times of gpu.sh, at tiny sizes with interpreted kernels."""

import itertools
import json

import pytest
import torch

import sigattn
from benchmarks import on_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.sh is the test on a GPU")


@pytest.mark.parametrize("option", on_gpu.OPTIONS)
def test_every_option_is_a_call(option):
    q, k, v, grad = (on_gpu.random(2, 2, 20, 16, dtype=torch.float32, seed=seed) for seed in range(4))
    arguments = on_gpu.arguments_of(option, (2, 2, 20, 20), torch.float32)
    results = on_gpu.results_of([q, k, v, grad], option, "reference", **arguments)
    assert all(t.isfinite().all() for t in results)


@pytest.mark.parametrize("case", [("float mask", "float16", 64, False), ("packed causal", "bfloat16", 80, True)])
def test_a_right_call_is_ok_and_a_wrong_one_is_not(monkeypatch, case):
    assert on_gpu.check(*case)["ok"]
    right = {name: getattr(sigattn, name) for name in ("sigmoid_attention", "sigmoid_varlen_attention")}
    for name, function in right.items():

        def wrong(q, *rest, backend, function=function, **options):
            return function(q * (1.1 if backend == "triton" else 1.0), *rest, backend=backend, **options)

        monkeypatch.setattr(sigattn, name, wrong)
    assert not on_gpu.check(*case)["ok"]


@pytest.mark.parametrize("mode", ["time", "options"])
def test_times_are_written_also_where_an_implementation_fails(tmp_path, monkeypatch, mode):
    option_times = on_gpu.option_times
    monkeypatch.setattr(on_gpu, "option_times", lambda: itertools.islice(option_times(), 2))
    on_gpu.main(mode, str(tmp_path / "rows.jsonl"), "1e9")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for direction in ("forward", "backward"):
        done = {row["name"] for row in rows if row["direction"] == direction and "ms" in row}
        assert done >= {"time": {"sigmoid", "sigmoid, normalize"}, "options": {"sigmoid", "plain", "SDPA"}}[mode]
    assert (mode == "time") == any("failed" in row for row in rows)  # cuDNN has no CPU
