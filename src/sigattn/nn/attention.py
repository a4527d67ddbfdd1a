"""Multi-head attention with a sigmoid or a softmax, and what makes it train (Sect. 5)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.bias import AttentionBias, as_bias
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.ops.attention import sigmoid_attention
from sigattn.shapes import Float, Int

Activation = Literal["sigmoid", "softmax"]
QKNorm = Literal["none", "rms", "layer"]


class Attention(nn.Module):
    """Self- or cross-attention, ``activation(Q Kᵀ / √d + b) V``, between an input and an output projection.

    Args:
        width: features of the input and the output; a multiple of heads.
        heads: number of query heads.
        activation: "sigmoid" (this library's operator) or "softmax" (PyTorch's).
        bias: the sigmoid's b, a number or one of ``sigattn.nn.bias``; None under softmax, which ignores it.
        kv_heads: number of key and value heads, of which heads is a multiple; None for as many.
        qk_norm: over each head of Q and of K, before positions: "rms", "layer" (both with a learned scale) or "none".
        position: ``RotaryEmbedding`` of width / heads, ``Alibi`` of heads, or None.
        causal: whether a query sees no later key.
        window: how many keys before itself a query sees at most, and as many after it where not causal; None for all.
        dropout: of weights, while training.
        source_width: features of the source of keys and values, for cross-attention; None for width.

    Attributes:
        output_norm: with ``watch`` set, the Frobenius norm of the last forward's attention output, before the output
            projection, averaged over the batch: what the paper's Figs. 4-7 plot.

    Raises:
        ValueError: if width, heads and kv_heads do not divide, or bias does not suit the activation or causality.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        activation: Activation,
        bias: AttentionBias | float | None,
        kv_heads: int | None = None,
        qk_norm: QKNorm = "rms",
        position: RotaryEmbedding | Alibi | None = None,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        source_width: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads}, kv_heads={kv_heads}")
        if (activation == "sigmoid") == (bias is None):
            raise ValueError(f"a sigmoid needs a bias (0.0 for none) and a softmax has none, got {activation}, {bias=}")
        self.bias = None if bias is None else as_bias(bias)
        if self.bias is not None and self.bias.needs_causal and not causal:
            raise ValueError(f"{type(self.bias).__name__} counts the keys before a query: it needs causal=True")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.activation, self.causal, self.window, self.dropout = activation, causal, window, dropout
        source_width = width if source_width is None else source_width
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(source_width, 2 * kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.query_norm, self.key_norm = _norm(qk_norm, self.head_dim), _norm(qk_norm, self.head_dim)
        self.position = position
        self.watch = False
        self.output_norm: Tensor | None = None

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        source: Float[Tensor, "batch keys source_width"] | None = None,
        key_lengths: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """Attend.

        Args:
            x: where queries come from, and keys and values if there is no source.
            source: where keys and values come from, in cross-attention.
            key_lengths: how many keys each padded sample has.
        """
        batch, length, _ = x.shape
        source = x if source is None else source
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, Hq, N, D)
        key, value = self.key_value(source).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = self.query_norm(query), self.key_norm(key)  # key, value: (B, Hkv, M, D)
        if isinstance(self.position, RotaryEmbedding):
            query, key = self.position(query), self.position(key)
        attend = self._sigmoid if self.activation == "sigmoid" else self._softmax
        out = attend(query, key, value, key_lengths)
        if self.watch:
            self.output_norm = torch.linalg.vector_norm(out.detach().float(), dim=(1, 2, 3)).mean()
        result: Tensor = self.output(out.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _sigmoid(self, query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None) -> Tensor:
        assert self.bias is not None
        bias = self.bias(query.shape[2], key.shape[2], lengths=key_lengths, device=query.device)
        return sigmoid_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.kv_heads != self.heads,
            bias=bias,
            window=None if self.window is None else (self.window, self.window),
            alibi_slopes=self.position() if isinstance(self.position, Alibi) else None,
            key_lengths=key_lengths,
        )

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None) -> Tensor:
        mask = self._softmax_mask(query, key, key_lengths)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            enable_gqa=self.kv_heads != self.heads,
        )

    def _softmax_mask(self, query: Tensor, key: Tensor, key_lengths: Tensor | None) -> Tensor | None:
        """What SDPA's own ``is_causal`` cannot say: windows, padding and ALiBi; broadcastable to (B, Hq, N, M)."""
        alibi = isinstance(self.position, Alibi)
        if self.window is None and key_lengths is None and not alibi:
            return None
        i = torch.arange(query.shape[2], device=query.device).unsqueeze(1)
        j = torch.arange(key.shape[2], device=query.device)
        seen = (j <= i) if self.causal else torch.ones_like(j <= i)
        if self.window is not None:
            seen = seen & ((i - j).abs() <= self.window)
        if key_lengths is not None:
            seen = seen & (j < key_lengths.view(-1, 1, 1, 1))
        if not isinstance(self.position, Alibi):
            return seen
        slopes = self.position()
        slopes = slopes if slopes.dim() == 3 else slopes.view(1, -1, 1).expand(1, -1, 2)
        before, after = slopes.unflatten(-1, (2, 1, 1)).unbind(2)  # (1, Hq, 1, 1)
        penalty = torch.where(j < i, before, after) * (i - j).abs()
        return (-penalty).masked_fill(~seen, -torch.inf).to(query.dtype)


def _norm(kind: QKNorm, head_dim: int) -> nn.Module:
    if kind == "rms":
        return nn.RMSNorm(head_dim, eps=1e-5)
    if kind == "layer":
        return nn.LayerNorm(head_dim, eps=1e-6, bias=False)
    if kind == "none":
        return nn.Identity()
    raise ValueError(f'qk_norm must be "none", "rms" or "layer", got {kind!r}')
