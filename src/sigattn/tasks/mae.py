"""Masked autoencoding of images (He et al., 2022)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.shapes import Float


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoding(Task):
    """Mean squared error of the masked patches' normalised pixels. A batch is images (B, C, H, W).

    Metrics: ``loss``, with the same patches masked at every evaluation.
    """

    metric = "loss"
    has_labels = False

    def backbone(self, module: nn.Module) -> nn.Module:
        return module.get_submodule("encoder")

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return reconstruction_error(batch[0], *module(batch[0]))

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().evaluate(module, batches)


def reconstruction_error(
    images: Float[Tensor, "batch channels rows columns"],
    predicted: Float[Tensor, "batch patches pixels"],
    hidden: Float[Tensor, "batch patches"],
) -> Float[Tensor, ""]:
    """Return the mean squared error of the hidden patches' pixels, each patch normalised to mean 0 and variance 1."""
    patch = int((predicted.shape[-1] / images.shape[1]) ** 0.5)
    target = F.unfold(images.float(), patch, stride=patch).mT  # (B, patches, pixels)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    error = (predicted.float() - target).square().mean(-1)  # (B, patches)
    return (error * hidden).sum() / hidden.sum()
