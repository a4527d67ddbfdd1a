"""All experiments, by name."""

from __future__ import annotations

from sigattn.experiments import (
    attention_maps,
    bias_rules,
    causal_bias,
    closed_form,
    dropped_keys,
    k_summation,
    language_ablations,
    lr_sensitivity,
    pair_repeat,
    position_ablation,
    sigma_accuracy,
    speech,
    speed,
    train_losses,
    vision_ablations,
)
from sigattn.experiments.experiment import Experiment, ExperimentError

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        closed_form.FLOPS,
        closed_form.REGULARITY,
        closed_form.NORMS,
        train_losses.EXPERIMENT,
        position_ablation.EXPERIMENT,
        lr_sensitivity.EXPERIMENT,
        lr_sensitivity.BIAS,
        vision_ablations.EXPERIMENT,
        vision_ablations.LAYERSCALE_FREE,
        vision_ablations.RELAXATIONS,
        speech.BIAS,
        speech.STRUCTURE,
        language_ablations.EXPERIMENT,
        language_ablations.POWER,
        k_summation.EXPERIMENT,
        k_summation.EVOLUTION,
        attention_maps.EXPERIMENT,
        pair_repeat.EXPERIMENT,
        speed.ATTENTION,
        speed.CROSSING,
        speed.VIT,
        sigma_accuracy.EXPERIMENT,
        bias_rules.EXPERIMENT,
        causal_bias.EXPERIMENT,
        dropped_keys.EXPERIMENT,
    )
}


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name.

    Raises:
        ExperimentError: if there is none.
    """
    if name not in EXPERIMENTS:
        raise ExperimentError(f"no experiment is called {name!r}; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
