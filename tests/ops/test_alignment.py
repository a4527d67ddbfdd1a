"""Rows that start at multiples of 16 bytes and rows that do not: the kernels are specialised and support both."""

import pytest
import torch

from sigattn import flash, sigmoid_attention
from sigattn.ops.triton import kernel_args
from tests.ops.cases import device_of
from tests.ops.truth import assert_as_good_as_formula, formula

DEVICE = device_of("triton")


def laid_out(shape, steps, start, dtype):
    """Return random (B, H, N, D) with the given storage offset and strides of rows, heads and samples."""
    b, h, n, d = shape
    row, head, sample = steps
    memory = torch.randn(start + b * sample + h * head + n * row + d).to(dtype).to(DEVICE)
    return memory.as_strided(shape, (sample, head, row, 1), start)


@pytest.mark.parametrize(
    ("steps", "start", "dtype", "expected"),
    [
        ((24, 144, 288), 0, torch.bfloat16, 8),
        ((48, 24, 288), 8, torch.float16, 8),
        ((48, 24, 288), 4, torch.float16, 1),  # begins between multiples of 16 bytes
        ((28, 168, 336), 0, torch.bfloat16, 1),
        ((24, 148, 296), 0, torch.bfloat16, 1),
        ((28, 168, 336), 0, torch.float32, 4),
        ((26, 156, 312), 0, torch.float32, 1),
    ],
)
def test_results_for_all_strides(monkeypatch, steps, start, dtype, expected):
    """A kernel specialised for too large a divisor reads other rows: strides are rounded down to multiples of it."""
    units, run = [], kernel_args.unit
    monkeypatch.setattr(kernel_args, "unit", lambda *t: units.append(run(*t)) or units[-1])
    leaves = [laid_out((2, 2, 6, 24), steps, start, dtype).requires_grad_() for _ in range(3)]
    out = sigmoid_attention(*leaves, is_causal=True, backend="triton")
    grad = laid_out((2, 2, 6, 24), steps, start, dtype)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    assert units[0] == expected
    assert set(units) <= {expected, 1}

    def results(kind):
        given = [t.detach().cpu().to(kind).requires_grad_() for t in leaves]
        out = formula(*given, causal=True, **({} if kind == torch.float64 else {"dtype": dtype}))
        return out, *torch.autograd.grad(out, given, grad.cpu().to(out.dtype))

    for ours, truth, same in zip(found, results(torch.float64), results(dtype), strict=True):
        assert_as_good_as_formula(ours.detach().cpu(), truth.detach(), same.detach())


@pytest.mark.parametrize("steps", [(24, 144, 288), (28, 168, 336), (48, 24, 288)])
def test_a_cache(steps):
    """One query with keys and values of any strides."""
    q = torch.randn(2, 1, 2, 24, device=DEVICE).bfloat16()
    k, v = (laid_out((2, 2, 6, 24), steps, 0, torch.bfloat16).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([3, 6], dtype=torch.int32, device=DEVICE)
    results = [
        flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, sigmoid_bias=-1.0, backend=b)
        for b in ("triton", "blocked")
    ]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_packed_sequences():
    q = laid_out((1, 2, 9, 24), (48, 24, 432), 0, torch.float16)[0].transpose(0, 1)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    results = [
        flash.flash_attn_varlen_func(q, q, q, starts, starts, 5, 5, causal=True, backend=b)
        for b in ("triton", "blocked")
    ]
    assert kernel_args.unit(q) == 8
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)
