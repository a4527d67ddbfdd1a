"""Masked autoencoding of images (He et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.models.autoencoder import reconstruction_error


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoding(Task):
    """Mean squared error of the masked patches' normalised pixels. A batch is images (B, C, H, W).

    Metrics: ``loss``, with the same patches masked at every evaluation.
    """

    metric = "loss"
    has_labels = False

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the encoder."""
        return module.get_submodule("encoder")

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the reconstruction error of the masked patches (``reconstruction_error``)."""
        return reconstruction_error(batch[0], *module(batch[0]))

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().evaluate(module, batches)
