"""Performer: softmax attention approximated by positive orthogonal random features (Choromanski et al., 2021).

    e^(q·k) = E_ω [φ(q) φ(k)],  φ(x) = e^(ω·x - |x|²/2),  ω normal: so  softmax(Q Kᵀ) V ≈ φ(Q) (φ(K)ᵀ V) / φ(Q) Σ φ(K)

in time linear in the length. The paper compares it with sigmoid attention in Fig. "attention relaxations".
"""

import torch
from torch import Tensor, nn

from sigattn.ops.settings import without_autocast
from sigattn.shapes import Float, Int


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
        features, head_dim = self.directions.shape
        if self.directions.device.type == "meta":
            return
        # uniformly distributed rotations
        blocks = [nn.init.orthogonal_(torch.empty(head_dim, head_dim)) for _ in range(-(-features // head_dim))]
        lengths = torch.randn(features, head_dim).norm(dim=-1, keepdim=True)
        self.directions.copy_(torch.cat(blocks)[:features] * lengths)

    def forward(
        self,
        query: Float[Tensor, "batch heads queries head_dim"],
        key: Float[Tensor, "batch kv_heads keys head_dim"],
        value: Float[Tensor, "batch kv_heads keys value_dim"],
        key_lengths: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the attention output, computed in float32 or float64."""
        with without_autocast(query.device.type):
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
            if k.shape[2]:
                k = k - k.detach().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(wide).min)
            k = k.exp().repeat_interleave(group_size, 1)
            v = torch.cat([value.to(wide), value.new_ones((*value.shape[:-1], 1), dtype=wide)], -1)
            v = v.repeat_interleave(group_size, 1)  # (B, Hq, M, Dv + 1): the last column sums to the denominator
            numerator, denominator = (q @ (k.mT @ v)).split([value.shape[-1], 1], -1)
            return (numerator / denominator.masked_fill(denominator == 0, 1)).to(query.dtype)  # 0 without keys

    def _exponents(self, x: Tensor) -> Tensor:
        """Return log φ(x) = ω·x - |x|²/2."""
        return x @ self.directions.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2
