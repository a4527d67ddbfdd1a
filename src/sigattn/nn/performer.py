"""Performer: softmax attention approximated by positive orthogonal random features (Choromanski et al., 2021).

    e^(q·k) = E_ω [φ(q) φ(k)],  φ(x) = e^(ω·x - |x|²/2),  ω normal: so  softmax(Q Kᵀ) V ≈ φ(Q) (φ(K)ᵀ V) / φ(Q) Σ φ(K)

in time linear in the length. The paper compares it with sigmoid attention in Fig. "attention relaxations".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.shapes import Float, Int

CHUNK = 256  # queries per step under a causal mask


class PerformerFeatures(nn.Module):
    """Performer attention with random directions ω: blocks of orthogonal rows with the lengths of normal vectors.

    The directions are drawn once, saved with the model, and not trained.

    Args:
        head_dim: number of features per head.
        features: number of directions; more of them approximate softmax better.

    Raises:
        ValueError: if features is less than 1.
    """

    directions: Tensor

    def __init__(self, head_dim: int, features: int) -> None:
        super().__init__()
        if features < 1:
            raise ValueError(f"PerformerFeatures needs at least one direction, got {features}")
        self.register_buffer("directions", torch.empty(features, head_dim))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return "head_dim={1}, features={0}".format(*self.directions.shape)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new directions."""
        features, head_dim = self.directions.shape
        if self.directions.device.type == "meta":
            return
        blocks = [_random_rotation(head_dim) for _ in range(-(-features // head_dim))]
        lengths = torch.randn(features, head_dim).norm(dim=-1, keepdim=True)
        self.directions.copy_(torch.cat(blocks)[:features] * lengths)

    def forward(
        self,
        query: Float[Tensor, "batch heads queries head_dim"],
        key: Float[Tensor, "batch kv_heads keys head_dim"],
        value: Float[Tensor, "batch kv_heads keys value_dim"],
        *,
        causal: bool,
        key_lengths: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the attention output, computed in float32 or float64; query i sees keys j ≤ i if causal."""
        with torch.autocast(query.device.type, enabled=False):
            return self._attend(query, key, value, causal, key_lengths)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, key_lengths: Tensor | None
    ) -> Tensor:  # (B, Hq, N, Dv)
        wide = torch.promote_types(query.dtype, torch.float32)
        group_size = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.25  # on Q and on K, together 1/√D
        q = self._exponents(query.to(wide) * scale)  # (B, Hq, N, F)
        k = self._exponents(key.to(wide) * scale)  # (B, Hkv, M, F)
        if key_lengths is not None:
            exists = torch.arange(k.shape[2], device=k.device) < key_lengths[:, None].to(k.device)  # (B, M)
            k = k.masked_fill(~exists[:, None, :, None], -torch.inf)
            value = value.masked_fill(~exists[:, None, :, None], 0)
        # subtracting the maximum avoids overflow; the factor cancels in the quotient
        q = (q - q.amax(-1, keepdim=True)).exp()
        k = k.repeat_interleave(group_size, 1)
        v = torch.cat([value.to(wide), value.new_ones((*value.shape[:-1], 1), dtype=wide)], -1)
        v = v.repeat_interleave(group_size, 1)  # (B, Hq, M, Dv + 1): the last column sums to the denominator
        largest = k.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)  # (B, Hq, M, 1)
        if not causal and k.shape[2]:
            largest = largest.amax(-2, keepdim=True)
        k = (k - largest).exp()
        out = _causal(q, k, v, largest.mT) if causal else q @ (k.mT @ v)
        numerator, denominator = out.split([value.shape[-1], 1], -1)
        return (numerator / denominator.masked_fill(denominator == 0, 1)).to(query.dtype)  # 0 without keys

    def _exponents(self, x: Tensor) -> Tensor:
        """Return log φ(x) = ω·x - |x|²/2."""
        return x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def _random_rotation(dim: int) -> Tensor:
    """Return a uniformly distributed orthogonal matrix."""
    q, r = torch.linalg.qr(torch.randn(dim, dim))
    return q * r.diagonal().sign()  # the signs of q alone are those of LAPACK's algorithm: q[0, 0] is never positive


def _causal(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor) -> Tensor:
    """Return Σ_{j ≤ i} e^(s_j - m_i) (q_i · k_j) v_j for s = ``log_scale``, (B, H, 1, M), and m_i = max_{j ≤ i} s_j.

    Chunk by chunk; an exported program has one chunk, because their number would fix the length in it.
    """
    sums = _EarlierKeys(
        k.new_zeros((*k.shape[:2], k.shape[-1], v.shape[-1])),
        k.new_full((*k.shape[:2], 1, 1), torch.finfo(k.dtype).min),
    )
    if torch.compiler.is_exporting():
        return _attend_chunk(sums, q, k, v, log_scale)[0]
    out = []
    for start in range(0, q.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        part, sums = _attend_chunk(sums, q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], log_scale[..., chunk])
        out.append(part)
    return torch.cat(out, 2) if out else v.new_zeros(q.shape[:3] + v.shape[-1:])


class _EarlierKeys(NamedTuple):
    """Sum Σ_j e^(s_j - m) k_j v_jᵀ over the keys of the earlier chunks, (B, H, F, Dv + 1), and their largest s, m.

    With one m for all queries, the sums of those whose keys all lie far below it would underflow to 0.
    """

    sum: Tensor
    largest: Tensor  # (B, H, 1, 1)


def _attend_chunk(
    earlier: _EarlierKeys, q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor
) -> tuple[Tensor, _EarlierKeys]:
    """Return the output of a chunk's queries, and the sum over its keys and the earlier ones."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scales = torch.cat([earlier.largest, log_scale], -1)
    seen = scales.masked_fill(F.pad(hidden, (1, 0)), -torch.inf)
    factors = (seen - seen.amax(-1, keepdim=True)).exp()  # (B, H, chunk, 1 + chunk), first that of the earlier keys
    out = (q @ k.mT * factors[..., 1:]) @ v + q @ earlier.sum * factors[..., :1]
    largest = scales.amax(-1, keepdim=True)
    total = earlier.sum * (earlier.largest - largest).exp() + (k * (log_scale - largest).exp().mT).mT @ v
    return out, _EarlierKeys(total, largest)
