"""Edge cases that small random problems rarely hit: borders of windows and blocks, and limits of 16 bits."""

import sys

import pytest
import torch

from sigattn import attention_statistics, sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from tests.ops.cases import SUPPORTING, device_of, path, ways
from tests.ops.truth import formula


@pytest.mark.parametrize("largest", [2**31 - 1, sys.maxsize, 2**64])
@pytest.mark.parametrize("sides", [(0, 1), (1, 0), (1, None), (1, 1)])  # which are largest; None for a side of 1
def test_the_largest_side_of_a_window_hides_no_key(largest, sides):
    """Added to or subtracted from the position of a query it would overflow."""
    window = tuple(1 if side is None else largest if side else -1 for side in sides)
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    options = {"bias": -1.0, "window": (-1, min(window[1], 10))}
    expected = formula(q, k, v, **options)
    for backend in (None, *SUPPORTING):
        out = sigmoid_attention(
            *(t.to(device_of(backend)) for t in (q, k, v)), window=window, bias=-1.0, backend=backend
        )
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-5)
    for backend in ("blocked", "triton"):
        cached = (t.transpose(1, 2).to(device_of(backend)) for t in (q[:, :, -1:], k, v))
        out = sigmoid_kvcache_attention(*cached, window=window, bias=-1.0, backend=backend).transpose(1, 2)
        torch.testing.assert_close(out.cpu().double(), expected[:, :, -1:], rtol=1e-4, atol=1e-5)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    packed = (t[0].transpose(0, 1) for t in (q, k, v))
    out = sigmoid_varlen_attention(*packed, starts, starts, 5, 5, window=window, bias=-1.0)
    torch.testing.assert_close(out.transpose(0, 1)[None].double(), expected, rtol=1e-4, atol=1e-5)
    found = attention_statistics(q, k, v, window=window, bias=-1.0).row_mass_mean
    mass = formula(q, k, v, weights=True, **options).sum(-1).mean(-1)
    torch.testing.assert_close(found.double(), mass, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("way", ways("blocked"))
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_bias_that_bfloat16_cannot_hold(way, kind):
    """-100.3 would be rounded to -100.5; with a product of 100 that rounding error determines the result."""
    q = torch.full((1, 2, 40, 4), 5.0, dtype=torch.bfloat16)
    k = torch.full((1, 2, 40, 4), 10.0, dtype=torch.bfloat16)
    v = torch.eye(40, dtype=torch.bfloat16).expand(1, 2, 40, 40)
    bias = torch.full((2, 1, 1), -100.3) if kind == "tensor" else -100.3
    with path(way):
        out = sigmoid_attention(q, k, v, bias=bias, backend="blocked")
    expected = torch.full_like(out, torch.sigmoid(torch.tensor(-0.3)).item(), dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [-3.0, "head"])
def test_a_scale_of_zero(request, dtype, bias):
    """oneDNN's products with alpha = 0 ignore beta, and write nothing if that is 0."""
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")
    q, k, v = torch.randn(3, 2, 4, 48, 8, dtype=dtype).unbind()
    bias = torch.full((4, 1, 1), -3.0) if bias == "head" else bias
    expected = v.double().sum(2, keepdim=True).expand(v.shape) * torch.sigmoid(torch.tensor(-3.0))
    for backend in (None, "blocked"):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = sigmoid_attention(*inputs, scale=0.0, bias=bias, backend=backend)
        torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)
        d_query, d_key, _ = torch.autograd.grad(out.sum(), inputs)
        assert not d_query.any()
        assert not d_key.any()
    cached = (t.transpose(1, 2) for t in (q[:, :, :1], k, v))
    out = sigmoid_kvcache_attention(*cached, bias=bias, scale=0.0).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected[:, :, :1], rtol=0.03, atol=0.03)
