"""Log-mel frames of speech, and SpecAugment."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def log_mel(waveform: Tensor, sample_rate: int, num_mel_bins: int = 80) -> Tensor:
    """Return log-mel frames (T, num_mel_bins): 25 ms every 10 ms, each bin normalised to mean 0 and variance 1.

    Args:
        waveform: (samples,).
        sample_rate: sampling rate in Hz.
        num_mel_bins: number of mel bins.
    """
    window, hop = round(0.025 * sample_rate), round(0.01 * sample_rate)
    size = max(512, 1 << (window - 1).bit_length())
    spectrum = torch.stft(
        waveform, size, hop, window, torch.hann_window(window), center=True, pad_mode="constant", return_complex=True
    )
    energy = mel_filters(size, sample_rate, num_mel_bins) @ spectrum.abs().square()  # (mels, frames)
    frames = energy.clamp(min=1e-10).log().mT
    return (frames - frames.mean(0)) / (frames.var(0, unbiased=False) + 1e-5).sqrt()


@functools.cache
def mel_filters(fft_size: int, sample_rate: int, num_mel_bins: int) -> Tensor:
    """Return triangular filters (num_mel_bins, fft_size / 2 + 1) from 20 Hz to half the sample rate.

    They are evenly spaced on the mel scale 2595 log₁₀(1 + f / 700).
    """
    low, high = (2595 * math.log10(1 + f / 700) for f in (20.0, sample_rate / 2))
    corners = 700 * (10 ** (torch.linspace(low, high, num_mel_bins + 2, device="cpu") / 2595) - 1)
    bins = torch.linspace(0, sample_rate / 2, fft_size // 2 + 1, device="cpu")
    rising = (bins - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - bins) / (corners[2:] - corners[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


def spec_augment(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Apply SpecAugment (Park et al., 2019) to frames (T, num_mel_bins), with the paper's numbers.

    Two masks of at most 30 frequencies, and ten of at most 50 frames and a tenth of the sample, become 0, the mean.
    """
    frames = frames.clone()

    def mask(rows: Tensor, limit: int) -> None:
        width = int(torch.randint(min(limit, len(rows)) + 1, (), generator=generator))
        start = int(torch.randint(len(rows) - width + 1, (), generator=generator))
        rows[start : start + width] = 0

    for _ in range(2):
        mask(frames.T, 30)
    for _ in range(10):
        mask(frames, min(50, len(frames) // 10))
    return frames
