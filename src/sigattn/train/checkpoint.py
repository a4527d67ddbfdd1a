"""Checkpoints: one safetensors file that holds a run's whole state, written so that it is never half there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message is one line."""


def save(path: Path, model: nn.Module, optimizer: Optimizer, step: int, about: dict[str, Any]) -> None:
    """Write the model (``model.*``), the optimiser (``optimizer.*``), the random state and the number of steps done.

    ``about`` is kept as JSON beside the tensors, and compared when the run is resumed.
    """
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    tensors["random_state"] = torch.get_rng_state()
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"step": str(step), "about": json.dumps(about, sort_keys=True)})
    os.replace(unfinished, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer, about: dict[str, Any]) -> int:
    """Put a checkpoint's state into a model and an optimiser made as those that were saved; gives the steps done.

    Raises:
        CheckpointError: if the file is broken, or comes from a run with another configuration.
    """
    metadata, tensors = read(path)
    saved = json.loads(metadata["about"])
    if saved != about:
        differing = sorted(k for k in saved.keys() | about.keys() if saved.get(k) != about.get(k))
        raise CheckpointError(
            f"{path} comes from a run that differs in {', '.join(differing)}; resume with the same settings, or start "
            "in another run folder"
        )
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if state:
            optimizer.state[parameter] = state
    torch.set_rng_state(tensors["random_state"])
    return int(metadata["step"])


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A checkpoint's metadata and tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return file.metadata(), {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
