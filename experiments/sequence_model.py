"""Small encoders of a sequence of numbers or symbols, and the MLP baseline (App. "Simple Experiments")."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from sigattn.models.config import TransformerConfig
from sigattn.models.saving import MODELS
from sigattn.models.transformer import Transformer
from sigattn.nn.bias_rules import Learn, Rule
from sigattn.nn.initialization import initialize
from sigattn.nn.norm import make_norm
from sigattn.nn.position import LearnableEmbedding
from sigattn.validation import check_at_least


@dataclass(frozen=True, kw_only=True)
class SequenceModelConfig(TransformerConfig):
    """Configuration: by default the transformer of k-summation, one layer of 8 heads and a learned bias, initially -4.

    Attributes:
        seq_len: length of the sequence.
        num_symbols: number of symbols, without the one for padding; 0 for sequences of numbers.
        num_outputs: number of outputs.
        kind: "transformer", or "mlp" on the numbers, or one-hot symbols, of the whole sequence.
        mlp_dims: sizes of the MLP's hidden layers.
    """

    num_layers: int = 1
    embed_dim: int = 120
    num_heads: int = 8
    attention_bias: float | Rule | None = -4.0
    learn_bias: Learn = "layer"
    seq_len: int = 40
    num_symbols: int = 0
    num_outputs: int = 1
    kind: Literal["transformer", "mlp"] = "transformer"
    mlp_dims: tuple[int, ...] = (900, 300)

    DEFAULT_BIAS: ClassVar[float | Rule] = -4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "seq_len", "num_outputs", "mlp_dims")
        check_at_least(0, self, "num_symbols")

    def build(self) -> SequenceModel:
        return SequenceModel(self)

    def tiny(self) -> SequenceModelConfig:
        return replace(super().tiny(), num_layers=self.num_layers, mlp_dims=(64, 64))

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        shape = (batch_size, self.seq_len)
        return (torch.randint(self.num_symbols, shape) if self.num_symbols else torch.randn(shape),)


MODELS["sequence"] = SequenceModelConfig


class MLPHead(nn.Sequential):
    """MLP of one hidden layer, half as wide as the input."""

    def __init__(self, embed_dim: int, num_outputs: int) -> None:
        super().__init__(nn.Linear(embed_dim, embed_dim // 2), nn.GELU(), nn.Linear(embed_dim // 2, num_outputs))


class SequenceModel(Transformer):
    """Sequence model: inputs with learned positions, blocks without a mask, a norm, the mean, and an ``MLPHead``.

    The paper does not describe the output; with ``MLPHead`` the k-summation model has the paper's 187k parameters.
    """

    def __init__(self, config: SequenceModelConfig) -> None:
        super().__init__()
        self.config = c = config
        if c.kind == "mlp":
            widths = [c.seq_len * (c.num_symbols + 1 if c.num_symbols else 1), *c.mlp_dims, c.num_outputs]
            parts: list[nn.Module] = []
            for inputs, outputs in itertools.pairwise(widths):
                parts += [nn.ReLU()] * bool(parts) + [nn.Linear(inputs, outputs)]
            self.mlp: nn.Sequential = nn.Sequential(*parts)
            return
        self.input: nn.Embedding | nn.Linear = (
            nn.Embedding(c.num_symbols + 1, c.embed_dim) if c.num_symbols else nn.Linear(1, c.embed_dim)
        )
        self.position: LearnableEmbedding = LearnableEmbedding(c.seq_len, c.embed_dim)
        self.blocks: nn.ModuleList = nn.ModuleList(
            c.make_transformer_block(i, None, causal=False, max_seq_len=c.seq_len) for i in range(c.num_layers)
        )
        self.norm: nn.Module = make_norm(c.norm, c.embed_dim)
        self.output: MLPHead = MLPHead(c.embed_dim, c.num_outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        if self.config.kind == "mlp":
            for layer in self.mlp:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
        else:
            initialize(self, self.config.initialization)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, (B, num_outputs), of (B, seq_len) numbers or symbols; ``num_symbols`` is padding.

        Raises:
            ValueError: for another length.
        """
        c = self.config
        if inputs.shape[1:] != (c.seq_len,):
            raise ValueError(f"inputs must be (batch, {c.seq_len}), got {tuple(inputs.shape)}")
        if c.kind == "mlp":
            flat = nn.functional.one_hot(inputs, c.num_symbols + 1).flatten(1).float() if c.num_symbols else inputs
            result: Tensor = self.mlp(flat)
            return result
        x = self.position(self.input(inputs if c.num_symbols else inputs.unsqueeze(-1)))
        for block in self.blocks:
            x = self.run_block(block, x)
        return torch.as_tensor(self.output(self.norm(x).mean(1)))
