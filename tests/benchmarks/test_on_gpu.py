"""The checks and times of gpu.sh, at tiny sizes with interpreted kernels."""

import json

import pytest
import torch

import sigattn
from benchmarks import on_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.sh is the test on a GPU")


@pytest.mark.parametrize("case", on_gpu.CASES[:: len(on_gpu.CASES) // 7], ids=str)
def test_a_right_call_is_ok_and_a_wrong_one_is_not(monkeypatch, case):
    assert on_gpu.check(*case)["ok"]
    right = {name: getattr(sigattn, name) for name in ("sigmoid_attention", "sigmoid_varlen_attention")}
    for name, function in right.items():

        def wrong(q, *rest, backend, function=function, **options):
            return function(q * (1.1 if backend == "triton" else 1.0), *rest, backend=backend, **options)

        monkeypatch.setattr(sigattn, name, wrong)
    assert not on_gpu.check(*case)["ok"]


@pytest.mark.parametrize("mode", ["time", "options"])
def test_times_are_written_also_where_an_implementation_fails(tmp_path, mode):
    on_gpu.main(mode, str(tmp_path / "rows.jsonl"), "1e9")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for direction in ("forward", "backward"):
        done = {row["name"] for row in rows if row["direction"] == direction and "ms" in row}
        assert done >= {"time": {"sigmoid", "sigmoid, normalize"}, "options": {"sigmoid", "plain", "SDPA"}}[mode]
    assert (mode == "time") == any("failed" in row for row in rows)  # cuDNN has no CPU
