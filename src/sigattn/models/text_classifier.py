"""Classifier of texts: a transformer without a causal mask over tokens, averaged over the positions of each text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from sigattn.models.config import TransformerConfig
from sigattn.models.transformer import Transformer, residual_stream
from sigattn.nn.bias_rules import Rule
from sigattn.nn.norm import make_norm
from sigattn.ops import validation
from sigattn.shapes import Float, Int
from sigattn.validation import check_at_least

Position = Literal["rope", "alibi", "none"]


@dataclass(frozen=True, kw_only=True)
class TextClassifierConfig(TransformerConfig):
    """Configuration of a text classifier.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        max_seq_len: length of the longest text.
        num_classes: number of classes.
        position: "rope", "alibi" (with different slopes for earlier and later keys) or "none".
    """

    vocab_size: int = 256
    max_seq_len: int = 512
    num_classes: int = 2
    position: Position = "rope"

    DEFAULT_BIAS: ClassVar[float | Rule] = "log_sample"
    KNOWS_LENGTHS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "vocab_size", "max_seq_len", "num_classes")

    def build(self) -> TextClassifier:
        return TextClassifier(self)

    @property
    def tokens_per_sample(self) -> float:
        return float(self.max_seq_len)

    def tiny(self) -> TextClassifierConfig:
        return replace(super().tiny(), max_seq_len=128)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Return tokens and lengths, which differ if there are several texts."""
        lengths = torch.linspace(self.max_seq_len, 1 + self.max_seq_len // 2, batch_size).long()
        return torch.randint(self.vocab_size, (batch_size, self.max_seq_len)), lengths


class TextClassifier(Transformer):
    """Text classifier: token embedding, blocks without a causal mask, a norm, the mean of each text, and an output."""

    def __init__(self, config: TextClassifierConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embedding: nn.Embedding = nn.Embedding(c.vocab_size, c.embed_dim)
        position = [c.make_position(c.position, get_args(Position), "split") for _ in range(c.num_layers)]
        self.blocks: nn.ModuleList = nn.ModuleList(
            c.make_transformer_block(i, p, causal=False, max_seq_len=c.max_seq_len) for i, p in enumerate(position)
        )
        self.norm: nn.Module = make_norm(c.norm, c.embed_dim)
        self.output: nn.Linear = nn.Linear(c.embed_dim, c.num_classes)
        self.reset_parameters()

    def forward(
        self, tokens: Int[Tensor, "batch length"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """Return the logits of the classes.

        Args:
            tokens: texts, padded to the longest one. Padding does not affect the result.
            lengths: number of tokens of each text; None for all.

        Raises:
            ValueError: if tokens is not (batch, length), or longer than ``max_seq_len``, or lengths is not (batch,).
            TypeError: if tokens are not integers.
        """
        validation.integers("TextClassifier", "tokens", tokens, (None, None), "(batch, length)")
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(f"texts of {tokens.shape[1]} tokens do not fit in a context of {self.config.max_seq_len}")
        if lengths is None:
            lengths = torch.full(tokens.shape[:1], tokens.shape[1], device=tokens.device)
        if lengths.shape != tokens.shape[:1]:
            raise ValueError(f"lengths must be (batch,) = ({tokens.shape[0]},), got {tuple(lengths.shape)}")
        x = residual_stream(self.embedding(tokens))  # (B, N, embed_dim)
        for block in self.blocks:
            x = self.run_block(block, x, key_lengths=lengths)
        exists = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]  # (B, N)
        mean = (self.norm(x) * exists[:, :, None]).sum(1) / lengths[:, None].clamp(min=1)
        result: Tensor = self.output(mean)
        return result
