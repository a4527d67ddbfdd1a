"""The paper's figures and tables as experiments (``sigattn reproduce``), the demo and the comparison of all recipes.

``EXPERIMENTS`` has every experiment, by name.
"""

from sigattn.experiments.datasets import load_dataset, load_held_out
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Setting
from sigattn.experiments.registry import EXPERIMENTS, find_experiment

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "ExperimentError",
    "Finding",
    "Result",
    "Setting",
    "find_experiment",
    "load_dataset",
    "load_held_out",
]
