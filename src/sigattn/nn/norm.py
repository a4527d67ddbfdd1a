"""Norms, and what else is put around a residual branch to keep it small: LayerScale, and dropping whole branches."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.shapes import Float

Norm = Literal["none", "rms", "layer"]


def make_norm(kind: Norm, width: int, *, affine: bool = True, bias: bool = True) -> nn.Module:
    """A norm over the last axis.

    Args:
        kind: "rms" (eps 1e-5, as in the paper's language models), "layer" (eps 1e-6, as in vision transformers), or
            "none".
        width: features.
        affine: whether it has a learned scale (and a learned offset, for "layer").
        bias: whether "layer" has the offset.

    Raises:
        ValueError: for another kind.
    """
    if kind == "rms":
        return RMSNorm(width, eps=1e-5, elementwise_affine=affine)
    if kind == "layer":
        return LayerNorm(width, eps=1e-6, elementwise_affine=affine, bias=bias)
    if kind == "none":
        return nn.Identity()
    raise ValueError(f'a norm must be "none", "rms" or "layer", got {kind!r}')


class RMSNorm(nn.RMSNorm):
    """PyTorch's, with its scale in the input's dtype: so that it stays one fused operation under autocast."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Divide by the root mean square of the features."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """PyTorch's, with scale and offset in the input's dtype: weights that FSDP gathered in 16 bits serve as well."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Subtract the mean of the features and divide by their standard deviation."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LayerScale(nn.Module):
    """A learned factor for each feature of a residual branch, small at first (Touvron et al., 2021).

    Args:
        width: features.
        initial: where the factors start: 1e-4 in the paper's vision and language models.
    """

    def __init__(self, width: int, initial: float = 1e-4) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to where they start."""
        nn.init.constant_(self.weight, self.initial)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Scale."""
        return x * self.weight


class StochasticDepth(nn.Module):
    """While training, drop a residual branch for whole samples, and scale it up for the others (Huang et al., 2016).

    Args:
        probability: of dropping, in [0, 1).

    Raises:
        ValueError: if the probability is out of range.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"StochasticDepth: the probability must lie in [0, 1), got {probability}")
        self.probability = probability

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Zero for some samples, or unchanged when not training: (B, …)."""
        if not self.training or not self.probability:
            return x
        keep = torch.rand(len(x), *(1,) * (x.dim() - 1), device=x.device) >= self.probability
        return x * keep / (1 - self.probability)


class BatchNorm(nn.BatchNorm1d):
    """PyTorch's, for those that find mean and variance in another way."""

    @torch.no_grad()
    def remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics; the variance is the unbiased one, as PyTorch's."""
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
        """Normalise.

        Args:
            x: padded sequences.
            valid: (B, 1, length) bool, what is no padding; None if there is none.
        """
        if valid is None or not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # 16 bits cannot even count the frames
        count = valid.sum().clamp(min=1).to(wide.dtype)
        mean = (wide * valid).sum((0, 2)) / count  # (channels,)
        centred = (wide - mean[:, None]) * valid
        variance = centred.square().sum((0, 2)) / count
        self.remember(mean.detach(), variance.detach(), count)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale[:, None] + self.bias[:, None]).to(x.dtype)
