"""Checkpoints: folders that hold the whole state of a run, written atomically.

All processes write ``checkpoints/step-00000050`` together (with ``torch.distributed.checkpoint``, so that another
number of processes can read it), under another name until it is complete. What the functions need of that package they
import themselves: it takes a second, which commands that read and write no checkpoint need not wait for.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sigattn.distributed.process_mesh import ProcessMesh
from sigattn.files import FileFormatError, read_json_object
from sigattn.validation import SettingsError

UNFINISHED, OLD = ".unfinished", ".old"
FORMAT = 1  # of checkpoints; increased when older ones can no longer be read


class CheckpointError(Exception):
    """A checkpoint cannot be read or written; the message is one line."""


def save(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    step: int,
    settings: dict[str, Any],
    processes: ProcessMesh,
    *,
    average: nn.Module | None = None,
    keep_checkpoints: int = 2,
) -> Path:
    """Write the state after ``step`` steps, and delete all but the ``keep_checkpoints`` newest checkpoints.

    ``settings`` are stored as JSON in the same folder, and compared when the run is resumed.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: if it cannot be written, for example on a full disk; older checkpoints are then unchanged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write_shards

    final = folder / f"step-{step:08d}"
    unfinished = final.with_name(final.name + UNFINISHED)
    if processes.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        unfinished.mkdir()
        about = {"format": FORMAT, "step": step, "settings": settings}
        (unfinished / "about.json").write_text(json.dumps(about, sort_keys=True) + "\n")
    processes.barrier()
    try:
        with _ignore_warnings():
            state = _state(module, optimizer, average)
            write_shards(state, checkpoint_id=unfinished, no_dist=processes.world_size == 1)
    except CheckpointException as error:
        raise CheckpointError(f"cannot write the checkpoint {unfinished}: {_reason(error)}") from error
    processes.barrier()
    if processes.is_main_process:
        if final.exists():  # the run was resumed from an older checkpoint and has reached this step again
            _remove(final)
        os.replace(unfinished, final)
        for older in list_checkpoints(folder)[:-keep_checkpoints]:
            _remove(older)
    processes.barrier()
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.startswith("step-") and not p.suffix)


def check_no_checkpoints(folder: Path) -> None:
    """Raise SettingsError if a run folder holds checkpoints."""
    if list_checkpoints(folder / "checkpoints"):
        raise SettingsError(
            f"the run folder {folder} holds a run already: resume it, or name another folder", "resume", "folder"
        )


def load(
    path: Path,
    module: nn.Module,
    optimizer: Optimizer,
    settings: dict[str, Any],
    processes: ProcessMesh,
    *,
    average: nn.Module | None = None,
) -> int:
    """Load a checkpoint into a module and an optimiser that were built like those that were saved.

    Returns:
        The number of steps done.

    Raises:
        CheckpointError: if the checkpoint is damaged, or comes from a run with another configuration.
    """
    from torch.distributed.checkpoint.state_dict import set_state_dict

    step, saved = _read_about(path)
    settings = json.loads(json.dumps(settings))
    if "data" not in settings:
        saved.pop("data", None)
    if saved != settings:
        differing = sorted(k for k in saved.keys() | settings.keys() if saved.get(k) != settings.get(k))
        raise CheckpointError(
            f"{path} comes from a run that differs in {', '.join(differing)}; resume with the same settings, or start "
            "in another run folder"
        )
    state = _state(module, optimizer, average)
    _read(path, state, processes.world_size)
    with _ignore_warnings():
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if average is not None:
        average.load_state_dict(state["average"])
    return step


def load_weights(path: Path, module: nn.Module) -> None:
    """Load the weights of a checkpoint, on one process, into a module that was built like the one that was saved.

    Raises:
        CheckpointError: if the checkpoint is damaged, or lacks a weight of the module.
    """
    _read_about(path)
    state = {"model": module.state_dict()}
    _read(path, state)
    module.load_state_dict(state["model"])


def _read_about(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the number of steps and the settings of a checkpoint."""
    try:
        about = read_json_object(path / "about.json")
        if about.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} was written by another version of sigattn: it has format {about.get('format')}, and this "
                f"version reads {FORMAT}; start in another run folder"
            )
        about = read_json_object(path / "about.json", step=int, settings=dict)
    except (OSError, FileFormatError) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
    return about["step"], about["settings"]


def _state(module: nn.Module, optimizer: Optimizer, average: nn.Module | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    with _ignore_warnings():
        model, optim = get_state_dict(module, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optim}
    if average is not None:
        state["average"] = average.state_dict()
    return state


def _read(path: Path, state: dict[str, Any], world_size: int = 1) -> None:
    """Read the values of a checkpoint into a state of the same keys, or of some of them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from sigattn.train import checkpoint_reader

    try:
        with _ignore_warnings():
            reader, planner = checkpoint_reader.CheckpointReader(path), checkpoint_reader.CheckpointPlanner()
            load(state, storage_reader=reader, planner=planner, no_dist=world_size == 1)
    except CheckpointException as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: its files are damaged ({_reason(error)})") from error


def _reason(error: Any) -> str:
    """Return the error of the first process that failed, from a CheckpointException."""
    return repr(next(iter(error.failures.values()))[0])


def _tidy(folder: Path) -> None:
    """Delete checkpoints that an interrupted process left half written or half deleted."""
    for path in folder.iterdir():
        if path.suffix in (UNFINISHED, OLD):
            shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Rename a checkpoint, then delete it, so that a partly deleted one is never taken for a complete one."""
    old = path.with_name(path.name + OLD)
    os.replace(path, old)
    shutil.rmtree(old)


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Suppress the warnings that PyTorch's checkpoint code gives about its own internals."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield
