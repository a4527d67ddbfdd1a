"""Base classes of the models and of their configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sigattn.nn.attention import Attention, Watch
from sigattn.nn.bias import AttentionBias, Learn, Rule, make_bias
from sigattn.nn.block import Block, NormStructure
from sigattn.nn.feedforward import FeedForward, make_feed_forward
from sigattn.nn.functional import Activation
from sigattn.nn.initialization import Initialization
from sigattn.nn.norm import Norm
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.ops.statistics import AttentionStatistics
from sigattn.validation import check_at_least, check_finite, check_not_negative, check_probability


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a stack of transformer blocks.

    Attributes:
        layers: number of blocks.
        width: number of features of a position.
        heads: number of query heads, a divisor of width.
        hidden: number of hidden features of the feed-forward layers; None for the default of ``hidden_width``.
        activation: "sigmoid", "softmax", or another of ``sigattn.nn.attention``.
        bias: b: a number, or a rule: "log_context", "log_batch", "log_sample", "log_visible" (``sigattn.nn.bias``).
            None for the model's usual rule with "sigmoid", and for no bias otherwise.
        learn_bias: parameters of a learned b, with ``bias`` as initial value: "no", "layer" (one per layer), "head"
            (one per head) or "query" (added to Q).
        temperature: initial value of a learned temperature t, σ(e^t S + b); None for no temperature.
        length_power: α of the factor n^(-α) of the attention's output.
        qk_norm: "rms", "layer" or "none".
        kv_heads: number of key and value heads; None for heads.
        output_norm: norm before each attention's output projection: "rms", "layer" or "none"; without parameters.
        norm: norm of the blocks, "rms" or "layer".
        structure: norm placement, "pre", "hybrid", "hybrid_attention" or "post" (``sigattn.nn.block``).
        layer_scale: initial value of LayerScale's factors; None for no LayerScale.
        feed_forward: "swiglu", "gelu", "relu" or "swish".
        linear_bias: True for biases in the linear layers.
        dropout: dropout probability of weights, within feed-forward layers and of branches, while training.
        drop_branch: stochastic depth's probability in the last layer; it grows linearly from 0 in the first.
        initialization: "fan_in", "trunc_normal" or "moco_v3" (``sigattn.nn.initialization``).

    Raises:
        SettingsError: a ValueError, if a number is out of its range.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    hidden: int | None = None
    activation: Activation = "sigmoid"
    bias: float | Rule | None = None
    learn_bias: Learn = "no"
    temperature: float | None = None
    length_power: float = 0.0
    qk_norm: Norm = "layer"
    kv_heads: int | None = None
    output_norm: Norm = "none"
    norm: Norm = "layer"
    structure: NormStructure = "pre"
    layer_scale: float | None = None
    feed_forward: FeedForward = "gelu"
    linear_bias: bool = True
    dropout: float = 0.0
    drop_branch: float = 0.0
    initialization: Initialization = "trunc_normal"

    USUAL_BIAS: ClassVar[float | Rule] = 0.0  # of activation="sigmoid" if bias is None

    def __post_init__(self) -> None:
        check_at_least(1, self, "layers", "width", "heads", "hidden", "kv_heads")
        check_finite(self, "temperature", "length_power")
        if not isinstance(self.bias, str):
            check_finite(self, "bias")
        check_not_negative(self, "layer_scale")
        check_probability(self, "dropout", "drop_branch")

    @property
    def hidden_width(self) -> int:
        """Hidden features of feed-forward layers: 4 · width by default; for SwiGLU 8/3 · width, rounded up to 32."""
        if self.hidden is not None:
            return self.hidden
        return 32 * math.ceil(self.width * 8 / 3 / 32) if self.feed_forward == "swiglu" else 4 * self.width

    @property
    def head_dim(self) -> int:
        """Number of features of a head.

        Raises:
            ValueError: if heads does not divide width.
        """
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")
        return self.width // self.heads

    def attention_bias(self, context: int | None) -> AttentionBias | None:
        """Create the bias of a layer; return None if the activation has no bias.

        Raises:
            ValueError: if bias or learn_bias is set for an activation without a bias.
        """
        if self.activation in ("softmax", "performer"):
            if self.bias is not None or self.learn_bias != "no":
                raise ValueError(
                    f"activation={self.activation!r} has no bias: got {self.bias!r}, learn_bias={self.learn_bias!r}"
                )
            return None
        rule: float | Rule | None = self.bias
        if rule is None:
            rule = self.USUAL_BIAS if self.activation == "sigmoid" else 0.0
        return make_bias(rule, learn=self.learn_bias, context=context, heads=self.heads)

    def attention(self, position: RotaryEmbedding | Alibi | None, *, causal: bool, context: int | None) -> Attention:
        """Create an attention layer."""
        return Attention(
            self.width,
            self.heads,
            activation=self.activation,
            bias=self.attention_bias(context),
            kv_heads=self.kv_heads,
            qk_norm=self.qk_norm,
            position=position,
            causal=causal,
            temperature=self.temperature,
            length_power=self.length_power,
            output_norm=self.output_norm,
            dropout=self.dropout,
            linear_bias=self.linear_bias,
        )

    def block(
        self, layer: int, position: RotaryEmbedding | Alibi | None, *, causal: bool, context: int | None
    ) -> Block:
        """Create the block of a layer, 0 … layers - 1."""
        feed_forward = make_feed_forward(
            self.feed_forward, self.width, self.hidden_width, bias=self.linear_bias, dropout=self.dropout
        )
        return Block(
            self.attention(position, causal=causal, context=context),
            feed_forward,
            self.width,
            structure=self.structure,
            norm=self.norm,
            layer_scale=self.layer_scale,
            dropout=self.dropout,
            drop_branch=self.drop_branch * layer / max(self.layers - 1, 1),
        )

    @property
    def keeps_its_norm(self) -> bool:
        """True if a negative bias, a norm after the attention or n^(-α) bounds the attention's output."""
        bias = self.USUAL_BIAS if self.bias is None else self.bias
        negative = isinstance(bias, str) or bias < 0
        return negative or bool(self.length_power) or self.output_norm != "none" or self.structure.startswith("hybrid")


