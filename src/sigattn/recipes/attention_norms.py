"""How large the attention's output is before training, for each position and bias (App. ASR, "Results and Ablations").

    sigattn norms                      # a minute on 2 cores; prints the table
    sigattn norms --layers 6           # 10 seconds

Expected, as in the paper: without a bias CAPE > RoPE > ALiBi, each orders of magnitude above softmax (the paper names
80k, 40k, 20k and 200); with b = -log n all of them near softmax. The models are the paper's speech transformers at
their initialisation (truncated normal 0.02), without QK-norm and LayerScale, and hear 15 seconds of noise that is as
smooth as speech: frames of a moving average of 210 ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.validation import SettingsError, check_at_least, check_positive, check_seed

FRAME = 0.01  # seconds
POSITIONS = ("cape", "rope", "alibi")
KINDS = ("softmax", "sigmoid, b = 0", "sigmoid, b = -log n")


@dataclass(frozen=True, kw_only=True)
class AttentionNorms:
    """What is measured.

    Attributes:
        layers: number of blocks.
        width: features of a position.
        heads: number of attention heads.
        seconds: of sound.
        seed: of weights and sound.
    """

    layers: int = 36
    width: int = 768
    heads: int = 4
    seconds: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, self, "layers", "width", "heads")
        check_positive(self, "seconds")
        check_seed(self, "seed")
        if self.seconds < FRAME:
            raise SettingsError(f"seconds must be at least {FRAME}, one frame, got {self.seconds}")
        if self.width % (2 * self.heads):
            both = f"got width={self.width}, heads={self.heads}"
            raise SettingsError(
                f"width must be a multiple of twice the heads, for RoPE turns pairs of features; {both}"
            )


def run(options: AttentionNorms, show: Callable[[str, str, float], None]) -> dict[tuple[str, str], float]:
    """The attention output's Frobenius norm, averaged over layers, by position and kind; shown as it is found."""
    torch.manual_seed(options.seed)
    frames = round(options.seconds / FRAME)
    sound = 4 * F.avg_pool1d(torch.randn(1, 80, frames + 20), 21, 1).mT  # (1, frames, 80)
    found = {}
    for position in POSITIONS:
        for kind in KINDS:
            found[position, kind] = _norm(options, position, kind, sound)
            show(position, kind, found[position, kind])
    return found


def _norm(options: AttentionNorms, position: str, kind: str, sound: torch.Tensor) -> float:
    settings: dict[str, Any] = {
        "position": position,
        "activation": "softmax" if kind == "softmax" else "sigmoid",
        "bias": {"softmax": None, "sigmoid, b = 0": 0.0, "sigmoid, b = -log n": "log_sample"}[kind],
        "qk_norm": "none",
        "layer_scale": None,
    }
    config = SpeechModelConfig(layers=options.layers, width=options.width, heads=options.heads, **settings)
    torch.manual_seed(options.seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Ramapuram")  # which is what is to be seen
        model = SpeechModel(config)
    with torch.no_grad(), model.watching() as layers:
        model(sound)
        norms = [layer.attention_norm for layer in layers if layer.attention_norm is not None]
    return torch.cat(norms).mean().item()
