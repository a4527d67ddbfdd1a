"""Masks in sigattn.flash: trees of draft tokens, dense, packed and with a cache; invalid masks."""

import pytest
import torch

from sigattn import flash
from sigattn.ops.kvcache import KV_CACHE
from tests.ops.cases import device_of
from tests.ops.truth import formula

PARENTS = [-1, 0, 0, 1, 1, 2]  # of each draft token: a tree of six


def ancestors():
    """Return the mask that is True where a draft token is the row's own or an ancestor."""
    visible = torch.eye(len(PARENTS), dtype=torch.bool)
    for token, parent in enumerate(PARENTS):
        if parent >= 0:
            visible[token] |= visible[parent]
    return visible


@pytest.mark.parametrize("backend", list(KV_CACHE.backends))
def test_a_tree_of_draft_tokens(backend):
    """Six draft tokens after 9 and 4 accepted ones: the dense, packed and cached functions agree."""
    device, tree, held = device_of(backend), ancestors(), [9, 4]
    n, longest = len(PARENTS), max(held) + len(PARENTS)
    q = torch.randn(2, n, 4, 16, device=device)
    k, v = torch.randn(2, 2, longest, 2, 16, device=device).unbind()
    expected = []
    for b, length in enumerate(held):
        mask = torch.cat([torch.ones(n, length, dtype=torch.bool), tree], 1)
        parts = [t[b, : length + n].cpu().transpose(0, 1)[None] for t in (k, v)]
        expected.append(formula(q[b].cpu().transpose(0, 1)[None], *parts, mask=mask, bias=-2.0)[0].transpose(0, 1))
    expected = torch.stack(expected).float()
    options = {"sigmoid_bias": -2.0, "backend": backend}

    caches = [torch.full((2, 32, 2, 16), torch.nan, device=device) for _ in range(2)]
    new = []
    for cache, t in zip(caches, (k, v), strict=True):
        for b, length in enumerate(held):
            cache[b, :length] = t[b, :length]
        new.append(torch.stack([t[b, length : length + n] for b, length in enumerate(held)]))
    lengths = torch.tensor(held, dtype=torch.int32, device=device)
    out = flash.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, attn_mask=tree.to(device), **options)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)

    padded = torch.zeros(2, 1, n, longest, dtype=torch.bool)
    for b, length in enumerate(held):
        padded[b, 0, :, :length] = True
        padded[b, 0, :, length : length + n] = tree
    packed_k, packed_v = (torch.cat([t[b, : length + n] for b, length in enumerate(held)]) for t in (k, v))
    starts = [torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, n, 2 * n], [0, 15, 25])]
    out = flash.flash_attn_varlen_func(
        q.flatten(0, 1), packed_k, packed_v, *starts, n, longest, attn_mask=padded.to(device), **options
    )
    torch.testing.assert_close(out.view_as(q).cpu(), expected, rtol=1e-4, atol=1e-5)

    out = flash.flash_attn_func(q, k, v, attn_mask=padded.to(device), **options)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


Q, P, S = torch.randn(2, 5, 4, 8), torch.randn(10, 4, 8), torch.tensor([0, 5, 10])


@pytest.mark.parametrize("mask", [torch.ones(5, 6, dtype=torch.bool), torch.ones(3, 1, 5, 5), torch.ones(1, 2, 5, 5)])
def test_a_mask_of_the_wrong_shape_raises(mask):
    with pytest.raises(ValueError, match=r"flash_attn_func: attn_mask does not broadcast to .* = \(2, 4, 5, 5\)"):
        flash.flash_attn_func(Q, Q, Q, attn_mask=mask)
    with pytest.raises(ValueError, match="flash_attn_varlen_func: attn_mask does not broadcast"):
        flash.flash_attn_varlen_func(P, P, P, S, S, 5, 5, attn_mask=mask)


def test_masks_of_the_wrong_type_or_rank_raise():
    integers = torch.ones(5, 5, dtype=torch.int64)
    for call in (
        lambda mask: flash.flash_attn_func(Q, Q, Q, attn_mask=mask),
        lambda mask: flash.flash_attn_varlen_func(P, P, P, S, S, 5, 5, attn_mask=mask),
        lambda mask: flash.flash_attn_with_kvcache(Q, Q, Q, sigmoid_bias=-1.0, attn_mask=mask),
    ):
        with pytest.raises(TypeError, match="attn_mask must be a tensor, bool"):
            call(integers)
        with pytest.raises(TypeError, match="attn_mask must be a tensor, bool"):
            call([[True]])
    with pytest.raises(ValueError, match="attn_mask does not broadcast"):
        flash.flash_attn_with_kvcache(Q, Q, Q, sigmoid_bias=-1.0, attn_mask=torch.tensor(True))
    with pytest.raises(ValueError, match="attn_mask does not broadcast"):
        flash.flash_attn_with_kvcache(Q, Q, Q, sigmoid_bias=-1.0, attn_mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="has no gradient"):
        flash.flash_attn_with_kvcache(Q, Q, Q, sigmoid_bias=-1.0, attn_mask=torch.ones(5, 5, requires_grad=True))
