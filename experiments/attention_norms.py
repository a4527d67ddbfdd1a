"""Norm of the attention's output at initialisation, by position and bias (App. ASR, "Results and Ablations").

    python -m experiments norms                      # a minute on 2 cores; prints the table
    python -m experiments norms --num-layers 6         # 10 seconds

Expected, as in the paper: without a bias CAPE > RoPE > ALiBi, each orders of magnitude above softmax (80k, 40k, 20k and
200 in the paper); with b = -log n all of them near softmax. The models are the paper's speech transformers at their
initialisation (truncated normal 0.02), without QK-norm and LayerScale. Their input is 15 seconds of noise that is as
smooth as speech: frames of a moving average over 210 ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.transformer import recording
from sigattn.validation import SettingsError, check_at_least, check_positive, check_seed

FRAME = 0.01  # seconds
POSITIONS = ("cape", "rope", "alibi")
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"activation": "softmax"},
    "sigmoid, b = 0": {"attention_bias": 0.0},
    "sigmoid, b = -log n": {"attention_bias": "log_sample"},
}


@dataclass(frozen=True, kw_only=True)
class AttentionNormsConfig:
    """Settings of the measurement.

    Attributes:
        num_layers: number of blocks.
        embed_dim: number of features of a position.
        num_heads: number of attention heads.
        seconds: duration of the input.
        seed: seed of weights and input.
    """

    num_layers: int = 36
    embed_dim: int = 768
    num_heads: int = 4
    seconds: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_layers", "embed_dim", "num_heads")
        check_positive(self, "seconds")
        check_seed(self, "seed")
        if self.seconds < FRAME:
            raise SettingsError(f"seconds must be at least {FRAME}, one frame, got {self.seconds}")
        if self.embed_dim % (2 * self.num_heads):
            raise SettingsError(
                "embed_dim must be a multiple of twice num_heads, because RoPE rotates pairs of features; got "
                f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
            )


def measure_attention_norms(
    config: AttentionNormsConfig, show: Callable[[str, str, float], None]
) -> dict[tuple[str, str], float]:
    """Return the Frobenius norm of the attention's output, averaged over layers, by position and kind.

    ``show`` is called with (position, kind, norm) after each measurement.
    """
    torch.manual_seed(config.seed)
    frames = round(config.seconds / FRAME)
    sound = 4 * F.avg_pool1d(torch.randn(1, 80, frames + 20), 21, 1).mT  # (1, frames, 80)
    norms = {}
    for position in POSITIONS:
        for kind, settings in KINDS.items():
            norms[position, kind] = _norm(config, sound, position=position, **settings)
            show(position, kind, norms[position, kind])
    return norms


def _norm(config: AttentionNormsConfig, sound: torch.Tensor, **settings: Any) -> float:
    sizes: dict[str, Any] = {
        "num_layers": config.num_layers,
        "embed_dim": config.embed_dim,
        "num_heads": config.num_heads,
    }
    torch.manual_seed(config.seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")  # about the large norms measured here
        model = SpeechModel(SpeechModelConfig(qk_norm="none", init_values=None, **sizes, **settings))
    with torch.no_grad(), recording(model) as layers:
        model(sound)
        norms = [layer.output_frobenius_norm for layer in layers if layer.output_frobenius_norm is not None]
    return torch.cat(norms).mean().item()
