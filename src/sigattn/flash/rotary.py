"""Rotation of new queries and keys by flash-attn's tables of cosines and sines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.flash.packing import Tokens
from sigattn.ops import validation


class Rotary(NamedTuple):
    """Rotary tables of a call, as they were passed.

    Attributes:
        cos, sin: (positions, rotary_dim / 2), or both None.
        interleaved: True if features 2i and 2i + 1 are a pair; False for features i and i + rotary_dim / 2.
        seqlens: (B,) integers, position of each sample's first new query and key; None for the length of its cache.
    """

    cos: Any
    sin: Any
    interleaved: bool
    seqlens: Any = None

    def rotate(
        self, q: Tensor, k: Tensor, lengths: Tensor, of_q: Tokens | None, of_k: Tokens | None, *, same: bool
    ) -> tuple[Tensor, Tensor]:
        """Return q (B, N, Hq, D) and k (B, N_new, Hkv, D), or packed (total, 1, Hkv, D), rotated.

        Args:
            lengths: (B,), number of keys of each sample in the cache.
            of_q, of_k: tokens of packed queries, which have been padded, and of packed keys.
            same: True if all queries of a sample have the position of the first.

        Raises:
            ValueError, TypeError: tables that do not fit; on a CPU also for positions that they do not contain.
        """
        flash_validation.rotary("flash_attn_with_kvcache", self.cos, self.sin, q, k)
        starts = lengths if self.seqlens is None else self.seqlens
        steps = torch.arange(q.shape[1], device=starts.device) * (not same)
        if of_q is not None:
            steps = torch.minimum(steps, of_q.counts[:, None] - 1).clamp(min=0)
        of_queries = starts.long()[:, None] + steps  # (B, N)
        if of_k is None:
            of_keys = starts.long()[:, None] + torch.arange(k.shape[1], device=starts.device)  # (B, N_new)
        else:
            of_keys = (starts.long()[of_k.sample] + of_k.offset)[:, None]  # (total, 1)
        return self._rotated(q, of_queries), self._rotated(k, of_keys)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        reads_values = positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if reads_values and positions.numel() and not 0 <= positions.min() <= positions.max() < self.cos.shape[0]:
            raise ValueError(
                f"flash_attn_with_kvcache: rotary_cos does not contain the positions {int(positions.min())} … "
                f"{int(positions.max())}; got {validation.describe(rotary_cos=self.cos)}"
            )
        cos, sin = (t[positions].unsqueeze(2) for t in (self.cos, self.sin))  # (B, N, 1, rotary_dim / 2)
        rotary_dim = 2 * cos.shape[-1]
        rotated = rotate_pairs(x[..., :rotary_dim], cos, sin, interleaved=self.interleaved)
        return torch.cat((rotated, x[..., rotary_dim:]), -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return x (…, E) with pairs of features rotated by angles whose cosines and sines broadcast to (…, E / 2).

    A pair consists of the features 2i and 2i + 1 if ``interleaved``, else of i and i + E / 2. Computed in float32 or
    float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide, cos, sin = (t.to(wide) for t in (x, cos, sin))
    a, b = (x_wide[..., ::2], x_wide[..., 1::2]) if interleaved else x_wide.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return rotated.to(x.dtype)
