"""unpad_input, pad_input and index_first_axis: positions and gradients."""

import pytest
import torch

from sigattn.flash import index_first_axis, pad_input, unpad_input

LENGTHS = torch.tensor([3, 0, 5, 1])
MASK = torch.arange(5) < LENGTHS[:, None]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_round_trip(dtype):
    hidden = torch.randn(4, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(hidden, MASK.to(dtype))
    want = [hidden[b, i] for b in range(4) for i in range(5) if i < LENGTHS[b]]
    assert torch.equal(packed, torch.stack(want))
    assert cu_seqlens.tolist() == [0, 3, 3, 8, 9]
    assert cu_seqlens.dtype is torch.int32
    assert (longest, used.tolist()) == (5, [3, 0, 5, 1])
    padded = pad_input(packed, indices, 4, 5)
    assert torch.equal(padded, torch.where(MASK[..., None, None], hidden, 0))
    assert torch.equal(index_first_axis(hidden.flatten(0, 1), indices), packed)
    rows = torch.ones(3, requires_grad=True)
    index_first_axis(rows, torch.tensor([1, 1, 0])).sum().backward()
    assert rows.grad.tolist() == [1, 2, 0]
    grad = torch.randn_like(padded)
    (ours,) = torch.autograd.grad(padded, hidden, grad)
    assert torch.equal(ours, torch.where(MASK[..., None, None], grad, 0))


def test_a_mask_with_holes_and_unused_positions():
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]])
    packed, indices, cu_seqlens, longest, used = unpad_input(hidden, mask, unused)
    assert torch.equal(packed, torch.stack([hidden[0, 1], hidden[0, 2], hidden[0, 3], hidden[1, 0], hidden[1, 3]]))
    assert indices.tolist() == [1, 2, 3, 4, 7]
    assert cu_seqlens.tolist() == [0, 3, 5]
    assert (longest, used.tolist()) == (3, [2, 1])


def test_no_sequence():
    packed, indices, cu_seqlens, longest, used = unpad_input(torch.randn(0, 5, 3), torch.zeros(0, 5, dtype=torch.bool))
    assert (packed.shape, indices.shape, cu_seqlens.tolist(), longest, used.shape) == ((0, 3), (0,), [0], 0, (0,))
