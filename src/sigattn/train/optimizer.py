"""Optimisers and learning rates of a ``TrainConfig``."""

import math
from typing import Any

from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from sigattn.nn.initialization import is_matrix, mup_simple
from sigattn.train.config import TrainConfig


def make_optimizer(module: nn.Module, config: TrainConfig, embed_dim: int) -> Optimizer:
    """Return the optimiser of a configuration. Weight decay applies to matrices only, not to biases or norms.

    Each group of parameters has a "factor", by which the learning rate of the schedule is multiplied. ``embed_dim`` is
    the width of the model, used by μP-simple.
    """
    factors = mup_simple(module, embed_dim) if config.mup_simple else {}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay, factor = config.weight_decay if is_matrix(parameter) else 0.0, factors.get(name, 1.0)
            if config.independent_decay:  # AdamW multiplies by the learning rate, schedule · peak · factor
                decay /= config.learning_rate * factor
            groups.setdefault((decay, factor), []).append(parameter)
    options: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "factor": factor, "lr": config.learning_rate * factor}
        for (decay, factor), parameters in groups.items()
    ]
    if config.optimizer in ("adamw", "adam"):
        kind = AdamW if config.optimizer == "adamw" else Adam
        # One kernel for all parameters: in small models on a CPU a loop over them is 5 % of a step. It does not take
        # the mixture of plain and distributed tensors that tensor parallelism has.
        parameters = [parameter for group in options for parameter in group["params"]]
        fused = all(type(p) is nn.Parameter and p.device.type in ("cpu", "cuda") for p in parameters)
        return kind(options, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
    return Adagrad(options, lr=config.learning_rate)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of each parameter group to ``rate`` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Return the factor of the peak learning rate at a step (0 … max_steps - 1).

    It increases linearly over the warm-up. Then "cosine" decreases along a half cosine and reaches
    ``final_learning_rate`` at the last step, "steps" halves at ``decay_start`` and every ``decay_every`` steps after
    it, and "constant" stays at 1.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant" or (config.schedule == "cosine" and warmup < 1):
        return warmup
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, config.max_steps - 1 - config.warmup_steps)
        final = config.final_learning_rate
        return final + (1 - final) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2
    halvings = 0 if step < config.decay_start else 1 + (step - config.decay_start) // config.decay_every
    return warmup * 0.5**halvings
