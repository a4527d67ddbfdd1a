"""All experiments, by name."""

from __future__ import annotations

from sigattn.experiments import (
    closed_form,
    k_summation,
    lr_sensitivity,
    norm_structure,
    pair_repeat,
    position_ablation,
    vision_ablations,
)
from sigattn.experiments.experiment import Experiment, ExperimentError

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        closed_form.FLOPS,
        closed_form.REGULARITY,
        closed_form.NORMS,
        position_ablation.EXPERIMENT,
        lr_sensitivity.EXPERIMENT,
        lr_sensitivity.BIAS,
        vision_ablations.EXPERIMENT,
        norm_structure.EXPERIMENT,
        k_summation.EXPERIMENT,
        k_summation.EVOLUTION,
        pair_repeat.EXPERIMENT,
    )
}


def find(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ExperimentError: if there is none.
    """
    if name not in EXPERIMENTS:
        raise ExperimentError(f"no experiment is called {name!r}; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
