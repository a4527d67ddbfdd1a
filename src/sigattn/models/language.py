"""A decoder-only language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.attention import Activation, Attention
from sigattn.nn.block import Block, NormStructure
from sigattn.nn.feedforward import SwiGLU
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.ops.problem import log_length_bias
from sigattn.shapes import Float, Int

Position = Literal["rope", "alibi", "none"]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Size and kind of a language model.

    Attributes:
        vocabulary: number of tokens; 256 for bytes.
        context: the longest sequence.
        layers, width, heads: of the transformer. The feed-forward layers are 8/3 as wide, rounded up to 32.
        activation: "sigmoid" or "softmax".
        bias: the sigmoid's b; "log_length" is the paper's -log(context), a number is itself (0.0 for none).
        qk_norm: RMSNorm over each head of Q and K.
        kv_heads: number of key and value heads; None for as many as heads.
        position: "rope", "alibi" or "none".
        structure: where norms stand, "pre", "hybrid" or "post" (``sigattn.nn.block``).
    """

    vocabulary: int = 256
    context: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    activation: Activation = "sigmoid"
    bias: float | str = "log_length"
    qk_norm: bool = True
    kv_heads: int | None = None
    position: Position = "rope"
    structure: NormStructure = "pre"

    def attention_bias(self) -> float | None:
        """The number b that every layer uses; None under softmax."""
        if self.activation == "softmax":
            return None
        if isinstance(self.bias, str):
            if self.bias != "log_length":
                raise ValueError(f'bias must be a number or "log_length", got {self.bias!r}')
            return log_length_bias(self.context)
        return self.bias

    def block(self) -> Block:
        """One layer, its weights not yet drawn."""
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")
        head_dim = self.width // self.heads
        encodings: dict[str, Callable[[], RotaryEmbedding | Alibi | None]] = {
            "rope": lambda: RotaryEmbedding(head_dim),
            "alibi": lambda: Alibi(self.heads),
            "none": lambda: None,
        }
        if self.position not in encodings:
            raise ValueError(f"position must be one of {', '.join(map(repr, encodings))}, got {self.position!r}")
        attention = Attention(
            self.width,
            self.heads,
            activation=self.activation,
            bias=self.attention_bias(),
            kv_heads=self.kv_heads,
            qk_norm="rms" if self.qk_norm else "none",
            position=encodings[self.position](),
        )
        hidden = 32 * math.ceil(self.width * 8 / 3 / 32)
        return Block(attention, SwiGLU(self.width, hidden), self.width, structure=self.structure)


class LanguageModel(nn.Module):
    """Token embedding, blocks of causal attention and SwiGLU, RMSNorm, and an output tied to the embedding.

    Weights start normal with variance 1 / fan-in, the embedding with variance 1 / width, as in the paper's language
    models (docs/paper-notes.md).
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(config.block() for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for parameter in self.parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)  # an embedding's fan-out is its width

    def forward(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocabulary"]:
        """Logits of each next token.

        Raises:
            ValueError: if there are more tokens than the context holds.
        """
        if tokens.shape[1] > self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens do not fit in a context of {self.config.context}")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Mean cross-entropy of the next tokens, in nats."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @contextmanager
    def watching(self) -> Iterator[list[Attention]]:
        """Within, each attention layer keeps the norm of its output; gives the layers."""
        layers = [m for m in self.modules() if isinstance(m, Attention)]
        try:
            for layer in layers:
                layer.watch = True
            yield layers
        finally:
            for layer in layers:
                layer.watch = False

    @torch.no_grad()
    def generate(
        self,
        prompt: Int[Tensor, "batch length"],
        new_tokens: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch total"]:
        """Continue a prompt of at least one token, sampling; 0 as temperature takes the likeliest token.

        Each token is computed from the last ``context`` tokens, anew.
        """
        if prompt.shape[1] == 0 or temperature < 0:
            raise ValueError(
                f"generate needs a prompt and temperature ≥ 0, got {tuple(prompt.shape)} and {temperature}"
            )
        tokens = prompt
        for _ in range(new_tokens):
            logits = self(tokens[:, -self.config.context :])[:, -1]
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                weights = torch.softmax(logits.float() / temperature, dim=-1)
                following = torch.multinomial(weights, 1, generator=generator)
            tokens = torch.cat((tokens, following), dim=1)
        return tokens
