"""Short sequences: every window, and the fast path of calls without options, against the formula."""

import itertools

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops.cpu import short
from sigattn.ops.cpu.matmul import fused_unavailable
from tests.ops.truth import assert_as_good_as_formula, formula


@pytest.mark.parametrize("backend", ["reference", "blocked", None])
@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 7), (7, 4)])
def test_every_window(backend, n, m):
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for length in (n, m, m))
    sides = range(-1, max(n, m) + 1)
    for left, right, causal in itertools.product(sides, sides, (False, True)):
        options = {"bias": -0.5, "window": (left, right)}
        out = sigmoid_attention(q, k, v, is_causal=causal, backend=backend, **options)
        expected = formula(q, k, v, causal=causal, **options)
        torch.testing.assert_close(out, expected, msg=lambda m, case=(left, right, causal): f"{case}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"bias": -1.5}, {"scale": 0.7}, {"is_causal": True, "scale": 0.2, "bias": 0.5}]
)
def test_fast_path(dtype, options):
    if dtype is torch.bfloat16 and fused_unavailable(torch.device("cpu"), dtype):
        pytest.skip("bfloat16 is not fast on this CPU")
    q, k, v = torch.randn(3, 2, 3, 48, 8, dtype=dtype).unbind()
    arguments = {"is_causal": False, "scale": None, "bias": None} | options
    assert short.is_plain_self_attention(q, k, v, arguments["scale"], arguments["bias"])
    found = sigmoid_attention(q, k, v, **options)
    assert torch.equal(found, sigmoid_attention(q, k, v, **options, key_lengths=None, window=(-1, -1)))
    given = {"causal": arguments["is_causal"], "scale": arguments["scale"], "bias": arguments["bias"]}
    assert_as_good_as_formula(found, formula(q, k, v, **given), formula(q, k, v, **given, dtype=dtype))
