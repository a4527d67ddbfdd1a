"""Augmentations of images, made of torchvision's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from sigattn.optional import explain_import_errors

Augmentation = Literal["none", "crop", "randaugment", "simclr", "multicrop"]
SMALL_VIEWS = 8  # of "multicrop", with DINO's two large ones
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the channels


def transforms(augmentation: Augmentation, size: int, jitter: float = 0.5) -> Callable[[Any], Any]:
    """Return torchvision's transform from a PIL image to a tensor, or to a list of tensors if there are views.

    Raises:
        MissingPackageError: if torchvision is missing or cannot be imported.
    """
    with explain_import_errors("vision"):
        from torchvision.transforms import v2
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]

    def crop(pixels: int, low: float, *more: Any) -> Any:
        return v2.Compose([v2.RandomResizedCrop(pixels, (low, 1.0)), v2.RandomHorizontalFlip(), *more, *finish])

    if augmentation == "none":
        return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), *finish])
    if augmentation == "crop":
        return crop(size, 0.2)
    if augmentation == "randaugment":
        return crop(size, 0.08, v2.RandAugment())
    colours = v2.ColorJitter(0.8 * jitter, 0.8 * jitter, 0.8 * jitter, 0.2 * jitter)

    def view(pixels: int, scale: tuple[float, float], blur: float = 0.5, solarize: float = 0.0) -> Any:
        return v2.Compose(
            [
                v2.RandomResizedCrop(pixels, scale),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([colours], 0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], blur),
                v2.RandomSolarize(128, solarize),
                *finish,
            ]
        )

    if augmentation == "simclr":
        return _Views([view(size, (0.08, 1.0))] * 2)
    small = 16 * round(size * 96 / 224 / 16) or 16
    large = (0.4, 1.0)
    return _Views([view(size, large, 1.0), view(size, large, 0.1, 0.2)] + [view(small, (0.05, 0.4))] * SMALL_VIEWS)


class _Views:
    def __init__(self, transforms: list[Callable[[Any], Tensor]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> list[Tensor]:
        return [transform(image) for transform in self.transforms]
