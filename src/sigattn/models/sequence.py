"""Small encoders of a sequence of numbers or symbols, and the MLP baseline (App. "Simple Experiments")."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from sigattn.models.transformer import Transformer, TransformerConfig
from sigattn.nn.bias import Learn, Rule
from sigattn.nn.initialization import initialize
from sigattn.nn.norm import make_norm
from sigattn.nn.position import LearnableEmbedding
from sigattn.validation import check_at_least


@dataclass(frozen=True, kw_only=True)
class SequenceModelConfig(TransformerConfig):
    """Configuration: by default the transformer of k-summation, one layer of 8 heads and a learned bias, initially -4.

    Attributes:
        length: length of the sequence.
        symbols: number of symbols, without the one for padding; 0 for sequences of numbers.
        outputs: number of outputs.
        kind: "transformer", or "mlp" on the numbers, or one-hot symbols, of the whole sequence.
        mlp_widths: widths of the MLP's hidden layers.
    """

    layers: int = 1
    width: int = 120
    heads: int = 8
    bias: float | Rule | None = -4.0
    learn_bias: Learn = "layer"
    length: int = 40
    symbols: int = 0
    outputs: int = 1
    kind: Literal["transformer", "mlp"] = "transformer"
    mlp_widths: tuple[int, ...] = (900, 300)

    USUAL_BIAS: ClassVar[float | Rule] = -4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "length", "outputs", "mlp_widths")
        check_at_least(0, self, "symbols")


class MLPHead(nn.Sequential):
    """MLP of one hidden layer, half as wide as the input."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, outputs))


class SequenceModel(Transformer):
    """Sequence model: inputs with learned positions, blocks without a mask, a norm, the mean, and an ``MLPHead``.

    The paper does not describe the output; with ``MLPHead`` the k-summation model has the paper's 187k parameters.
    """

    def __init__(self, config: SequenceModelConfig) -> None:
        super().__init__()
        self.config = c = config
        if c.kind == "mlp":
            widths = [c.length * (c.symbols + 1 if c.symbols else 1), *c.mlp_widths, c.outputs]
            parts: list[nn.Module] = []
            for inputs, outputs in itertools.pairwise(widths):
                parts += [nn.ReLU()] * bool(parts) + [nn.Linear(inputs, outputs)]
            self.mlp = nn.Sequential(*parts)
            return
        self.input = nn.Embedding(c.symbols + 1, c.width) if c.symbols else nn.Linear(1, c.width)
        self.position = LearnableEmbedding(c.length, c.width)
        self.blocks = nn.ModuleList(c.block(i, None, causal=False, context=c.length) for i in range(c.layers))
        self.norm = make_norm(c.norm, c.width)
        self.output = MLPHead(c.width, c.outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        if self.config.kind == "mlp":
            for part in self.mlp:
                if isinstance(part, nn.Linear):
                    part.reset_parameters()
        else:
            initialize(self, self.config.initialization)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, (B, outputs), of (B, length) numbers or symbols, where ``symbols`` stands for padding.

        Raises:
            ValueError: for another length.
        """
        c = self.config
        if inputs.shape[1:] != (c.length,):
            raise ValueError(f"inputs must be (batch, {c.length}), got {tuple(inputs.shape)}")
        if c.kind == "mlp":
            flat = nn.functional.one_hot(inputs, c.symbols + 1).flatten(1).float() if c.symbols else inputs
            result: Tensor = self.mlp(flat)
            return result
        x = self.position(self.input(inputs if c.symbols else inputs.unsqueeze(-1)))
        for block in self.blocks:
            x = self.run_block(block, x)
        return torch.as_tensor(self.output(self.norm(x).mean(1)))
