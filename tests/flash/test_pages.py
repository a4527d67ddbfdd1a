"""Packed sequences with keys in pages: each equals a call of its own. (Compiled: tests/export.)"""

import pytest
import torch

from sigattn import flash

from ..ops.truth import one_sequence

LENGTHS_Q, LENGTHS_K, PAGE = [4, 0, 3, 1], [9, 2, 3, 0], 4
TABLE = torch.tensor([[5, 1, 3, 9], [0, -1, -1, -1], [1, 7, 7, 7], [0, 0, 0, 0]])  # two sequences share page 1


def leaves(dtype=torch.float64, pages=6):
    g = torch.Generator().manual_seed(0)
    sizes = ((sum(LENGTHS_Q), 4, 8), (pages, PAGE, 2, 8), (pages, PAGE, 2, 5))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_formula(q, k, v, causal, bias):
    """Compute one sequence at a time, with its keys read from the pages one by one."""
    outs = []
    for s, (n, m) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        keys, values = (
            torch.stack([t[TABLE[s, j // PAGE], j % PAGE] for j in range(m)]) if m else t[0, :0] for t in (k, v)
        )
        rows = q[starts(LENGTHS_Q)[s] :][:n]
        outs.append(one_sequence(rows, keys, values, bias=bias, causal=causal))
    return torch.cat(outs)


@pytest.mark.parametrize(("causal", "bias"), [(True, None), (False, -1.0)])
def test_pages(causal, bias):
    """Compare prefill with the formula, gradients included; those of a shared page are summed."""
    given = leaves()
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    out = flash.flash_attn_varlen_func(*given, cu_q, cu_k, 4, 9, causal=causal, block_table=TABLE, sigmoid_bias=bias)
    truth = by_formula(*given, causal, bias)
    grad = torch.randn_like(truth)
    gradients = (torch.autograd.grad(t, given, grad) for t in (out, truth))
    torch.testing.assert_close((out, *next(gradients)), (truth, *next(gradients)))


P = torch.randn(2, PAGE, 2, 8)
Q, S = torch.randn(5, 2, 8), torch.tensor([0, 5])
WRONG = {
    "rank": ((Q, Q, Q), [[0, 1]], r"k must be \(pages, page_size, heads, head_dim\)"),
    "table rank": ((Q, P, P), [0, 1], r"block_table must be \(B, pages of each\)"),
    "table dtype": ((Q, P, P), [[0.0, 1.0]], "block_table must be a tensor of integers"),
    "no such page": ((Q, P, P), [[0, 2]], r"names pages \[0, 2\], but the cache has"),
    "too few": ((Q, P, P), [[0]], "a cache of 4 keys for each sample cannot hold"),
    "value": ((Q, P, P[:1]), [[0, 1]], "k and v must have the same pages"),
}


@pytest.mark.parametrize("what", WRONG)
def test_error_messages(what):
    tensors, table, message = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=message):
        flash.flash_attn_varlen_func(*tensors, S, S, 5, 5, block_table=torch.tensor(table))
