"""Every combination of shapes that F.scaled_dot_product_attention accepts, with the shape of its result."""

import itertools
import os
import random

import pytest
import torch
import torch.nn.functional as F

from sigattn import sigmoid_attention

from .cases import COMPILER_NOISE

N, M, D, DV = 3, 5, 8, 4
LEADING = [(), (1,), (2,), (4,), (1, 1), (2, 1), (1, 4), (2, 2), (2, 4), (3, 4), (2, 1, 4), (1, 3, 4), (2, 3, 1)]
SHAPES = list(itertools.product(LEADING, repeat=3))
SHARE = 1 if os.environ.get("SIGATTN_SWEEP") == "all" else 16  # one combination of so many is tried


def operands(leads, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    sizes = ((N, D), (M, D), (M, DV))
    tensors = [torch.randn(*lead, *size, generator=g, dtype=dtype) for lead, size in zip(leads, sizes, strict=True)]
    return [t.requires_grad_() for t in tensors]


def formula(q, k, v, mask=None, gqa=False):
    """Return σ(Q Kᵀ / √D - log M + mask) V, broadcast as by torch.matmul."""
    if gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5 - torch.tensor(k.shape[-2]).log()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
    return logits.sigmoid() @ v


def outcome(function, *args, **options):
    try:
        return tuple(function(*args, **options).shape)
    except (RuntimeError, ValueError, IndexError):  # PyTorch's math path raises what its operators raise
        return None


@pytest.mark.parametrize("kind", ["plain", "grouped heads", "bool mask", "float mask"])
def test_the_shapes_are_those_of_pytorch(kind):
    """The same shapes are accepted and rejected (but for more masks); results and gradients are the formula's."""
    rng, accepted, gqa = random.Random(1), 0, kind == "grouped heads"
    for leads in rng.sample(SHAPES, len(SHAPES) // SHARE):
        leaves, mask = operands(leads), None
        if "mask" in kind:
            mask = torch.randn(*rng.choice([*LEADING, *leads]), rng.choice([1, N]), rng.choice([1, M])).double()
            mask = mask > 0 if kind == "bool mask" else mask
        theirs = outcome(F.scaled_dot_product_attention, *leaves, mask, enable_gqa=gqa)
        if theirs is not None or mask is None:
            assert outcome(sigmoid_attention, *leaves, mask, enable_gqa=gqa) == theirs, leads
        if theirs is not None:
            accepted += 1
            truth, grad = formula(*leaves, mask, gqa), torch.randn(theirs).double()
            outs = (sigmoid_attention(*leaves, mask, enable_gqa=gqa), truth)
            results = [(out, *torch.autograd.grad(out, leaves, grad)) for out in outs]
            torch.testing.assert_close(*results, msg=str(leads))
    assert accepted > 10


def test_what_belongs_to_a_sample_has_the_leading_dimensions():
    """With five dimensions, key_lengths is (B1, B2), and alibi_slopes and bias broadcast with it."""
    q, k, v = (t.detach() for t in operands(((2, 3, 4), (2, 3, 4), (2, 3, 4))))
    lengths, slopes = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.rand(2, 3, 4)
    bias, mask = torch.randn(3, 1, N, 1).double(), torch.rand(2, 1, 4, N, M) > 0.3
    ours = sigmoid_attention(q, k, v, mask, key_lengths=lengths, alibi_slopes=slopes, bias=bias)
    for i, j in itertools.product(range(2), range(3)):
        of_sample = {"key_lengths": lengths[i, j][None], "alibi_slopes": slopes[i, j][None], "bias": bias[j]}
        one = sigmoid_attention(*(t[i, j][None] for t in (q, k, v)), mask[i, 0], **of_sample)[0]
        torch.testing.assert_close(ours[i, j], one)
    without = sigmoid_attention(q[0, 0], k[0, 0], v[0, 0], key_lengths=lengths[1, 0], alibi_slopes=slopes[0, 0])
    one = sigmoid_attention(*(t[0, :1] for t in (q, k, v)), key_lengths=lengths[1, 0][None], alibi_slopes=slopes[0, :1])
    torch.testing.assert_close(without, one[0])


@pytest.mark.filterwarnings(*COMPILER_NOISE)
def test_compiled(unchecked):
    q, k, v = operands(((2, 3, 4), (1, 3, 4), (4,)), torch.float32)
    compiled = torch.compile(sigmoid_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, is_causal=True), sigmoid_attention(q, k, v, is_causal=True))
