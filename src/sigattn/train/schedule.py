"""Learning-rate schedules."""

from __future__ import annotations

import math

from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError


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
    if config.schedule == "steps":
        halvings = 0 if step < config.decay_start else 1 + (step - config.decay_start) // config.decay_every
        return warmup * 0.5**halvings
    raise SettingsError(f'schedule must be "cosine", "steps" or "constant", got {config.schedule!r}')
