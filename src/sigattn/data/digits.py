"""Scikit-learn's handwritten digits, augmented."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.data.dataset import Batch, Data, draw_samples, sample_generator
from sigattn.optional import require


class Digits(Data):
    """1,797 handwritten digits of 8 × 8 pixels (scikit-learn), 360 of them held out.

    Training images are augmented by small random shifts, rotations, scales and noise.

    Args:
        num_views: number of augmented views of each image in a batch.
        upscale: factor by which the images are enlarged.

    Raises:
        MissingPackageError: if scikit-learn is missing.
    """

    def __init__(self, *, num_views: int = 1, upscale: int = 1) -> None:
        digits = require("sklearn.datasets", "the handwritten digits", "'sigattn[vision]'").load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8) in -1 … 1
        if upscale > 1:
            images = F.interpolate(images, scale_factor=float(upscale), mode="bilinear", align_corners=False)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self._train, self._held = order[360:], order[:360]
        self._images, self._labels = images, torch.tensor(digits.target)
        self.classes: list[str] = [str(digit) for digit in range(10)]
        self.num_views = num_views

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return images (B, 1, 8, 8), one tensor per view, and labels (B,) if there is one view."""
        index = self._train[torch.tensor([i for i, _ in draw_samples(len(self._train), step, size, seed)])]
        generator = sample_generator(seed, step, 0)  # for the whole batch, so that it does not depend on the shard
        views = [_vary(self._images[index], generator) for _ in range(self.num_views)]
        batch = views if self.num_views > 1 else [*views, self._labels[index]]
        return tuple(part[shard[0] :: shard[1]] for part in batch)

    def validation(self, size: int) -> Iterable[Batch]:
        """Return the held-out images and labels; several views are augmented, in the same way at every call."""
        if self.num_views == 1:
            return [(self._images[index], self._labels[index]) for index in self._held.split(size)]
        generator = torch.Generator().manual_seed(0)
        parts = [self._images[index] for index in self._held.split(size)]
        return [tuple(_vary(images, generator) for _ in range(self.num_views)) for images in parts]

    def train_and_held_out(self) -> tuple[Batch, Batch]:
        """Return images and labels of the training part and of the held-out part."""
        parts = [(self._images[index], self._labels[index]) for index in (self._train, self._held)]
        return parts[0], parts[1]

    @property
    def fingerprint(self) -> str:
        """Hash of the images and the augmentation."""
        kind = f"digits of {self._images.shape[-1]}, {self.num_views} views, strength 1.0"
        return hashlib.sha256(self._images.numpy().tobytes() + kind.encode()).hexdigest()


def _vary(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images that are shifted, rotated and scaled at random, with noise."""

    def draw(limit: float) -> Tensor:
        return (2 * torch.rand(len(images), generator=generator) - 1) * limit

    angle, scale = draw(math.pi / 12), 1 + draw(0.15)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    shift = (draw(0.25), draw(0.25))  # in units of half the width: up to one of 8 pixels
    affine = torch.stack([cos, -sin, shift[0], sin, cos, shift[1]], -1).view(-1, 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    moved = F.grid_sample(images + 1, grid, align_corners=False) - 1  # pads with the background, -1
    return moved + 0.1 * torch.randn(images.shape, generator=generator)
