"""Rows that start at multiples of 16 bytes and rows that do not: the kernels are specialised and support both."""

import pytest
import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from tests.ops.cases import device_of


def laid_out(strides, dtype, shape=(1, 2, 6, 24)):
    """Return random (B, H, N, D) with the given strides of rows, heads and samples."""
    row, head, sample = strides
    memory = torch.randn(shape[0] * sample + shape[1] * head + shape[2] * row).to(dtype)
    return memory.to(device_of("triton")).as_strided(shape, (sample, head, row, 1))


@pytest.mark.parametrize(("strides", "dtype"), [((28, 168, 336), torch.bfloat16), ((26, 156, 312), torch.float32)])
def test_rows_may_have_any_strides(strides, dtype):
    """A kernel specialised for too large a divisor reads other rows: strides are rounded down to multiples of it."""
    q, k, v, grad = (laid_out(strides, dtype) for _ in range(4))
    lengths, starts = (torch.tensor(t, device=q.device) for t in ([5], [0, 4, 6]))

    def results(backend, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = sigmoid_attention(*leaves, is_causal=True, backend=backend)
        yield from (out, *torch.autograd.grad(out, leaves, tensors[3]))
        query, *cache = (t.transpose(1, 2) for t in tensors[:3])
        yield sigmoid_kvcache_attention(query[:, :1], *cache, bias=-1.0, cache_seqlens=lengths, backend=backend)
        packed = (t[0].transpose(0, 1) for t in tensors[:3])
        yield sigmoid_varlen_attention(*packed, starts, starts, 4, 4, is_causal=True, backend=backend)

    tolerance = 8 * torch.finfo(dtype).eps
    contiguous = (t.float().contiguous() for t in (q, k, v, grad))
    for ours, expected in zip(results("triton", q, k, v, grad), results("blocked", *contiguous), strict=True):
        torch.testing.assert_close(ours.float(), expected, rtol=tolerance, atol=tolerance)
