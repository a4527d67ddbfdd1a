"""Learning-rate schedules."""

from __future__ import annotations

import math


def cosine_with_warmup(step: int, *, steps: int, warmup_steps: int, final: float) -> float:
    """The factor of the peak learning rate at a step (0 … steps - 1).

    It rises linearly over the warm-up, then falls along a half cosine and reaches ``final`` at the last step.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
