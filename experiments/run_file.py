"""Run files: the ``sigattn train`` commands of an experiment at the paper's scale, one line for each training."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from experiments.experiment import ExperimentError, Setting

FILE = "runs.sh"
# by name: a recipe, and changed fields of its model or, as "training.NAME", settings of training
Trainings = Mapping[str, tuple[str, dict[str, Any]]]


def train_command(recipe: str, changes: Mapping[str, Any], data: str, folder: str) -> str:
    """Return the command that trains a recipe with changes (``Trainings``)."""
    words = ["sigattn", "train", recipe, "--data", data, "--folder", folder]
    for name, value in changes.items():
        flag = name if name.startswith("training.") else f"model.{name}"
        words += [f"--{flag.replace('_', '-')}", str(value)]
    return shlex.join(words)


def write_run_file(setting: Setting, trainings: Trainings, data: str, then: str) -> ExperimentError:
    """Write the commands of all trainings and seeds into ``setting.folder``, and return the error that names the file.

    Args:
        setting: the setting, at the paper's scale.
        trainings: the trainings.
        data: path of the data in the commands.
        then: the command that evaluates a finished run.
    """
    setting.check_variants(trainings)
    lines = ["# run each line on the recipe's hardware: sigattn recipes RECIPE names it"]
    for seed in range(max(map(setting.num_seeds, trainings))):
        for name, (recipe, changes) in trainings.items():
            if seed >= setting.num_seeds(name):
                continue
            folder = "runs/" + "".join(c if c.isalnum() or c in "-." else "_" for c in f"{name}-{seed}")
            lines += [f"# {name}, seed {seed}", train_command(recipe, {**changes, "training.seed": seed}, data, folder)]
    count = sum(map(setting.num_seeds, trainings))
    path = setting.folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return ExperimentError(
        f"at the paper's scale these are {count} trainings of large models: run sigattn train "
        f"with the lines of {path}, and then {then}"
    )
