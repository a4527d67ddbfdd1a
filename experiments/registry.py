"""All experiments, by name."""

from __future__ import annotations

from experiments import (
    bias_rules,
    causal_bias,
    closed_form,
    conversion,
    dropped_keys,
    embeddings,
    k_summation,
    language_ablations,
    lr_sensitivity,
    pair_repeat,
    position_ablation,
    sigma_accuracy,
    small_models,
    speech_tables,
    speed,
    train_losses,
    vision_ablations,
)
from experiments.experiment import Experiment, ExperimentError

_MODULES = (
    closed_form,
    train_losses,
    position_ablation,
    lr_sensitivity,
    vision_ablations,
    speech_tables,
    language_ablations,
    k_summation,
    pair_repeat,
    speed,
    sigma_accuracy,
    bias_rules,
    causal_bias,
    conversion,
    dropped_keys,
    embeddings,
    small_models,
)
EXPERIMENTS: dict[str, Experiment] = {e.name: e for module in _MODULES for e in module.EXPERIMENTS}


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name.

    Raises:
        ExperimentError: if there is none.
    """
    if name not in EXPERIMENTS:
        raise ExperimentError(f"no experiment is called {name!r}; python -m experiments --list lists them")
    return EXPERIMENTS[name]
