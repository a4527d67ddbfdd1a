"""Checkpoints: folders that hold the whole state of a run, written atomically.

All processes write ``checkpoints/step-00000050`` together, with ``torch.distributed.checkpoint`` so that another number
of processes can read it, under another name until it is complete. The state is in safetensors files, which cannot hold
code; ``about.json`` has the step and the settings, and ``SHA256SUMS`` the checksums of all files, which are checked
before anything is loaded. What the functions need of ``torch.distributed.checkpoint`` they import themselves: it takes
a second, which commands that read and write no checkpoint need not wait for.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sigattn import files
from sigattn.distributed.process_mesh import ProcessMesh
from sigattn.distributed.sharding import to_local
from sigattn.validation import SettingsError, UserError

UNFINISHED, OLD = ".unfinished", ".old"
ABOUT = "about.json"
FORMAT = 2  # of checkpoints; increased when older ones can no longer be read
MAX_FILE_BYTES = 1 << 30  # of tensors in one file, which PyTorch copies in memory before it writes it


class CheckpointError(UserError):
    """A checkpoint cannot be read or written; the message is one line."""


def save(
    folder: Path, module: nn.Module, optimizer: Optimizer, step: int, settings: dict[str, Any], processes: ProcessMesh,
    *, average: nn.Module | None = None, keep_checkpoints: int = 2,
) -> Path:  # fmt: skip
    """Write the state after ``step`` steps, and delete all but the ``keep_checkpoints`` newest checkpoints.

    ``settings`` are stored as JSON in the same folder, and compared when the run is resumed. Returns the folder of the
    checkpoint. Raises CheckpointError if it cannot be written, for example on a full disk; older checkpoints are then
    unchanged.
    """
    final = folder / f"step-{step:08d}"
    unfinished = final.with_name(final.name + UNFINISHED)
    failure = f"cannot write the checkpoint {final}"
    try:
        with _errors_on_all_processes(failure, processes):
            if processes.is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
                for path in folder.iterdir():  # left half written or half deleted by an interrupted process
                    if path.suffix in (UNFINISHED, OLD):
                        shutil.rmtree(path)
                unfinished.mkdir()
                about = {"format": FORMAT, "step": step, "settings": settings}
                files.write_text(unfinished / ABOUT, json.dumps(about, sort_keys=True) + "\n")
        with _errors_on_all_processes(failure, processes):
            _write_tensors(unfinished, _state(module, optimizer, average)[0], processes)
            local_files = _file_names(unfinished)[_part_of(processes)]
            checksums = {name: files.file_sha256(unfinished / name) for name in local_files}
        all_checksums = processes.gather(checksums)
        with _errors_on_all_processes(failure, processes):
            if processes.is_main_process:
                files.write_checksums(unfinished, dict(item for local in all_checksums for item in local.items()))
                if final.exists():  # the run was resumed from an older checkpoint and has reached this step again
                    _remove(final)
                os.replace(unfinished, final)
                for older in list_checkpoints(folder)[:-keep_checkpoints]:
                    _remove(older)
    except CheckpointError:
        if processes.is_main_process:  # the disk may be full
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.startswith("step-") and not p.suffix)


def check_no_checkpoints(folder: Path, setting: str = "folder") -> None:
    """Raise SettingsError if a run folder, which ``setting`` names, holds checkpoints."""
    if list_checkpoints(folder / "checkpoints"):
        raise SettingsError(
            f"the run folder {folder} holds a run already: resume it, or name another folder", "resume", setting
        )


def load(
    path: Path, module: nn.Module, optimizer: Optimizer, settings: dict[str, Any], processes: ProcessMesh, *,
    average: nn.Module | None = None,
) -> int:  # fmt: skip
    """Load a checkpoint into a module and an optimiser built like those that were saved; return the steps done.

    Raises CheckpointError if the checkpoint is damaged, or comes from a run with another configuration.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    older = [p for p in list_checkpoints(path.parent) if p < path]
    advice = f"delete it to continue from {older[-1].name}" if older else "start in another run folder"
    failure = f"cannot read the checkpoint {path} ({advice})"
    with _errors_on_all_processes(failure, processes):
        about = files.read_json_object(path / ABOUT, version=FORMAT, step=int, settings=dict)
        if differing := sorted({*_file_names(path)} ^ files.read_checksums(path).keys()):
            raise files.FileFormatError(f"{path / differing[0]} is missing, or not in {files.CHECKSUMS}")
        files.check_files(path, _file_names(path)[_part_of(processes)])
    saved, settings = about["settings"], json.loads(json.dumps(settings))
    if "data" not in settings:
        saved.pop("data", None)
    if saved != settings:
        differing = sorted(k for k in saved.keys() | settings.keys() if saved.get(k) != settings.get(k))
        raise CheckpointError(
            f"{path} comes from a run that differs in {', '.join(differing)}; resume with the same settings, or start "
            "in another run folder"
        )
    tensors, model, optim = _state(module, optimizer, average)
    reader, no_dist = HuggingFaceStorageReader(str(path)), processes.world_size == 1
    with _errors_on_all_processes(failure, processes), _ignore_warnings():
        load_tensors(tensors, storage_reader=reader, no_dist=no_dist)
    with _ignore_warnings():
        set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=optim)
    if average is not None:
        average.load_state_dict({name: tensors[f"average.{name}"] for name in average.state_dict()})
    return int(about["step"])


