"""The small networks that self-supervised objectives put behind a backbone, and lay aside afterwards."""

from __future__ import annotations

import itertools

from torch import nn

from sigattn.tasks.batch_norm import SharedBatchNorm


def projector(widths: list[int]) -> nn.Sequential:
    """Linear layers of these widths; batch norm and ReLU between them, and batch norm without parameters at the end.

    The form of MoCo v3 (Chen et al., 2021), which the paper's recipes for SimCLR and BYOL come from. Batch norm is over
    the samples of all processes.
    """
    parts: list[nn.Module] = []
    last = len(widths) - 2
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Linear(inputs, outputs, bias=False))
        parts.append(SharedBatchNorm(outputs, affine=i < last))
        if i < last:
            parts.append(nn.ReLU())
    return nn.Sequential(*parts)
