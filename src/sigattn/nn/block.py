"""Transformer block with the norm structures that the paper compares."""

from typing import Literal, get_args

from torch import Tensor, nn

from sigattn.nn.attention import Attention
from sigattn.nn.documents import Documents
from sigattn.nn.guide import warn_once
from sigattn.nn.kv_cache import KVCache
from sigattn.nn.norm import Norm, make_norm
from sigattn.nn.residual_branch import DropPath, LayerScale
from sigattn.shapes import Float, Int
from sigattn.validation import check_not_negative, check_probability

NormPlacement = Literal["pre", "post", "hybrid", "hybrid_attention"]


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a residual branch f (practitioner's guide, App. G.6).

    Placements of the norms::

        pre      x + f(norm(x))
        hybrid   x + norm₂(f(norm₁(x))): norm₂ bounds the outputs of sigmoid attention without a bias,
                 or beyond 2048 tokens
        hybrid_attention   hybrid for the attention, pre for the feed-forward layer: the paper's
                 speech models, where norm₂ replaces the attention's LayerScale
        post     norm(x + f(x))

    f includes the output projection. LayerScale, dropout and stochastic depth come last on a branch.

    Args:
        attention, feed_forward: the layers, of the same embed_dim.
        embed_dim: number of features.
        norm_placement: one of the above. "post" with sigmoid attention is hard to train (App. ASR) and gives a warning.
        norm: "rms" or "layer". init_values: initial value of LayerScale's factors; None for no LayerScale.
        dropout, drop_path: probabilities, while training, of dropping a feature of a branch, and a sample's branch.

    Raises:
        ValueError: for an unknown norm_placement, attention of another embed_dim, or a number out of its range.
    """

    def __init__(
        self, attention: Attention, feed_forward: nn.Module, embed_dim: int, *, norm_placement: NormPlacement = "pre",
        norm: Norm = "rms", init_values: float | None = None, dropout: float = 0.0, drop_path: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if norm_placement not in get_args(NormPlacement):
            raise ValueError(f"norm_placement must be one of {get_args(NormPlacement)}, got {norm_placement!r}")
        if attention.embed_dim != embed_dim:
            raise ValueError(f"Block: attention must have embed_dim={embed_dim}, got embed_dim={attention.embed_dim}")
        check_not_negative({"init_values": init_values})
        check_probability({"dropout": dropout, "drop_path": drop_path})
        if norm_placement == "post" and attention.activation == "sigmoid" and not attention.normalize:
            warn_once(
                "sigmoid attention in post-norm blocks is unstable or worse than softmax (App. ASR, results): use "
                "pre-norm with a bias of -log n, or hybrid-norm"
            )

        def branch(hybrid: bool, scale: float | None) -> nn.Module:
            """Return the layers between a branch's output and the residual sum."""
            parts: list[nn.Module] = [make_norm(norm, embed_dim, affine=False)] if hybrid else []
            parts += [] if scale is None else [LayerScale(embed_dim, scale)]
            parts += [nn.Dropout(dropout)] if dropout else []
            parts += [DropPath(drop_path)] if drop_path else []
            return nn.Sequential(*parts)

        self.norm_placement = norm_placement
        self.attention: Attention = attention
        self.feed_forward: nn.Module = feed_forward
        self.attention_norm: nn.Module = make_norm(norm, embed_dim)
        self.feed_forward_norm: nn.Module = make_norm(norm, embed_dim)
        attention_scale = None if norm_placement == "hybrid_attention" else init_values
        self.attention_branch: nn.Module = branch(norm_placement in ("hybrid", "hybrid_attention"), attention_scale)
        self.feed_forward_branch: nn.Module = branch(norm_placement == "hybrid", init_values)

    def extra_repr(self) -> str:
        return f"norm_placement={self.norm_placement!r}"

    def forward(
        self,
        x: Float[Tensor, "batch length embed_dim"],
        key_lengths: Int[Tensor, " batch"] | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Return the block's output; key_lengths, cache and documents are those of ``Attention``."""
        if self.norm_placement == "post":
            attended = self.attention(x, key_lengths=key_lengths, cache=cache, documents=documents)
            x = self.attention_norm(x + self.attention_branch(attended))
            return self.feed_forward_norm(x + self.feed_forward_branch(self.feed_forward(x)))
        normed = self.attention_norm(x)
        attended = self.attention(normed, key_lengths=key_lengths, cache=cache, documents=documents)
        x = x + self.attention_branch(attended)
        return x + self.feed_forward_branch(self.feed_forward(self.feed_forward_norm(x)))
