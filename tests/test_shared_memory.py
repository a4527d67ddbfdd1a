"""Tensors of lengths that share memory with NumPy and change after the forward pass, when a call has checked them.

The backward pass takes the lengths of the forward pass or raises ValueError; it never reads beyond the keys.
"""

import contextlib

import numpy as np
import pytest
import torch

from sigattn import flash, sigmoid_attention, sigmoid_varlen_attention
from sigattn.nn import Attention, Documents
from tests.ops.cases import ON_CPU

BEYOND = 1 << 20


def gradient(forward, lengths, change=None):
    """Return the gradient of the input, after a change of the lengths between the passes."""
    torch.manual_seed(0)
    array = np.array(lengths, dtype=np.int64)
    x, out = forward(torch.from_numpy(array))
    if change is not None:
        array[:] = change
    return torch.autograd.grad(out.square().sum(), x)[0]


def dense(backend, n, dtype):
    def forward(lengths):
        x = torch.randn(2, 1, n, 16, dtype=dtype, requires_grad=True)
        return x, sigmoid_attention(x, x, x, key_lengths=lengths, backend=backend)

    return forward


IDS, STARTS = torch.tensor([[0] * 10 + [1] * 20]), torch.tensor([0, 10, 30])


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def packed(function):
    def forward(starts):
        x = leaf(30, 2, 8)
        return x, function(x, x, x, starts, starts, 20, 20)

    return forward


def layer_with_lengths(lengths):
    x = leaf(2, 40, 16)
    return x, Attention(16, 2, activation="sigmoid", attention_bias=-2.0, causal=False)(x, key_lengths=lengths)


def nested(offsets):
    values = leaf(30, 2, 8)
    x = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
    return values, sigmoid_attention(x, x, x).transpose(1, 2).values()


def documents(starts):
    x = leaf(1, 30, 16)
    layer = Attention(16, 2, activation="sigmoid", attention_bias=-2.0)
    return x, layer(x, documents=Documents(IDS, IDS * 0, starts))


def paged(table):
    pages, query = leaf(6, 10, 2, 8), torch.ones(30, 2, 8)
    sizes = STARTS, STARTS, 20, 20
    return pages, flash.flash_attn_varlen_func(query, pages, pages, *sizes, block_table=table.view(2, 2))


SIZES = ((5, torch.float32), (40, torch.bfloat16), (150, torch.float32))


@pytest.mark.parametrize(
    ("forward", "lengths"),
    [
        *((dense(backend, *size), (size[0], size[0] // 2)) for backend in (None, *ON_CPU) for size in SIZES),
        (layer_with_lengths, (40, 3)),
        (packed(sigmoid_varlen_attention), (0, 10, 30)),
        (packed(flash.flash_attn_varlen_func), (0, 10, 30)),
        (nested, (0, 10, 30)),
        (documents, (0, 10, 30)),
        (paged, (3, 0, 5, 1)),
    ],
)
def test_lengths_offsets_and_tables(forward, lengths):
    expected = gradient(forward, lengths)
    for change in (BEYOND, -BEYOND):
        with contextlib.suppress(ValueError):
            torch.testing.assert_close(gradient(forward, lengths, change), expected)
