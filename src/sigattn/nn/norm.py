"""Norms over the features of a position."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.shapes import Float

Norm = Literal["none", "rms", "layer"]


def make_norm(kind: Norm, dim: int, *, affine: bool = True, bias: bool = True) -> nn.Module:
    """Create a norm over the last axis.

    Args:
        kind: "rms" (eps 1e-5, as in the paper's language models), "layer" (eps 1e-6, as in vision transformers), or
            "none" (identity).
        dim: number of features. affine: True for a learned scale (and a learned bias, for "layer").
        bias: False for "layer" without its bias.
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

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with its parameters cast to the input's dtype, as mixed-precision FSDP needs."""

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
