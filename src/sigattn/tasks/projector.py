"""Projector networks that self-supervised objectives add to a backbone during training."""

from __future__ import annotations

import itertools

from torch import nn

from sigattn.tasks.batch_norm import SyncBatchNorm


def projector(widths: list[int]) -> nn.Sequential:
    """Return an MLP of these widths with batch norm and ReLU between layers and a final batch norm without parameters.

    This is the projector of MoCo v3 (Chen et al., 2021), from which the paper's recipes for SimCLR and BYOL come. Batch
    norm is synchronised over all processes.
    """
    parts: list[nn.Module] = []
    last = len(widths) - 2
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Linear(inputs, outputs, bias=False))
        parts.append(SyncBatchNorm(outputs, affine=i < last))
        if i < last:
            parts.append(nn.ReLU())
    return nn.Sequential(*parts)
