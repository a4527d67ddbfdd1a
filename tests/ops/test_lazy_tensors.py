"""Tensors whose memory is not their data; the fuzz of ``test_correctness.py`` has dense calls with negated ones."""

import pytest
import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from tests.ops.cases import ON_CPU, negated


@pytest.mark.parametrize("backend", [None, *ON_CPU])
def test_a_gradient_without_memory(backend):
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    out = sigmoid_attention(q, q, q, backend=backend)
    (grad,) = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))
    assert not grad.any()


def test_negated_packed_and_cached_keys():
    rows, starts = torch.randn(40, 2, 16), torch.tensor([0, 40])
    out = [sigmoid_varlen_attention(t, rows, rows, starts, starts, 40, 40) for t in (negated(rows), rows)]
    torch.testing.assert_close(*out)
    cache, query = torch.randn(1, 64, 2, 16), torch.randn(1, 1, 2, 16)
    out = [sigmoid_kvcache_attention(query, cache, t, bias=-1.0) for t in (negated(cache), cache)]
    torch.testing.assert_close(*out)
