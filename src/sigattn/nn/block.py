"""The transformer block, with the norm structures that the paper compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from sigattn.nn.attention import Attention
from sigattn.nn.norm import LayerScale, StochasticDepth
from sigattn.shapes import Float, Int

NormStructure = Literal["pre", "post", "hybrid"]


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on a residual branch f (practitioner's guide, App. G.5).

        pre      x + f(norm(x))
        hybrid   x + norm₂(f(norm₁(x))): the branch's output is normalised too, which keeps sigmoid attention without a
                 bias, or beyond 2048 tokens, from growing
        post     norm(x + f(x))

    f includes the output projection. LayerScale and stochastic depth come last on a branch.

    Args:
        attention, feed_forward: the layers, of the same width.
        width: features.
        structure: see above. With "post", sigmoid attention is hard to train (App. ASR): a warning says so.
        norm: makes a norm of a width; ``nn.RMSNorm`` with eps 1e-5 where it is None.
        branch_norm: the same for hybrid's second norm; where it is None, ``norm`` without parameters, as in the guide.
        layer_scale: where LayerScale's factors start; None for none.
        drop_branch: probability of dropping a branch for a sample, while training.

    Raises:
        ValueError: for an unknown structure.
    """

    def __init__(
        self,
        attention: Attention,
        feed_forward: nn.Module,
        width: int,
        *,
        structure: NormStructure = "pre",
        norm: Callable[[int], nn.Module] | None = None,
        branch_norm: Callable[[int], nn.Module] | None = None,
        layer_scale: float | None = None,
        drop_branch: float = 0.0,
    ) -> None:
        super().__init__()
        if structure not in ("pre", "post", "hybrid"):
            raise ValueError(f'structure must be "pre", "post" or "hybrid", got {structure!r}')
        if structure == "post" and attention.activation == "sigmoid":
            warnings.warn(
                "sigmoid attention in post-norm blocks is unstable or falls behind softmax (App. ASR of Ramapuram et "
                "al., 2025): prefer pre-norm with a bias of -log n, or hybrid-norm",
                stacklevel=2,
            )
        norm = rms_norm if norm is None else norm
        branch_norm = rms_norm_without_parameters if branch_norm is None else branch_norm
        self.structure = structure
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = norm(width), norm(width)
        self.attention_branch = _branch(branch_norm if structure == "hybrid" else None, width, layer_scale, drop_branch)
        self.feed_forward_branch = _branch(
            branch_norm if structure == "hybrid" else None, width, layer_scale, drop_branch
        )

    def forward(
        self, x: Float[Tensor, "batch length width"], key_lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        """One layer; key_lengths as in ``Attention``."""
        if self.structure == "post":
            x = self.attention_norm(x + self.attention_branch(self.attention(x, key_lengths=key_lengths)))
            result: Tensor = self.feed_forward_norm(x + self.feed_forward_branch(self.feed_forward(x)))
            return result
        attended = self.attention(self.attention_norm(x), key_lengths=key_lengths)
        x = x + self.attention_branch(attended)
        return x + self.feed_forward_branch(self.feed_forward(self.feed_forward_norm(x)))


def rms_norm(width: int) -> nn.Module:
    """RMSNorm with eps 1e-5, as in the paper's language models."""
    return nn.RMSNorm(width, eps=1e-5)


def rms_norm_without_parameters(width: int) -> nn.Module:
    """The same without a learned scale."""
    return nn.RMSNorm(width, eps=1e-5, elementwise_affine=False)


def layer_norm(width: int) -> nn.Module:
    """LayerNorm with eps 1e-6, as in vision transformers."""
    return nn.LayerNorm(width, eps=1e-6)


def _branch(
    norm: Callable[[int], nn.Module] | None, width: int, layer_scale: float | None, drop_branch: float
) -> nn.Module:
    """What a branch's output goes through before it is added."""
    parts: list[nn.Module] = [] if norm is None else [norm(width)]
    if layer_scale is not None:
        parts.append(LayerScale(width, layer_scale))
    if drop_branch:
        parts.append(StochasticDepth(drop_branch))
    return nn.Sequential(*parts)
