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
        labels: include labels in the batches; ignored if there are several views.
        strength: factor of the augmentation; 0 turns it off.
        upscale: factor by which the images are enlarged.

    Raises:
        MissingPackageError: if scikit-learn is missing.
    """

    def __init__(self, *, num_views: int = 1, labels: bool = True, strength: float = 1.0, upscale: int = 1) -> None:
        digits = require("sklearn.datasets", "the handwritten digits", "'sigattn[vision]'").load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8) in -1 … 1
        if upscale > 1:
            images = F.interpolate(images, scale_factor=float(upscale), mode="bilinear", align_corners=False)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self._train, self._held = order[360:], order[:360]
        self._images, self._labels = images, torch.tensor(digits.target)
        self.classes: list[str] = [str(digit) for digit in range(10)]
        self.num_views = num_views
        self.labels = labels
        self.strength = strength

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return images (B, 1, 8, 8), one tensor per view, and labels (B,) if there is one view."""
        chosen = draw_samples(len(self._train), step, size, seed)
        index = self._train[torch.tensor([i for i, _ in chosen])]
        generator = sample_generator(seed, step, 0)  # for the whole batch, so that it does not depend on the shard
        views = [self._vary(self._images[index], generator)[shard[0] :: shard[1]] for _ in range(self.num_views)]
        labels = self._labels[index][shard[0] :: shard[1]]
        return (*views, labels) if self.labels and self.num_views == 1 else tuple(views)

    def validation(self, size: int) -> Iterable[Batch]:
        """Return the held-out images; several views are augmented, in the same way at every call."""
        generator = torch.Generator().manual_seed(0)
        batches: list[Batch] = []
        for index in self._held.split(size):
            images = self._images[index]
            if self.num_views > 1:
                batches.append(tuple(self._vary(images, generator) for _ in range(self.num_views)))
            else:
                batches.append((images, self._labels[index]) if self.labels else (images,))
        return batches

    def train_and_held_out(self) -> tuple[Batch, Batch]:
        """Return images and labels of the training part and of the held-out part."""
        parts = [(self._images[index], self._labels[index]) for index in (self._train, self._held)]
        return parts[0], parts[1]

    @property
    def fingerprint(self) -> str:
        """Hash of the images and the augmentation."""
        kind = f"digits of {self._images.shape[-1]}, {self.num_views} views, strength {self.strength}"
        return hashlib.sha256(self._images.numpy().tobytes() + kind.encode()).hexdigest()

    def _vary(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if not self.strength:
            return images
        n, s = len(images), self.strength

        def draw(limit: float) -> Tensor:
            return (2 * torch.rand(n, generator=generator) - 1) * limit * s

        angle, scale = draw(math.pi / 12), 1 + draw(0.15)
        cos, sin = scale * angle.cos(), scale * angle.sin()
        shift = (draw(0.25), draw(0.25))  # in units of half the width: up to one of 8 pixels
        affine = torch.stack([cos, -sin, shift[0], sin, cos, shift[1]], -1).view(n, 2, 3)
        grid = F.affine_grid(affine, list(images.shape), align_corners=False)
        moved = F.grid_sample(images + 1, grid, align_corners=False) - 1  # pads with the background, -1
        return moved + 0.1 * s * torch.randn(images.shape, generator=generator)
