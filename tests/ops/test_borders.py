"""Edge cases that small random problems rarely hit: borders of windows, limits of 16 bits, sizes of 0, NaN."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sigattn import (
    attention_statistics,
    log_length_bias,
    sigmoid_attention,
    sigmoid_kvcache_attention,
    sigmoid_varlen_attention,
)
from tests.ops.cases import COMPLETE, ON_CPU, SUPPORTING, device_of, negated, path, ways
from tests.ops.truth import formula


@pytest.mark.parametrize(
    ("largest", "sides"),  # which are largest; None for a side of 1
    [*((n, (1, 1)) for n in (2**31 - 1, sys.maxsize, 2**64)), *((2**63 - 1, s) for s in ((0, 1), (1, 0), (1, None)))],
)
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


def operands(b=2, hq=4, hkv=4, n=5, m=6, d=8, dv=7):
    return [torch.randn(shape) for shape in ((b, hq, n, d), (b, hkv, m, d), (b, hkv, m, dv))]


@pytest.mark.parametrize("backend", [*SUPPORTING, None])
def test_sizes_of_0(backend):
    for shape in ((0, 4, 4, 5, 6), (2, 4, 4, 0, 6), (2, 4, 4, 5, 0), (2, 0, 0, 5, 6), (2, 0, 1, 5, 6)):
        q, k, v = (t.requires_grad_() for t in operands(*shape))
        out = sigmoid_attention(q, k, v, backend=backend)
        assert out.shape == (shape[0], shape[1], shape[3], 7)
        for g, t in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
            assert g.shape == t.shape
        assert shape[4] or not out.any()


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize(("d", "dv"), [(0, 7), (4, 0), (0, 0)])
def test_heads_without_features(backend, d, dv):
    """Without those of queries and keys every logit is the bias; without those of values there is no gradient."""
    q, k, v = (t.requires_grad_() for t in operands(hkv=2, d=d, dv=dv))
    out = sigmoid_attention(q, k, v, bias=0.0, enable_gqa=True, backend=backend)
    expected = 0.5 * v.sum(2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    assert [(g.shape, bool(g.any())) for g in found[:2]] == [(q.shape, False), (k.shape, False)]
    torch.testing.assert_close(found[2], torch.autograd.grad(expected, v, grad)[0])


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_scale_of_zero_times_nan_and_logits_that_overflow(backend):
    for n in (5, 40):
        q, k, v = torch.randn(3, 2, 2, n, 16).unbind()
        q[0, 0, 2, 0] = math.nan
        out = sigmoid_attention(q, k, v, scale=0.0, backend=backend)  # 0 · NaN is NaN
        assert (out[0, 0, 2].isnan().all(), out.isnan().sum()) == (True, 16)
    q, k, v = operands()
    q[0], k[0] = 1e30, 1e30  # logits overflow to +inf: each weight is 1
    torch.testing.assert_close(
        sigmoid_attention(q, k, v, backend=backend)[0], v[0].sum(1, keepdim=True).expand(4, 5, 7)
    )


def test_tensors_whose_memory_is_not_their_data():
    """A gradient without memory; packed and cached keys that are negated (dense ones: test_correctness.py)."""
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    for backend in (None, *ON_CPU):
        out = sigmoid_attention(q, q, q, backend=backend)
        (grad,) = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))
        assert not grad.any()
    rows, starts = torch.randn(40, 2, 16), torch.tensor([0, 40])
    out = [sigmoid_varlen_attention(t, rows, rows, starts, starts, 40, 40) for t in (negated(rows), rows)]
    torch.testing.assert_close(*out)
    cache, query = torch.randn(1, 64, 2, 16), torch.randn(1, 1, 2, 16)
    out = [sigmoid_kvcache_attention(query, cache, t, bias=-1.0) for t in (negated(cache), cache)]
    torch.testing.assert_close(*out)


def test_memory_of_tiles_is_shared_with_nothing():
    """Neither with calls in inference mode or other threads, nor with outputs."""
    inputs = [torch.randn(1, 4, 600, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    with torch.inference_mode():
        alone = [sigmoid_attention(q, q, q, is_causal=True) for q in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = list(pool.map(lambda q: sigmoid_attention(q, q, q, is_causal=True), inputs))
            torch.testing.assert_close(together, [t.clone() for t in alone])
    q, other = (t.requires_grad_() for t in inputs[:2])
    out = sigmoid_attention(q, q, q, is_causal=True)
    (grad,) = torch.autograd.grad(out.sum(), q)
    before = out.detach().clone(), grad.clone()
    sigmoid_attention(other, other, other, is_causal=True).sum().backward()
    assert torch.equal(out.detach(), before[0])
    assert torch.equal(grad, before[1])


def test_log_length_bias():
    assert log_length_bias(1) == 0
    assert log_length_bias(2048) == -math.log(2048)  # the -7.62 of the authors' configurations
    torch.testing.assert_close(log_length_bias(torch.tensor([1, 2048])), torch.tensor([0.0, -math.log(2048)]))
    assert log_length_bias(torch.tensor([3.0], dtype=torch.float64)).dtype is torch.float64
