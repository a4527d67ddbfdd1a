"""Tensors of lengths that share memory with NumPy and change after the forward pass, when a call has checked them.

The backward pass takes the lengths of the forward pass or raises ValueError; it never reads beyond the keys.
"""

import importlib.util

import numpy as np
import pytest
import torch

from sigattn import flash, sigmoid_attention, sigmoid_varlen_attention
from sigattn.nn import Attention, Documents

BEYOND = 1 << 20
NEEDS_LLVM = pytest.mark.skipif(importlib.util.find_spec("llvmlite") is None, reason="llvmlite is not installed")


def shared(*values):
    array = np.array(values, dtype=np.int64)
    return array, torch.from_numpy(array)


def gradient(forward, lengths, change=None):
    """Return the gradient of the input, after a change of the lengths between the passes."""
    torch.manual_seed(0)
    array, lengths = shared(*lengths)
    x, out = forward(lengths)
    if change is not None:
        array[:] = change
    return torch.autograd.grad(out.square().sum(), x)[0]


def assert_safe(forward, lengths):
    expected = gradient(forward, lengths)
    for change in (BEYOND, -BEYOND):
        try:
            actual = gradient(forward, lengths, change)
        except ValueError:
            continue
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("n", "dtype"), [(5, torch.float32), (40, torch.bfloat16), (150, torch.float32)])
@pytest.mark.parametrize("backend", [None, "reference", "blocked", pytest.param("llvm", marks=NEEDS_LLVM)])
def test_key_lengths(backend, n, dtype):
    def forward(lengths):
        x = torch.randn(2, 1, n, 16, dtype=dtype, requires_grad=True)
        return x, sigmoid_attention(x, x, x, key_lengths=lengths, backend=backend)

    assert_safe(forward, (n, n // 2))


def test_key_lengths_of_a_layer():
    layer = Attention(16, 2, activation="sigmoid", attention_bias=-2.0, causal=False)

    def forward(lengths):
        x = torch.randn(2, 40, 16, requires_grad=True)
        return x, layer(x, key_lengths=lengths)

    assert_safe(forward, (40, 3))


def packed(function, **options):
    def forward(starts):
        x = torch.randn(30, 2, 8, requires_grad=True)
        return x, function(x, x, x, starts, starts, 20, 20, **options)

    return forward


@pytest.mark.parametrize("function", [sigmoid_varlen_attention, flash.flash_attn_varlen_func])
def test_offsets_of_packed_sequences(function):
    assert_safe(packed(function), (0, 10, 30))


def test_offsets_of_nested_tensors():
    def forward(offsets):
        values = torch.randn(30, 2, 8, requires_grad=True)
        nested = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
        return values, sigmoid_attention(nested, nested, nested).transpose(1, 2).values()

    assert_safe(forward, (0, 10, 30))


def test_offsets_of_documents():
    layer = Attention(16, 2, activation="sigmoid", attention_bias=-2.0)
    ids = torch.tensor([[0] * 10 + [1] * 20])

    def forward(starts):
        x = torch.randn(1, 30, 16, requires_grad=True)
        return x, layer(x, documents=Documents(ids, ids * 0, starts))

    assert_safe(forward, (0, 10, 30))


def test_tables_of_pages():
    starts = torch.tensor([0, 10, 30])

    def forward(table):
        pages = torch.randn(6, 10, 2, 8, requires_grad=True)
        table = table.view(2, 2)
        return pages, flash.flash_attn_varlen_func(
            torch.ones(30, 2, 8), pages, pages, starts, starts, 20, 20, block_table=table
        )

    assert_safe(forward, (3, 0, 5, 1))
