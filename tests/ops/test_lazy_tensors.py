"""Tensors whose memory is not their data: lazily negated ones, and zeros without memory."""

import pytest
import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from tests.ops.cases import ON_CPU, SUPPORTING, device_of

NAMES = ("query", "key", "value", "bias", "attn_mask", "alibi_slopes", "grad_out")


def negated(t):
    """Return a tensor whose memory holds the negative, as ``x.conj().imag`` does."""
    lazy = torch._neg_view(-t)
    assert lazy.is_neg()
    return lazy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", [None, *SUPPORTING])
def test_operands(backend, name):
    given = dict(zip(("query", "key", "value", "grad_out"), torch.randn(4, 1, 2, 40, 16).unbind(), strict=True))
    given |= {"bias": torch.randn(2, 40, 1), "attn_mask": torch.randn(40, 40), "alibi_slopes": torch.rand(2)}
    given = {name: t.to(device_of(backend)) for name, t in given.items()}

    def outputs(operands):
        query = operands["query"].detach().requires_grad_()
        options = {n: operands[n] for n in NAMES[3:-1] if n in (name, "bias")}
        out = sigmoid_attention(query, operands["key"], operands["value"], **options, backend=backend)
        return out.detach(), *torch.autograd.grad(out, query, operands["grad_out"])

    for found, expected in zip(outputs({**given, name: negated(given[name])}), outputs(given), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_bias_of_a_complex_tensor():
    q, k, v = torch.randn(3, 1, 4, 40, 16).unbind()
    bias = torch.randn(4, 1, 1, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    torch.testing.assert_close(sigmoid_attention(q, k, v, bias=bias), sigmoid_attention(q, k, v, bias=bias.clone()))


@pytest.mark.parametrize("backend", [None, *ON_CPU])
def test_a_gradient_without_memory(backend):
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    out = sigmoid_attention(q, q, q, backend=backend)
    (grad,) = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))
    assert not grad.any()


def test_packed_and_cached_keys():
    rows, starts = torch.randn(40, 2, 16), torch.tensor([0, 40])
    out = [sigmoid_varlen_attention(t, rows, rows, starts, starts, 40, 40) for t in (negated(rows), rows)]
    torch.testing.assert_close(*out)
    cache, query = torch.randn(1, 64, 2, 16), torch.randn(1, 1, 2, 16)
    out = [sigmoid_kvcache_attention(t, cache, negated(cache), bias=-1.0) for t in (negated(query), query)]
    torch.testing.assert_close(*out)
    torch.testing.assert_close(out[0], sigmoid_kvcache_attention(query, cache, cache, bias=-1.0))