@contextmanager
def watching(module: nn.Module, what: Watch = "norm") -> Iterator[list[Attention]]:
    """Set ``Attention.watch`` of a module's attention layers within the context, and yield the layers."""
    layers = [m for m in module.modules() if isinstance(m, Attention)]
    try:
        for layer in layers:
            layer.watch = what
        yield layers
    finally:
        for layer in layers:
            layer.watch = "nothing"


def residual_stream(x: Tensor) -> Tensor:
    """Return the input of the first block, in float32 under autocast: 16 bits would lose LayerScale's small updates."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


class Transformer(nn.Module):
    """Base class of the models.

    Attributes:
        checkpoint_activations: True to recompute each block in the backward pass instead of storing its activations.
    """

    checkpoint_activations = False

    def run_block(self, block: nn.Module, x: Tensor, **options: Any) -> Tensor:
        """Return a block's output, with activation checkpointing if it is on."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            checkpointed: Tensor = checkpoint(block, x, use_reentrant=False, **options)
            return checkpointed
        result: Tensor = block(x, **options)
        return result

    def watching(self, what: Watch = "norm") -> AbstractContextManager[list[Attention]]:
        """Return the context manager ``watching`` of this model."""
        return watching(self, what)

    def attention_report(self, *inputs: object, **more: object) -> list[AttentionStatistics]:
        """Return row mass, output norm, largest logit and sparsity of each attention layer for one forward.

        Each statistic is (batch, heads). The forward is in evaluation mode; memory is linear in the length.

        Args:
            inputs, more: arguments of forward.
        """
        training = self.training
        self.eval()
        try:
            with self.watching("everything") as layers:
                self(*inputs, **more)
                report = [layer.statistics for layer in layers if layer.statistics is not None]
                for layer in layers:
                    layer.statistics = None
        finally:
            self.train(training)
        return report
