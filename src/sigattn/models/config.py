"""Base classes of the models' configurations: of any model, and of a stack of transformer blocks."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from sigattn.nn.attention import Attention
from sigattn.nn.bias import AttentionBias
from sigattn.nn.bias_rules import Learn, Rule, make_bias
from sigattn.nn.block import Block, NormPlacement
from sigattn.nn.feedforward import FeedForward, make_feed_forward
from sigattn.nn.functional import Activation
from sigattn.nn.initialization import Initialization
from sigattn.nn.norm import Norm
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.validation import check_at_least, check_bool, check_finite, check_not_negative, check_probability

Config = TypeVar("Config", bound="TransformerConfig")


class ModelConfig(ABC):
    """Configuration of a model; subclasses are frozen dataclasses, listed in ``sigattn.models.saving.MODELS``.

    Attributes:
        supports_context_parallel: True if a sequence may be split over processes: the attention is the only layer that
            mixes positions, and reads ``Transformer.sequence_shard``.
    """

    supports_context_parallel: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> nn.Module:
        """Create the model, with initial weights, on PyTorch's default device."""

    @property
    @abstractmethod
    def transformer(self) -> "TransformerConfig":
        """Configuration of the transformer blocks; of the encoder's if there are several stacks."""

    @abstractmethod
    def with_transformer(self, **changes: Any) -> "ModelConfig":
        """Return a copy with fields of ``transformer`` changed."""

    @abstractmethod
    def tiny(self) -> "ModelConfig":
        """Return a small form that trains in minutes on 2 cores, with the same positions, norms and bias."""

    @abstractmethod
    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Return random inputs of the model."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Configuration of a stack of transformer blocks; SettingsError, a ValueError, for a number out of its range.

    Attributes:
        num_layers: number of blocks.
        embed_dim: number of features of a position.
        num_heads: number of query heads, a divisor of embed_dim.
        mlp_dim: number of hidden features of the feed-forward layers; None for the default of ``effective_mlp_dim``.
        activation: "sigmoid", "softmax", or another of ``sigattn.nn.attention``.
        attention_bias: b: a number, or a rule: "log_context", "log_batch", "log_sample", "log_visible",
            "log_alibi" (``sigattn.nn.bias_rules``). None for the model's usual rule with "sigmoid" (with ``normalize``
            "log_batch" where that is a number), and for no bias otherwise.
        normalize: True to divide the sigmoid's weights by the sum of each row.
        learn_bias: parameters of a learned b, with ``attention_bias`` as initial value: "no", "layer" (one per layer),
            "head" (one per head; two with "log_visible") or "query" (added to Q).
        temperature: initial value of a learned temperature t, σ(e^t S + b); None for no temperature.
        length_power: α of the factor n^(-α) of the attention's output.
        qk_norm: "rms", "layer" or "none".
        num_kv_heads: number of key and value heads; None for num_heads.
        output_norm: norm before each attention's output projection: "rms", "layer" or "none"; without parameters.
        norm: norm of the blocks, "rms" or "layer".
        norm_placement: norm placement, "pre", "hybrid", "hybrid_attention" or "post" (``sigattn.nn.block``).
        init_values: initial value of LayerScale's factors; None for no LayerScale.
        feed_forward: "swiglu", "gelu", "relu" or "swish".
        use_bias: True for biases in the linear layers.
        dropout: dropout probability of weights, within feed-forward layers and of branches, while training.
        drop_path: stochastic depth's probability in the last layer; it grows linearly from 0 in the first.
        initialization: "fan_in", "trunc_normal" or "moco_v3" (``sigattn.nn.initialization``).
    """

    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    mlp_dim: int | None = None
    activation: Activation = "sigmoid"
    attention_bias: float | Rule | None = None
    normalize: bool = False
    learn_bias: Learn = "no"
    temperature: float | None = None
    length_power: float = 0.0
    qk_norm: Norm = "layer"
    num_kv_heads: int | None = None
    output_norm: Norm = "none"
    norm: Norm = "layer"
    norm_placement: NormPlacement = "pre"
    init_values: float | None = None
    feed_forward: FeedForward = "gelu"
    use_bias: bool = True
    dropout: float = 0.0
    drop_path: float = 0.0
    initialization: Initialization = "trunc_normal"

    DEFAULT_BIAS: ClassVar[float | Rule] = 0.0  # of activation="sigmoid" if bias is None
    KNOWS_LENGTHS: ClassVar[bool] = False  # the model gives its attention the length of each sample

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_layers", "embed_dim", "num_heads", "mlp_dim", "num_kv_heads")
        check_finite(self, "temperature", "length_power")
        if not isinstance(self.attention_bias, str):
            check_finite(self, "attention_bias")
        check_not_negative(self, "init_values")
        check_probability(self, "dropout", "drop_path")
        check_bool(self, "use_bias", "normalize")

    @property
    def transformer(self) -> "TransformerConfig":
        return self

    def with_transformer(self: Config, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    def tiny(self: Config) -> Config:
        """Return a form of 2 layers of width 64.

        LayerScale starts at 0.01: within some hundred steps it does not grow enough from 1e-4, and from 0.1 sigmoid
        attention without a bias learns less well (docs/log.md).
        """
        shared = self.num_kv_heads
        return dataclasses.replace(
            self,
            num_layers=2,
            embed_dim=64,
            num_heads=4,
            mlp_dim=None,
            num_kv_heads=None if shared is None else max(1, 4 * shared // self.num_heads),
            init_values=None if self.init_values is None else 0.01,
            drop_path=min(self.drop_path, 0.1),
        )

    @property
    def effective_mlp_dim(self) -> int:
        """Hidden features of feed-forward layers: by default 4 · embed_dim; for SwiGLU 8/3 of it, a multiple of 32."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return 32 * math.ceil(self.embed_dim * 8 / 3 / 32) if self.feed_forward == "swiglu" else 4 * self.embed_dim

    @property
    def head_dim(self) -> int:
        """Number of features of a head; raises ValueError if num_heads does not divide embed_dim."""
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got embed_dim={self.embed_dim}, num_heads={self.num_heads}"
            )
        return self.embed_dim // self.num_heads

    @property
    def default_bias(self) -> float | Rule:
        """The b of "sigmoid" without ``attention_bias``: with ``normalize`` a low one, unless a number is learned."""
        is_number = not isinstance(self.DEFAULT_BIAS, str)
        return "log_batch" if self.normalize and is_number and self.learn_bias == "no" else self.DEFAULT_BIAS

    def make_attention_bias(self, max_seq_len: int | None) -> AttentionBias | None:
        """Create the bias of a layer; return None if the activation has no bias."""
        rule: float | Rule | None = self.attention_bias
        if self.activation in ("softmax", "performer"):
            if rule is not None or self.learn_bias != "no":
                raise ValueError(
                    f"activation={self.activation!r} has no bias: got attention_bias={rule!r}, "
                    f"learn_bias={self.learn_bias!r}"
                )
            return None
        if rule is None:
            rule = self.default_bias if self.activation == "sigmoid" else 0.0
        bias = make_bias(
            rule, learn=self.learn_bias, max_seq_len=max_seq_len, num_heads=self.num_heads, normalize=self.normalize
        )
        if bias.needs_lengths and not self.KNOWS_LENGTHS:
            raise ValueError(
                f"attention_bias={rule!r} is -log of each sample's length, which {type(self).__name__} does not give: "
                'use "log_batch", -log of the length of the batch'
            )
        return bias

    def make_position(
        self, kind: str, kinds: tuple[str, ...], alibi_sides: str = "causal"
    ) -> RotaryEmbedding | Alibi | None:
        """Create the position encoding of an attention layer; return None if positions are added to the input."""
        if kind not in kinds:
            raise ValueError(f"position must be one of {', '.join(map(repr, kinds))}, got {kind!r}")
        if kind == "rope":
            return RotaryEmbedding(self.head_dim)
        return Alibi(self.num_heads, alibi_sides) if kind == "alibi" else None

    def make_attention(
        self, position: RotaryEmbedding | Alibi | None, *, causal: bool, max_seq_len: int | None
    ) -> Attention:
        return Attention(
            self.embed_dim,
            self.num_heads,
            activation=self.activation,
            attention_bias=self.make_attention_bias(max_seq_len),
            normalize=self.normalize,
            num_kv_heads=self.num_kv_heads,
            qk_norm=self.qk_norm,
            position=position,
            causal=causal,
            temperature=self.temperature,
            length_power=self.length_power,
            output_norm=self.output_norm,
            dropout=self.dropout,
            use_bias=self.use_bias,
        )

    def make_transformer_block(
        self, layer: int, position: RotaryEmbedding | Alibi | None, *, causal: bool, max_seq_len: int | None
    ) -> Block:
        """Create the block of a layer, 0 … num_layers - 1."""
        feed_forward = make_feed_forward(
            self.feed_forward, self.embed_dim, self.effective_mlp_dim, use_bias=self.use_bias, dropout=self.dropout
        )
        return Block(
            self.make_attention(position, causal=causal, max_seq_len=max_seq_len),
            feed_forward,
            self.embed_dim,
            norm_placement=self.norm_placement,
            norm=self.norm,
            init_values=self.init_values,
            dropout=self.dropout,
            drop_path=self.drop_path * layer / max(self.num_layers - 1, 1),
        )

    @property
    def bounds_output(self) -> bool:
        """True if the attention's output is bounded: by a negative bias, ``normalize``, a norm after it or n^(-α)."""
        bias = self.default_bias if self.attention_bias is None else self.attention_bias
        return (
            isinstance(bias, str)
            or bias < 0
            or self.normalize
            or bool(self.length_power)
            or self.output_norm != "none"
            or self.norm_placement.startswith("hybrid")
        )
