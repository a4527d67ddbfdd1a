"""Short sequences: every window, a scale of 0, rounding of the bias."""

import itertools

import pytest
import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention
from sigattn.ops.blocked import tiles
from sigattn.ops.problem import Problem, make_problem
from tests.ops.truth import formula


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
@pytest.mark.parametrize("bias", [-3.0, None, "head"])
def test_a_scale_of_zero(request, dtype, bias):
    """oneDNN's products with alpha = 0 ignore beta, and write nothing if that is 0."""
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")
    q, k, v = torch.randn(3, 2, 4, 48, 8, dtype=dtype).unbind()
    bias = torch.full((4, 1, 1), -3.0) if bias == "head" else bias
    expected = formula(q, k, v, bias=bias, scale=0.0)
    for backend, saves in itertools.product([None, "blocked"], [False, True]):
        inputs = [t.clone().requires_grad_(saves) for t in (q, k, v)]
        out = sigmoid_attention(*inputs, scale=0.0, bias=bias, backend=backend)
        torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)
        if saves:
            out.sum().backward()
            assert not inputs[0].grad.any()
            assert not inputs[1].grad.any()
    number = -3.0 if bias is None else bias
    for length in (5, 48):  # of the cache
        cached = (t.transpose(1, 2)[:, :length] for t in (k, v))
        found = sigmoid_kvcache_attention(q.transpose(1, 2)[:, :1], *cached, bias=number, scale=0.0)
        expected = formula(q[:, :, :1], k[:, :, :length], v[:, :, :length], bias=number, scale=0.0)
        torch.testing.assert_close(found.transpose(1, 2).double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dimensions", ["head", "query"])
def test_a_bias_is_not_rounded_to_bfloat16(dimensions):
    """It is added to the product before that is rounded: -7.03 instead of -7.015 would change all weights by 1.5 %."""
    if not tiles.has_bfloat16_products():
        pytest.skip("bfloat16 is not fast on this CPU")
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 4, 300, 8).unbind()
    v = v.abs() + 0.5
    q, k, v, grad = (t.bfloat16() for t in (q, k, v, grad))
    bias = torch.full((4, 1, 1) if dimensions == "head" else (1, 4, 300, 1), -7.015, requires_grad=True)
    assert tiles.arithmetic(make_problem(Problem, q, k, v, bias=bias)) is torch.bfloat16
    truth = formula(*(t.double() for t in (q, k, v)), bias=-7.015)
    weights = formula(*(t.double() for t in (q, k)), torch.eye(300).double().expand(1, 4, -1, -1), bias=-7.015)
    by_query = ((grad.double() @ v.double().mT) * weights * (1 - weights)).sum(-1, keepdim=True)
    out = sigmoid_attention(q, k, v, bias=bias, backend="blocked")
    assert (out.double() / truth - 1).mean().abs() < 0.002
    (found,) = torch.autograd.grad(out, bias, grad)
    error = (found.double() - by_query.sum_to_size(bias.shape)).square().mean().sqrt()
    rounding = by_query.square().mean().sqrt() * torch.finfo(torch.bfloat16).eps  # of one query's sum
    assert error < rounding * (1 if dimensions == "query" else 300**0.5)
