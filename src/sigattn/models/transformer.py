"""What the three models share: a configuration of the blocks, and how blocks are made from it."""

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
from sigattn.nn.initialization import Initialization
from sigattn.nn.mechanism import Activation
from sigattn.nn.norm import Norm
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.ops.statistics import AttentionStatistics
from sigattn.validation import check_at_least, check_finite, check_not_negative, check_probability


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Size and kind of a stack of transformer blocks.

    Attributes:
        layers: number of blocks.
        width: features of a position.
        heads: number of query heads, of which width is a multiple.
        hidden: features within the feed-forward layers; None for the model's usual multiple of width.
        activation: "sigmoid", "softmax", or another of ``sigattn.nn.attention``.
        bias: b: a number, or a rule: "log_context", "log_batch", "log_sample", "log_visible" (``sigattn.nn.bias``).
            None is the model's usual rule under a sigmoid, and no bias otherwise.
        learn_bias: where b is learned, starting from ``bias``: "no", one for each "layer" or "head", or "query".
        temperature: where a learned temperature t starts, σ(e^t S + b); None for none.
        length_power: α of the factor n^(-α) on the attention's output.
        qk_norm: "rms", "layer" or "none".
        kv_heads: number of key and value heads; None for as many as heads.
        output_norm: before each attention's output projection: "rms", "layer" or "none"; without parameters.
        norm: of the blocks, "rms" or "layer".
        structure: where norms stand, "pre", "hybrid", "hybrid_attention" or "post" (``sigattn.nn.block``).
        layer_scale: where LayerScale's factors start; None for none.
        feed_forward: "swiglu", "gelu", "relu" or "swish".
        linear_bias: whether linear layers have offsets.
        dropout: of weights, within feed-forward layers and of branches, while training.
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

    USUAL_BIAS: ClassVar[float | Rule] = 0.0  # of a sigmoid, where bias is None

    def __post_init__(self) -> None:
        check_at_least(1, self, "layers", "width", "heads", "hidden", "kv_heads")
        check_finite(self, "temperature", "length_power")
        if not isinstance(self.bias, str):
            check_finite(self, "bias")
        check_not_negative(self, "layer_scale")
        check_probability(self, "dropout", "drop_branch")

    @property
    def hidden_width(self) -> int:
        """Features within the feed-forward layers: 4 times the width, or for SwiGLU 8/3 rounded up to 32."""
        if self.hidden is not None:
            return self.hidden
        return 32 * math.ceil(self.width * 8 / 3 / 32) if self.feed_forward == "swiglu" else 4 * self.width

    @property
    def head_dim(self) -> int:
        """Features of a head.

        Raises:
            ValueError: if heads do not divide width.
        """
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")
        return self.width // self.heads

    def attention_bias(self, context: int | None) -> AttentionBias | None:
        """A layer's own bias; None for none.

        Raises:
            ValueError: if a bias or its learning is asked for where the activation takes none.
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
        """One attention layer."""
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
        """The block of a layer, 0 … layers - 1."""
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
        """Whether something holds the attention's output down: a negative bias, a norm after it, or n^(-α)."""
        bias = self.USUAL_BIAS if self.bias is None else self.bias
        held = isinstance(bias, str) or bias < 0
        return held or bool(self.length_power) or self.output_norm != "none" or self.structure.startswith("hybrid")


@contextmanager
def watching(module: nn.Module, what: Watch = "norm") -> Iterator[list[Attention]]:
    """Within, each attention layer of a module keeps the norm of its output, or "everything"; gives the layers."""
    layers = [m for m in module.modules() if isinstance(m, Attention)]
    try:
        for layer in layers:
            layer.watch = what
        yield layers
    finally:
        for layer in layers:
            layer.watch = "nothing"


def residual_stream(x: Tensor) -> Tensor:
    """What enters the first block: in float32 under autocast, for 16 bits would lose what LayerScale adds to it."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


class Transformer(nn.Module):
    """A stack of blocks whose attention layers can be watched.

    Attributes:
        checkpoint_activations: while training, compute each block again in the backward pass instead of keeping what it
            made.
    """

    checkpoint_activations = False

    def run_block(self, block: nn.Module, x: Tensor, **options: Any) -> Tensor:
        """A block's output."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            again: Tensor = checkpoint(block, x, use_reentrant=False, **options)
            return again
        result: Tensor = block(x, **options)
        return result

    def watching(self, what: Watch = "norm") -> AbstractContextManager[list[Attention]]:
        """See ``watching``."""
        return watching(self, what)

    def attention_report(self, *inputs: object, **more: object) -> list[AttentionStatistics]:
        """Row mass, output norm, largest logit and sparsity of each attention layer, in a forward of these inputs.

        In memory linear in the length; each statistic is (batch, heads). Dropout is off meanwhile.
        """
        training = self.training
        self.eval()
        try:
            with self.watching("everything") as layers:
                self(*inputs, **more)
                found = [layer.statistics for layer in layers if layer.statistics is not None]
                for layer in layers:
                    layer.statistics = None
        finally:
            self.train(training)
        return found
