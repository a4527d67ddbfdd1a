"""Edge cases that small random problems rarely hit: borders of windows and blocks, and limits of 16 bits."""

import sys

import pytest
import torch

from sigattn import attention_statistics, sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from tests.ops.cases import ON_CPU, path, ways


def formula(q, k, v, b, left, right, offset=0):
    """Return the output in float64; query i has position i + offset."""
    q, k, v = (t.double() for t in (q, k, v))
    i, j = torch.arange(q.shape[2])[:, None] + offset, torch.arange(k.shape[2])
    visible = (left < 0) | (j >= i - left)
    visible &= (right < 0) | (j <= i + right)
    p = torch.sigmoid(q.shape[-1] ** -0.5 * q @ k.mT + b)
    return torch.where(visible, p, 0.0) @ v


@pytest.mark.parametrize("n", [514, 1026])
@pytest.mark.parametrize("window", [(0, -1), (1, -1), (511, -1), (512, 0), (513, 1), (1, 1)])
def test_borders_of_a_window_at_the_borders_of_blocks(n, window):
    """Just beyond one or two blocks of rows, where a single head is computed with no mask but the window."""
    q, k, v = torch.randn(3, 1, 1, n, 8).unbind()
    out = sigmoid_attention(q, k, v, window=window, bias=-1.0, backend="blocked")
    torch.testing.assert_close(out.double(), formula(q, k, v, -1.0, *window), rtol=1e-4, atol=1e-4)


LARGEST = (2**31 - 1, sys.maxsize, 2**64)


@pytest.mark.parametrize("window", [w for n in LARGEST for w in ((-1, n), (n, -1), (n, 1), (n, n))])
def test_the_largest_side_of_a_window_hides_no_key(window):
    """Added to or subtracted from the position of a query it would overflow."""
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    expected = formula(q, k, v, -1.0, -1, min(window[1], 10))
    for backend in (None, *ON_CPU):
        out = sigmoid_attention(q, k, v, window=window, bias=-1.0, backend=backend)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    packed = (t[0].transpose(0, 1) for t in (q, k, v))
    out = sigmoid_varlen_attention(*packed, starts, starts, 5, 5, window=window, bias=-1.0)
    torch.testing.assert_close(out.transpose(0, 1)[None].double(), expected, rtol=1e-4, atol=1e-5)
    weights = formula(q, k, torch.eye(5).expand(1, 2, 5, 5), -1.0, -1, min(window[1], 10))
    found = attention_statistics(q, k, v, window=window, bias=-1.0).row_mass_mean
    torch.testing.assert_close(found.double(), weights.sum(-1).mean(-1), rtol=1e-5, atol=0.0)


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
