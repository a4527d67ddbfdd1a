"""Multi-head self-attention with a sigmoid or a softmax, QK-norm and RoPE."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.position import RotaryEmbedding
from sigattn.ops.attention import sigmoid_attention
from sigattn.shapes import Float

Activation = Literal["sigmoid", "softmax"]


class Attention(nn.Module):
    """Causal self-attention, ``activation(Q Kᵀ / √d + b) V``, between an input and an output projection.

    Args:
        width: features of the input and the output; a multiple of heads.
        heads: number of heads.
        activation: "sigmoid" (this library's operator) or "softmax" (PyTorch's).
        bias: the sigmoid's b, the same at every length, so that a cache or a short prompt changes nothing; the paper's
            choice is -log of the context length (``log_length_bias``). Must be None under softmax, which ignores it.
        qk_norm: RMSNorm over each head of Q and of K, before the positions are turned in (Sect. 5).

    Attributes:
        output_norm: with ``watch`` set, the Frobenius norm of the last forward's attention output, before the output
            projection, averaged over the batch: what the paper's Figs. 4-7 plot.

    Raises:
        ValueError: if width is not a multiple of heads, or bias does not suit the activation.
    """

    def __init__(
        self, width: int, heads: int, *, activation: Activation, bias: float | None, qk_norm: bool = True
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
        if (activation == "sigmoid") == (bias is None):
            raise ValueError(f"a sigmoid needs a bias (0.0 for none) and a softmax has none, got {activation}, {bias=}")
        self.heads, self.activation, self.bias = heads, activation, bias
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        head_dim = width // heads
        self.query_norm = nn.RMSNorm(head_dim, eps=1e-5) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(head_dim, eps=1e-5) if qk_norm else nn.Identity()
        self.rotary = RotaryEmbedding(head_dim)
        self.watch = False
        self.output_norm: Tensor | None = None

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """Attend."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head_dim)
        query, key = self.rotary(self.query_norm(query)), self.rotary(self.key_norm(key))
        if self.activation == "sigmoid":
            out = sigmoid_attention(query, key, value, is_causal=True, bias=self.bias)
        else:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.watch:
            self.output_norm = torch.linalg.vector_norm(out.detach().float(), dim=(1, 2, 3)).mean()
        result: Tensor = self.output(out.transpose(1, 2).reshape(batch, length, -1))
        return result
