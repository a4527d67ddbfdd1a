"""Memory of bfloat16 products: oneDNN compiles one for each shape, and keeps the last 1024, up to a megabyte each."""

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops.blocked import tiles

LENGTHS = range(500, 700, 10)
# most shapes for these 20 lengths, and the option; without padding each length has shapes of its own
OPTIONS = {
    "plain": (60, lambda n: {}),
    "key_lengths": (60, lambda n: {"key_lengths": torch.tensor([n // 2 + 1])}),
    "bool mask": (60, lambda n: {"attn_mask": torch.ones(n, n, dtype=torch.bool)}),
    "causal": (370, lambda n: {"is_causal": True}),
    "window": (190, lambda n: {"window": (n // 9, 0)}),
}


@pytest.fixture
def shapes(monkeypatch):
    """Record the layouts of the factors of all bfloat16 products, which are not computed."""
    recorded = set()

    def record(a, b, out):
        if a.dtype is torch.bfloat16:
            recorded.add((a.shape, a.stride(), b.shape, b.stride()))
        return a.new_zeros(a.shape[0], a.shape[1], b.shape[2]) if out is None else out.zero_()

    monkeypatch.setattr(tiles, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out=None: record(a, b, out))
    monkeypatch.setattr(torch, "baddbmm", lambda _, a, b, out=None, **__: record(a, b, out))
    return recorded


@pytest.mark.parametrize(("most", "option"), OPTIONS.values(), ids=OPTIONS)
def test_products_of_many_lengths_have_few_shapes(most, option, shapes):
    for n in LENGTHS:
        query, key, value = torch.randn(3, 1, 2, n, 8, dtype=torch.bfloat16).requires_grad_().unbind()
        sigmoid_attention(query, key, value, backend="blocked", **option(n)).sum().backward()
    assert 0 < len(shapes) <= most
