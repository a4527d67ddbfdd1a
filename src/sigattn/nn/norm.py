"""Norms, LayerScale and stochastic depth."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.shapes import Float

Norm = Literal["none", "rms", "layer"]


def make_norm(kind: Norm, dim: int, *, affine: bool = True, bias: bool = True) -> nn.Module:
    """Create a norm over the last axis.

    Args:
        kind: "rms" (eps 1e-5, as in the paper's language models), "layer" (eps 1e-6, as in vision transformers), or
            "none" (identity).
        dim: number of features.
        affine: True for a learned scale (and a learned bias, for "layer").
        bias: False for "layer" without its bias.

    Raises:
        ValueError: for another kind.
    """
    if kind == "rms":
        return RMSNorm(dim, eps=1e-5, elementwise_affine=affine)
    if kind == "layer":
        return LayerNorm(dim, eps=1e-6, elementwise_affine=affine, bias=bias)
    if kind == "none":
        return nn.Identity()
    raise ValueError(f'a norm must be "none", "rms" or "layer", got {kind!r}')


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with its scale cast to the input's dtype, so that it is one fused operation under autocast."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Divide by the root mean square of the features."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with its parameters cast to the input's dtype, as mixed-precision FSDP needs."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Subtract the mean of the features and divide by their standard deviation."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LayerScale(nn.Module):
    """Learned factor for each feature of a residual branch, small at first (Touvron et al., 2021).

    Args:
        dim: number of features.
        init_values: initial value of the factors; 1e-4 in the paper's vision and language models.
    """

    def __init__(self, dim: int, init_values: float = 1e-4) -> None:
        super().__init__()
        self.init_values = init_values
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factors to their initial value."""
        nn.init.constant_(self.weight, self.init_values)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Multiply each feature by its factor."""
        return x * self.weight


class DropPath(nn.Module):
    """Drop a residual branch for random samples while training, and scale it up for the others (Huang et al., 2016).

    Args:
        drop_prob: probability of dropping, in [0, 1).

    Raises:
        ValueError: if drop_prob is out of range.
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        if not 0 <= drop_prob < 1:
            raise ValueError(f"DropPath: drop_prob must lie in [0, 1), got {drop_prob}")
        self.drop_prob = drop_prob

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Return x (B, …) with some samples set to zero while training, and unchanged in evaluation."""
        if not self.training or not self.drop_prob:
            return x
        keep = torch.rand(len(x), *(1,) * (x.dim() - 1), device=x.device) >= self.drop_prob
        return x * keep / (1 - self.drop_prob)


class BatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` whose running statistics are updated with a given mean and variance."""

    @torch.no_grad()
    def update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics with the mean and the biased variance of ``count`` values for each channel."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class MaskedBatchNorm(BatchNorm):
    """Batch normalisation of padded sequences: padding counts neither in the mean nor in the variance."""

    def forward(
        self, x: Float[Tensor, "batch channels length"], valid: Tensor | None = None
    ) -> Float[Tensor, "batch channels length"]:
        """Normalise each channel.

        Args:
            x: padded sequences.
            valid: (B, 1, length) bool, False for padding; None if there is no padding.
        """
        if valid is None or not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # 16 bits cannot represent the number of frames
        count = valid.sum().clamp(min=1).to(wide.dtype)
        mean = (wide * valid).sum((0, 2)) / count  # (channels,)
        centred = (wide - mean[:, None]) * valid
        variance = centred.square().sum((0, 2)) / count
        self.update_running_stats(mean.detach(), variance.detach(), count)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale[:, None] + self.bias[:, None]).to(x.dtype)