def _state(
    module: nn.Module, optimizer: Optimizer, average: nn.Module | None
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return the tensors of a run by name, and the state dicts of module and optimiser that hold them.

    The optimiser's numbers are not saved: the run's settings and the step determine them.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    with _ignore_warnings():
        model, optim = get_state_dict(module, optimizer)
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in model.items()}
    of_parameters: Any = optim["state"]
    for parameter, values in of_parameters.items():
        tensors |= {f"optimizer.{parameter}.{name}": value for name, value in values.items()}
    if average is not None:
        tensors |= {f"average.{name}": value for name, value in average.state_dict().items()}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"a checkpoint holds tensors only, and {name} is a {type(value).__name__}")
    return tensors, model, optim


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], processes: ProcessMesh) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    written, file_of_tensor, total, storages = {}, {}, 0, set()
    for name, tensor in tensors.items():
        # safetensors refuses tensors that are not contiguous, and tensors that share memory (tied weights)
        storage = to_local(tensor).untyped_storage().data_ptr()
        written[name] = tensor.clone() if storage and storage in storages else tensor.contiguous()
        storages.add(storage)
        file_of_tensor[name] = 1 + total // MAX_FILE_BYTES
        total += tensor.numel() * tensor.element_size()
    writer = HuggingFaceStorageWriter(str(folder), file_of_tensor, save_distributed=True)
    with _ignore_warnings():
        save(written, storage_writer=writer, no_dist=processes.world_size == 1)


def _file_names(path: Path) -> list[str]:
    """Return the names of a checkpoint's files except that of the checksums."""
    return [ABOUT, *sorted(p.name for p in path.glob("*.safetensors"))]


def _part_of(processes: ProcessMesh) -> slice:
    """Return the files of which this process computes the checksums."""
    return slice(processes.rank, None, processes.world_size)


@contextmanager
def _errors_on_all_processes(failure: str, processes: ProcessMesh) -> Iterator[None]:
    """Wait for all processes; if one of them has failed, raise CheckpointError on all."""
    from torch.distributed.checkpoint.api import CheckpointException

    error: BaseException | None = None
    try:
        yield
    except (OSError, files.FileFormatError, CheckpointException) as caught:
        error = caught
    if processes.reduce_max(error is not None):
        reason = "another process failed" if error is None else _reason(error)
        raise CheckpointError(f"{failure}: {reason}") from error


def _reason(error: BaseException) -> str:
    """Return why a file could not be read or written; for a CheckpointException, on the first process that failed."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, files.FileFormatError) else f"{type(error).__name__}: {error}"


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
