"""Sigmoid attention in timm's vision transformers: a class to pass as ``attn_layer``.

    from sigattn.integrations.timm import attention_layer
    model = timm.create_model("vit_base_patch16_224", attn_layer=attention_layer(), qk_norm=True, init_values=1e-4,
                              class_token=False, global_pool="avg")

On ``vit_*``, ``deit3_*``, ``naflexvit_*`` and others that take ``attn_layer``. Parameters have timm's names, so weights
that timm trained can be loaded (and must be trained further: the function is another one). The practitioner's guide
(App. G.5) for supervised vision: QK-norm, LayerScale 1e-4, no bias, global average pooling.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from timm.layers import Attention
from torch import Tensor, nn

from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.problem import log_length_bias

OutputNorm = Literal["none", "hybrid"]


def attention_layer(
    bias: float | Literal["log_visible"] = "log_visible", output_norm: OutputNorm = "none"
) -> type[Attention]:
    """A class for timm's ``attn_layer``. (timm asks for a class: a ``functools.partial`` would not do.)

    Args:
        bias: b: a number (0.0 for none, as the guide has it for vision), or "log_visible": -log of the number of tokens
            that a query sees, padding (naflexvit) left out.
        output_norm: "hybrid": a LayerNorm without parameters after the output projection (hybrid-norm, App. G.3).

    Raises:
        ValueError: for something else.
    """
    number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
    if not (number or bias == "log_visible") or output_norm not in ("none", "hybrid"):
        raise ValueError(
            'attention_layer: bias must be a number or "log_visible", and output_norm "none" or "hybrid"; got '
            f"{bias!r}, {output_norm!r}"
        )

    class SigmoidAttention(Attention):
        sigmoid_bias = bias

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            width = self.proj.out_features
            self.branch_norm: nn.Module = nn.Identity()
            if output_norm == "hybrid":
                self.branch_norm = nn.LayerNorm(width, elementwise_affine=False)

        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            return _forward(self, x, attn_mask, is_causal)

    return SigmoidAttention


def _forward(layer: Any, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """(B, N, width) → (B, N, width), as timm's own layer but for the attention."""
    batch, length, _ = x.shape
    qkv = layer.qkv(x).reshape(batch, length, 3, layer.num_heads, layer.head_dim).permute(2, 0, 3, 1, 4)
    query, key, value = qkv.unbind(0)  # (B, H, N, D) each
    query, key = layer.q_norm(query), layer.k_norm(key)
    bias = layer.sigmoid_bias
    if bias == "log_visible":
        bias = _log_visible(query, attn_mask, is_causal)
    dropout = layer.attn_drop.p if layer.training else 0.0
    out = sigmoid_attention(query, key, value, attn_mask, dropout, is_causal, bias=bias)
    out = layer.norm(out.transpose(1, 2).reshape(batch, length, layer.attn_dim))
    if layer.gate is not None:
        out = out * layer.gate(x).sigmoid()
    result: Tensor = layer.branch_norm(layer.proj_drop(layer.proj(out)))
    return result


def _log_visible(query: Tensor, mask: Tensor | None, is_causal: bool) -> float | Tensor:
    """A number, or (B or 1, H or 1, N or 1, 1)."""
    length = query.shape[2]
    if mask is None:
        if not is_causal:
            return log_length_bias(length)
        return log_length_bias(torch.arange(1, length + 1, device=query.device)).unsqueeze(-1)
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if is_causal:
        seen = seen & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    return log_length_bias(seen.sum(-1, keepdim=True).clamp(min=1))
