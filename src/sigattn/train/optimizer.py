"""Optimisers."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW


def adamw(model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> AdamW:
    """AdamW that decays matrices only: a norm's scale has no reason to be small."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8)
