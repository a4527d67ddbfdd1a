"""Optimisers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from sigattn.nn.initialization import mup_simple
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError


def make_optimizer(module: nn.Module, config: TrainConfig, width: int) -> Optimizer:
    """The optimiser of a configuration. Matrices decay: a norm's scale, or a bias, has no reason to be small.

    Each group of parameters has a "factor", by which the schedule's rate is multiplied.

    Args:
        module: its parameters that want a gradient are trained.
        config: see ``TrainConfig``.
        width: of the model, for μP-simple.
    """
    factors = mup_simple(module, width) if config.mup_simple else {}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.dim() >= 2 else 0.0
            groups.setdefault((decay, factors.get(name, 1.0)), []).append(parameter)
    options: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "factor": factor, "lr": config.learning_rate * factor}
        for (decay, factor), parameters in groups.items()
    ]
    if config.optimizer == "adamw":
        return AdamW(options, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
    if config.optimizer == "adam":
        return Adam(options, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
    if config.optimizer == "adagrad":
        return Adagrad(options, lr=config.learning_rate)
    raise SettingsError(f'optimizer must be "adamw", "adam" or "adagrad", got {config.optimizer!r}')


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give each group its part of a rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
