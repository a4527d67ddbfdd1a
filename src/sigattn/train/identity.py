"""Settings that must be the same when a run is resumed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sigattn.train.config import TrainConfig

# settings that may change when a run is resumed: they change rounding, and what is drawn at random within a step
CHANGEABLE_SETTINGS = {
    "parallel",
    "tensor_parallel",
    "context_parallel",
    "grad_accum_steps",
    "compile",
    "checkpoint_activations",
}
CHANGEABLE_SETTINGS |= {
    "wandb",
    "keep_checkpoints",
    "validate_every",
    "eval_batch_size",
    "checkpoint_every",
    "log_attention_every",
    "statistics_every",
}


def settings_to_resume(task: Any, model: Any, training: TrainConfig, data: str) -> dict[str, Any]:
    """Return the settings that must be the same when a run is resumed.

    Args:
        task, model, training: the configuration. data: ``Data.fingerprint``.
    """
    fixed = {name: value for name, value in asdict(training).items() if name not in CHANGEABLE_SETTINGS}
    settings = {f"task.{name}": value for name, value in asdict(task).items()}
    return {**asdict(model), **fixed, **settings, "task": type(task).__name__, "data": data}
