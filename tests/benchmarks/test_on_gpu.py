"""The checks and times of gpu.sh, at tiny sizes with interpreted kernels."""

import itertools
import json
import types

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


@pytest.fixture
def blocked(monkeypatch):
    """Compute by backend "blocked", which takes less time than interpreted kernels, what these would compute.

    factor: of the query, there.
    """
    state = types.SimpleNamespace(factor=1.0)

    def through(function):
        def call(q, *rest, backend, **options):
            q, backend = (q * state.factor, "blocked") if backend == "triton" else (q, backend)
            return function(q, *rest, backend=backend, **options)

        return call

    for name in ("sigmoid_attention", "sigmoid_varlen_attention"):
        monkeypatch.setattr(sigattn, name, through(getattr(sigattn, name)))
    return state


@pytest.mark.parametrize("case", [("float mask", "float16", 64, False), ("packed causal", "bfloat16", 80, True)])
def test_a_right_call_is_ok_and_a_wrong_one_is_not(blocked, case):
    assert on_gpu.check(*case)["ok"]
    blocked.factor = 1.1
    assert not on_gpu.check(*case)["ok"]


@pytest.mark.parametrize("mode", ["time", "options"])
def test_times_are_written_also_where_an_implementation_fails(tmp_path, monkeypatch, blocked, mode):
    option_times = on_gpu.option_times
    monkeypatch.setattr(on_gpu, "option_times", lambda: itertools.islice(option_times(), 2))
    on_gpu.main(mode, str(tmp_path / "rows.jsonl"), "1e9")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for direction in ("forward", "backward"):
        done = {row["name"] for row in rows if row["direction"] == direction and "ms" in row}
        assert done >= {"time": {"sigmoid", "sigmoid, normalize"}, "options": {"sigmoid", "plain", "SDPA"}}[mode]
    assert (mode == "time") == any("failed" in row for row in rows)  # cuDNN has no CPU
