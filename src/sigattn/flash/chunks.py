"""Masks of chunked local attention (``attention_chunk`` of flash-attn 3): a query sees keys of its own chunk only.

Positions are divided into chunks of equal length, from a sequence's first key on. The last query is aligned with the
last key.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense(n: int, m: int, chunk: int, device: torch.device) -> Tensor:  # (N, M)
    """Return the mask of N queries and M keys, True if both are in one chunk."""
    return _same_chunk(torch.arange(m - n, m, device=device), torch.arange(m, device=device), chunk)


def packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: tuple[int, int], chunk: int) -> Tensor:
    """Return the masks (B, 1, max_seqlen_q, max_seqlen_k) of packed sequences, counted from the first of each."""
    query_positions, key_positions = (torch.arange(size, device=cu_seqlens_q.device) for size in longest)
    shift = cu_seqlens_k.diff().long() - cu_seqlens_q.diff().long()
    return _same_chunk(query_positions + shift[:, None], key_positions.expand(shift.shape[0], -1), chunk).unsqueeze(1)


def cached(lengths: Tensor, first: Tensor | None, ends: Tensor, n: int, capacity: int, chunk: int) -> Tensor:
    """Return the masks (B, 1, N, capacity) of queries against a cache, of the last ``capacity`` keys of each sample.

    Args:
        lengths: (B,), end of each sample's keys.
        first: (B,), start of each sample's keys and of its first chunk; None for 0.
        ends: (B,), position of each sample's last query, plus 1.
    """
    begin = (torch.zeros_like(lengths) if first is None else first).long()[:, None]
    key_positions = lengths.long()[:, None] - capacity + torch.arange(capacity, device=lengths.device) - begin
    query_positions = ends.long()[:, None] - n + torch.arange(n, device=lengths.device) - begin
    return _same_chunk(query_positions, key_positions, chunk).unsqueeze(1)


def start(lengths: Tensor, first: Tensor | None, chunk: int) -> Tensor:  # (B,)
    """Return the start of the chunk of each sample's last key; arguments as in ``ops.kvcache``."""
    begin = torch.zeros_like(lengths) if first is None else first
    position = (lengths - 1 - begin).clamp(min=0)
    return begin + position - position % chunk


def combined(chunks: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the intersection of two masks, with the gradient of a floating-point ``attn_mask``."""
    if attn_mask is None:
        return chunks
    return attn_mask & chunks if attn_mask.dtype is torch.bool else attn_mask.masked_fill(~chunks, -torch.inf)


def _same_chunk(query_positions: Tensor, key_positions: Tensor, chunk: int) -> Tensor:  # (…, N), (…, M) → (…, N, M)
    of_query, of_key = (torch.div(t, chunk, rounding_mode="floor") for t in (query_positions, key_positions))
    return of_query.unsqueeze(-1) == of_key.unsqueeze(-2)
