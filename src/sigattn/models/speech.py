"""Speech recognition by CTC: a strided convolution and a transformer or a conformer (App. G.4)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.models.config import TransformerConfig
from sigattn.models.transformer import Transformer, residual_stream
from sigattn.nn.bias_rules import Rule
from sigattn.nn.block import Block
from sigattn.nn.cape import Cape
from sigattn.nn.conformer import ConformerBlock
from sigattn.nn.guide import warn_once
from sigattn.nn.norm import make_norm
from sigattn.nn.position import SinusoidalEmbedding
from sigattn.shapes import Float, Int
from sigattn.validation import check_at_least, check_positive, check_probability

Position = Literal["cape", "rope", "alibi", "sincos", "none"]
ALPHABET = "|'abcdefghijklmnopqrstuvwxyz"  # tokens 1, 2, …; "|" separates words, token 0 is CTC's blank


@dataclass(frozen=True, kw_only=True)
class SpeechModelConfig(TransformerConfig):
    """Configuration of a speech model: by default the paper's transformer of 255M parameters.

    Attributes:
        num_mel_bins: number of channels of the log-mel filterbank.
        step: seconds from one frame of the filterbank to the next.
        kernel_size: kernel size of the convolution over time, in frames.
        stride: its stride, in frames.
        vocab_size: number of tokens, CTC's blank (0) included.
        position: "cape" or "sincos" (added to the input), "rope", "alibi" (with different slopes for earlier and later
            keys) or "none".
        block_kind: "transformer", or "conformer", whose feed-forward layers use swish.
        conformer_kernel_size: kernel size of a conformer's convolution, in frames.
        layer_drop: probability of skipping a layer, while training.
    """

    num_layers: int = 36
    embed_dim: int = 768
    num_heads: int = 4
    init_values: float | None = 1e-4
    num_mel_bins: int = 80
    step: float = 0.01
    kernel_size: int = 7
    stride: int = 3
    vocab_size: int = 1 + len(ALPHABET)
    position: Position = "cape"
    block_kind: Literal["transformer", "conformer"] = "transformer"
    conformer_kernel_size: int = 31
    layer_drop: float = 0.0

    DEFAULT_BIAS: ClassVar[float | Rule] = "log_sample"
    KNOWS_LENGTHS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "num_mel_bins", "kernel_size", "stride", "vocab_size", "conformer_kernel_size")
        check_positive(self, "step")
        check_probability(self, "layer_drop")

    def build(self) -> "SpeechModel":
        return SpeechModel(self)

    def tiny(self) -> "SpeechModelConfig":
        return replace(super().tiny(), conformer_kernel_size=15, layer_drop=0.0, dropout=0.1)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Return frames and lengths, which differ if there are several samples."""
        return torch.randn(batch_size, 60, self.num_mel_bins), torch.linspace(60, 41, batch_size).long()

    def make_block(self, layer: int) -> Block | ConformerBlock:
        position = self.make_position(self.position, get_args(Position), "split")
        if self.block_kind == "transformer":
            return self.make_transformer_block(layer, position, causal=False, max_seq_len=None)
        if self.block_kind != "conformer":
            raise ValueError(f'block_kind must be "transformer" or "conformer", got {self.block_kind!r}')
        fixed = {"norm_placement": "pre", "drop_path": 0.0, "norm": "layer", "use_bias": True}
        changed = [name for name, value in fixed.items() if getattr(self, name) != value]
        if changed or self.feed_forward not in ("gelu", "swish"):
            raise ValueError(
                f'block_kind="conformer" does not support {changed or ["feed_forward"]}: keep the default values'
            )
        return ConformerBlock(
            self.make_attention(position, causal=False, max_seq_len=None),
            self.embed_dim,
            self.effective_mlp_dim,
            kernel_size=self.conformer_kernel_size,
            init_values=self.init_values,
            dropout=self.dropout,
        )


class SpeechModel(Transformer):
    """Speech model: CTC's log-probabilities of characters from the frames of a log-mel filterbank."""

    def __init__(self, config: SpeechModelConfig) -> None:
        super().__init__()
        self.config = c = config
        _warn_of_unstable_options(config)
        self.convolution: nn.Conv1d = nn.Conv1d(
            c.num_mel_bins, c.embed_dim, c.kernel_size, c.stride, padding=c.kernel_size // 2
        )
        self.position: nn.Module = {
            "cape": lambda: Cape(c.embed_dim, step=c.step * c.stride),
            "sincos": lambda: SinusoidalEmbedding(c.embed_dim),
        }.get(c.position, nn.Identity)()
        self.dropout: nn.Dropout = nn.Dropout(c.dropout)
        self.blocks: nn.ModuleList = nn.ModuleList(c.make_block(layer) for layer in range(c.num_layers))
        # a conformer block ends with a norm
        self.norm: nn.Module = make_norm("none" if c.block_kind == "conformer" else c.norm, c.embed_dim)
        self.output: nn.Linear = nn.Linear(c.embed_dim, c.vocab_size)
        self.reset_parameters()

    def forward(
        self, frames: Float[Tensor, "batch length num_mel_bins"], lengths: Int[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, "batch steps vocab"], Int[Tensor, " batch"]]:
        """Return the log-probabilities, and the number of steps of each sample.

        ``lengths`` are the numbers of frames of the samples, None for all; padding does not affect the result.
        """
        if lengths is None:
            lengths = torch.full(frames.shape[:1], frames.shape[1], device=frames.device)
        if lengths.shape != frames.shape[:1]:
            raise ValueError(f"lengths must be (batch,) = ({frames.shape[0]},), got {tuple(lengths.shape)}")
        exists = torch.arange(frames.shape[1], device=frames.device) < lengths[:, None]  # (B, length)
        x = residual_stream(self.convolution((frames * exists[:, :, None]).mT).mT)  # (B, steps, embed_dim)
        steps = self.steps(lengths)
        x = self.dropout(self.position(x))
        for block in self.blocks:
            y = self.run_block(block, x, key_lengths=steps)
            if self.training and self.config.layer_drop:
                # compute a dropped layer too, because all ranks of a distributed run must call the same collectives
                y = torch.where(torch.rand((), device=x.device) < self.config.layer_drop, x, y)
            x = y
        return F.log_softmax(self.output(self.norm(x)).float(), -1), steps

    def steps(self, lengths: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Return the number of output steps for numbers of frames."""
        c = self.config
        return (lengths + 2 * (c.kernel_size // 2) - c.kernel_size) // c.stride + 1


def _warn_of_unstable_options(c: SpeechModelConfig) -> None:
    """Warn of options that the paper found not to train (Sect. "Automatic Speech Recognition", App. G.4)."""
    sigmoid = c.activation == "sigmoid" and not c.normalize
    if sigmoid and not c.bounds_output:
        warn_once(
            "sigmoid attention without a bias has gradient and loss spikes in speech models (App. ASR, results): use "
            'attention_bias="log_sample" or norm_placement="hybrid_attention"'
        )
    if sigmoid and c.position == "cape" and c.qk_norm == "none":
        warn_once(
            'sigmoid attention with CAPE and without QK-norm is unstable (Table "asr-results"): set qk_norm="layer"'
        )
    if sigmoid and c.init_values is None:
        warn_once(
            'sigmoid speech models without LayerScale generalise worse (Table "asr-results"): set init_values=1e-4'
        )
