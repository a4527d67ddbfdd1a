"""Nothing but speed depends on the length: derivatives, strides and the class of ``grad_fn`` are the same everywhere.

A fast path for some lengths shows here as a border between two lengths.
"""

import pytest
import torch

from sigattn import sigmoid_attention

LENGTHS = (1, 2, 33, 64, 65, 130, 400)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LAYOUTS = {"contiguous": (0, 1, 2, 3), "heads of a projection": (0, 2, 1, 3), "length first": (1, 2, 0, 3)}
OPTIONS = {
    "plain": lambda n, dtype: {},
    "causal": lambda n, dtype: {"is_causal": True},
    "bias, a number": lambda n, dtype: {"bias": -3.0},
    "bias of heads": lambda n, dtype: {"bias": torch.full((2, 1, 1), -2.0, dtype=dtype)},
    "key_lengths": lambda n, dtype: {"key_lengths": torch.full((1 + n % 2,), (n + 1) // 2)},
    "bool mask": lambda n, dtype: {"attn_mask": torch.ones(n, n, dtype=torch.bool).tril()},
    "float mask": lambda n, dtype: {"attn_mask": torch.zeros(n, n, dtype=dtype)},
    "ALiBi": lambda n, dtype: {"alibi_slopes": torch.tensor([0.1, 0.2])},
    "window": lambda n, dtype: {"window": (5, 5)},
    "softcap": lambda n, dtype: {"softcap": 5.0},
    "offset": lambda n, dtype: {"query_offset": 3, "is_causal": True},
}


def operands(n, dtype, layout):
    """Return query, key and value (1 or 2, 2, n, 8), views of tensors with another order of dimensions."""
    order = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(n)
    shape = tuple((1 + n % 2, 2, n, 8)[dim] for dim in order)
    inverse = [order.index(dim) for dim in range(4)]
    return [torch.randn(shape, generator=generator).to(dtype).permute(inverse).requires_grad_() for _ in range(3)]


def order_in_memory(t):
    return sorted((dim for dim in range(t.dim()) if t.shape[dim] > 1), key=t.stride, reverse=True)


def outcome(n, dtype, layout, options):
    """Return what a user can observe of a call and its derivatives, without the numbers."""
    query, key, value = operands(n, dtype, layout)
    out = sigmoid_attention(query, key, value, **options)
    gradients = torch.autograd.grad(out.square().sum(), (query, key, value), create_graph=True)
    if not options:
        torch.autograd.grad(gradients[0].square().sum(), (query, key, value))  # does not raise
    orders = [order_in_memory(t) == order_in_memory(query) for t in (out, *gradients)]
    extents = (sum((s - 1) * d for s, d in zip(t.shape, t.stride(), strict=True)) for t in (out, *gradients))
    dense = [t.numel() == 1 + extent for t, extent in zip((out, *gradients), extents, strict=True)]
    return type(out.grad_fn).__name__, type(gradients[0].grad_fn).__name__, out.dtype, orders, dense


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_differ_in_nothing_but_numbers(dtype, layout):
    expected = ("SigmoidAttentionBackward", "SigmoidAttentionGradientBackward", dtype, [True] * 4, [True] * 4)
    found = {}
    for n in LENGTHS if layout == "heads of a projection" and dtype is torch.float32 else LENGTHS[::3]:
        for name, options in OPTIONS.items():
            found[n, name] = outcome(n, dtype, layout, options(n, dtype))
    assert {key: value for key, value in found.items() if value != expected} == {}
