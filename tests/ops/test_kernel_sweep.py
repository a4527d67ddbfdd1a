"""The Triton kernels over options, dtypes and head dims from 8 to 256, against the formula in float64.

On a GPU every head dim is combined with every option, at sizes larger than a tile; elsewhere one small case runs.
"""

import random

import pytest
import torch

from tests.ops import test_correctness
from tests.ops.cases import Case, device_of

GPU = device_of("triton") == "cuda"
HEAD_DIMS = (8, 72, 40, 256, 96, 192, 64, 128, 80, 16, 24, 32, 160)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [(257, 300), (130, 130), (1, 333), (300, 129), (96, 64)] if GPU else [(19, 40), (1, 21), (33, 17)]
OPTIONS = {  # their number has no factor in common with those of head dims and dtypes: in turn, all pairs are met
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 7)},
    "bias": {"bias": "rows"},
    "slopes": {"slopes": "sides", "causal": True},
    "lengths": {"lengths": True},
    "softcap": {"softcap": 5.0, "scale": 0.4},
    **{f"bool mask, {of}": {"mask": ("bool", of)} for of in ("full", "heads", "keys")},
    **{f"float mask, {of}": {"mask": ("float", of)} for of in ("heads", "keys")},
    "infinite mask": {"mask": ("-inf", "full"), "bias": -3.0},
    "all": {
        "causal": True, "window": (90, -1), "bias": "rows", "slopes": "all", "lengths": True, "softcap": 20.0,
        "mask": ("float", "full"),
    },
}  # fmt: skip


def dense_case(number):
    """Draw a call with the next head dim, dtype and option; the rest is random."""
    draw = random.Random(number)
    batch, kv, rep = 2 if GPU else 1, draw.choice([1, 2]), draw.choice([1, 2])
    n, m = draw.choice(SIZES)
    d = HEAD_DIMS[number % len(HEAD_DIMS)]
    chosen = {"causal": False, "scale": None, "window": None, "bias": None, "mask": None, "slopes": None}
    chosen |= {"lengths": False, "softcap": 0.0, **list(OPTIONS.values())[number % len(OPTIONS)]}
    if chosen["bias"] == "rows":
        chosen["bias"] = (batch, kv * rep, n, 1)
    if chosen["mask"]:
        kind, shape = chosen["mask"]
        chosen["mask"] = kind, {"full": (batch, kv * rep, n, m), "heads": (n, m), "keys": (batch, 1, 1, m)}[shape]
    return Case(
        shape=(batch, kv, rep, n, m, d, draw.choice([d, d, d, draw.choice(HEAD_DIMS)])),
        dtype=DTYPES[number % len(DTYPES)],
        layout=draw.choice(["length first", "length first", "contiguous", "strided", "expanded"]),
        seed=number,
        normalize=number % 2 == 1,
        **chosen,
    )


@pytest.mark.parametrize("number", range(len(HEAD_DIMS) * len(OPTIONS)) if GPU else [len(OPTIONS) - 1])
def test_kernels(number):
    test_correctness.check(dense_case(number), "triton", repeats=1)
