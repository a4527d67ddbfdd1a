"""Synthetic recordings: a tone for each digit, in the layout of the Free Spoken Digit Dataset."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from experiments.experiment import ExperimentError

RATE = 8000
SECONDS = 0.3
SPEAKERS = ("low", "high")


def write_tones(folder: Path) -> Path:
    """Write eight recordings of each digit by each of two speakers, unless they exist; returns the folder.

    Raises:
        ExperimentError: if soundfile is not installed.
    """
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise ExperimentError("recordings are written by soundfile: pip install 'sigattn[speech]'") from error
    recordings = folder / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    time = torch.arange(round(RATE * SECONDS)) / RATE
    generator = torch.Generator().manual_seed(0)
    for digit in range(10):
        for octave, speaker in enumerate(SPEAKERS, 1):
            for index in range(8):
                wave = torch.sin(2 * math.pi * 120 * octave * 1.25**digit * time)
                wave = 0.3 * wave + 0.01 * torch.randn(wave.shape, generator=generator)
                path = recordings / f"{digit}_{speaker}_{index}.wav"
                if not path.exists():
                    soundfile.write(path, wave.numpy(), RATE)
    return folder
