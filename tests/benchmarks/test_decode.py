"""The decoding benchmark at a tiny size: its rows, the check of its implementations, its results."""

import itertools
import json

import pytest
import torch

from benchmarks import decode
from benchmarks.reference import WrongResultError

QUICK, DTYPES = {"threads": 1, "rounds": 1, "round_seconds": 0.0}, ("float32", "bfloat16")
TINY = {"context_lengths": (64, 128), "batch_sizes": (2,), "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TINY |= {"prompt_lengths": (), **QUICK}


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu.sh is the test on a GPU")
def test_rows_and_results(tmp_path, capsys):
    path = tmp_path / "decode.json"
    config = decode.DecodeBenchmark(**TINY, dtypes=DTYPES, results=path)
    rows = decode.benchmark_decode(config)["rows"]
    found = {(r["context_length"], r["dtype"], (r["layout"], r["implementation"])) for r in rows}
    measured = {(r["layout"], r["implementation"]) for r in rows}
    assert measured >= {
        ("length first", decode.PAGED),
        *(("heads first", x) for x in (decode.OURS, decode.SDPA, "copy")),
    }
    assert found == set(itertools.product((64, 128), DTYPES, measured))
    assert json.loads(path.read_text())["rows"] == rows
    assert "one token with a cache" in capsys.readouterr().out


def test_generation(tmp_path):
    sizes = {"context_lengths": (16,), "batch_sizes": (1,), "dtypes": ("float32",), "prompt_lengths": (16,)}
    config = decode.DecodeBenchmark(**sizes, **QUICK, results=tmp_path / "x.json")
    rows = decode.benchmark_decode(config)["generation"]
    assert [(r["prompt_length"], r["activation"]) for r in rows] == [(16, "sigmoid"), (16, "softmax")]
    assert all(r["tokens_per_second"] > 0 for r in rows)


def test_caches_that_are_too_large_are_left_out(tmp_path):
    config = decode.DecodeBenchmark(**TINY, max_gib=1e-6, results=tmp_path / "x.json")
    assert decode.benchmark_decode(config)["rows"] == []


def test_a_wrong_implementation_is_not_timed():
    cache = decode.CacheInputs(torch.randn(1, 1, 2, 8), *torch.randn(2, 1, 16, 2, 8).unbind())
    for value in (0.0, torch.nan):
        with pytest.raises(WrongResultError, match="sigattn is wrong"):
            decode.check("sigattn", lambda: torch.full((1, 1, 2, 8), value), cache)  # noqa: B023
