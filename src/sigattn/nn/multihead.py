"""``nn.MultiheadAttention`` with sigmoid attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.bias import AttentionBias
from sigattn.ops import reference
from sigattn.ops.attention import canonical, sigmoid_attention
from sigattn.ops.problem import log_length_bias


class SigmoidMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with sigmoid attention: the same parameters, arguments and results.

    A ``sigmoid_bias`` of None is -log of the keys that ``key_padding_mask`` leaves each sample. ``add_zero_attn``
    changes nothing, for a value of zero adds nothing to a sum.
    """

    sigmoid_bias: AttentionBias | None

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, which keeps PyTorch's fused encoder layer, a softmax, away."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; the weights, where they are needed, do not sum to 1."""
        alone = query.dim() == 2
        if alone:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(query, key, value)  # (B, H, N or M, D)
        mask = _joined(attn_mask, key_padding_mask, q, k.shape[2])
        causal = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        options: dict[str, Any] = {
            "attn_mask": None if causal else mask,  # which says the same, and costs more
            "is_causal": causal,
            "bias": self._bias(q, k, key_padding_mask),
        }
        out = sigmoid_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, **options)
        result: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        weights = None
        if need_weights:
            weights = reference.attention_weights(canonical(q, k, v, **options)).to(q.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        if alone:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        together: Tensor | None = self.in_proj_weight
        matrices: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if together is not None:
            matrices = together.chunk(3)
        offset: Tensor | None = self.in_proj_bias
        offsets: Any = (None,) * 3 if offset is None else offset.chunk(3)
        inputs = (query, key, value)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, matrices, offsets, strict=True))
        learned: tuple[Tensor | None, Tensor | None] = (self.bias_k, self.bias_v)
        if learned[0] is not None and learned[1] is not None:
            k, v = (torch.cat([t, b.expand(len(t), 1, -1)], 1) for t, b in ((k, learned[0]), (v, learned[1])))
        return [t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v)]

    def _bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> float | Tensor | None:
        lengths = None
        if padding is not None:
            hidden = padding if padding.dtype is torch.bool else padding == -torch.inf
            lengths = k.shape[2] - hidden.sum(-1)  # (B,)
        if self.sigmoid_bias is None:
            return None if lengths is None else log_length_bias(lengths.clamp(min=1)).view(-1, 1, 1, 1)
        if lengths is None:
            lengths = torch.full((len(q),), k.shape[2], device=q.device)
        return self.sigmoid_bias(q.shape[2], k.shape[2], lengths=lengths, device=q.device)


def _joined(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
    """Both masks of nn.MultiheadAttention (True = hidden, or added), as one of ``sigmoid_attention``: (B, H, N, M)."""
    parts = []
    if attn_mask is not None:
        parts.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (len(q), -1)))
    if padding is not None:
        parts.append(padding[:, None, None, :])
    parts = [F.pad(p, (0, keys - p.shape[-1])) for p in parts]  # a learned key is seen by all
    seen = [~p for p in parts if p.dtype is torch.bool]
    added = [p for p in parts if p.dtype is not torch.bool]
    visible = functools.reduce(torch.logical_and, seen) if seen else None
    if not added:
        return visible
    total: Tensor = functools.reduce(torch.add, added).to(q.dtype)
    return total if visible is None else total.masked_fill(~visible, -torch.inf)
