"""Save and load models: ``config.json`` holds the configuration, ``model.safetensors`` the weights.

``SHA256SUMS`` has the checksums of both, which are checked when a model is loaded.
"""

import dataclasses
import errno
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from sigattn import files
from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.config import ModelConfig
from sigattn.models.language import LanguageModelConfig
from sigattn.models.speech import SpeechModelConfig
from sigattn.models.vision import ViTConfig
from sigattn.optional import require
from sigattn.validation import SettingsError, UserError

Config = TypeVar("Config")
MODELS: dict[str, type[ModelConfig]] = {
    "language": LanguageModelConfig,
    "vision": ViTConfig,
    "masked-autoencoder": MaskedAutoencoderConfig,
    "speech": SpeechModelConfig,
}
"""Configurations of the models that ``save`` and ``load`` support, by name; a model of one's own is added to it."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SAFETENSORS = "safetensors", "files of models", "'sigattn[train]'"  # package, its use, and what installs it


class ModelError(UserError):
    """Raised for a model folder that cannot be loaded; the message is one line."""


def build(config: ModelConfig, device: torch.device | str | None = None) -> nn.Module:
    """Create a configuration's model on a device, None for PyTorch's default; raise TypeError if it is none."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"build: {type(config).__name__} is not the configuration of a model")
    with torch.device(device if device is not None else torch.get_default_device()):
        return config.build()


def save(model: nn.Module, folder: Path | str, state: dict[str, Tensor] | None = None) -> None:
    """Write a model's configuration and weights to a folder, which is created if missing.

    ``state`` are its whole weights, if the model is sharded over processes. Raises TypeError if the model's
    configuration is not in ``MODELS``, OSError if a file cannot be written or ``folder`` is a file.
    """
    config: Any = getattr(model, "config", None)
    name = next((name for name, kind in MODELS.items() if type(config) is kind), None)
    if name is None:
        raise TypeError(f"save needs a configuration that is in sigattn.models.MODELS, got {type(model).__name__}")
    require(*_SAFETENSORS)
    folder = Path(folder)
    if folder.is_file():
        raise NotADirectoryError(errno.ENOTDIR, "save writes a folder, not a file", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    description = {"model": name, "config": dataclasses.asdict(config)}
    tensors = {n: t.detach().cpu().contiguous() for n, t in (model.state_dict() if state is None else state).items()}
    _write_tensors(tensors, folder / WEIGHTS)
    files.write_text(folder / CONFIG, json.dumps(description, indent=2) + "\n")
    files.write_checksums(folder, {name: files.file_sha256(folder / name) for name in (CONFIG, WEIGHTS)})


@contextmanager
def tensor_file_errors(path: Path) -> Iterator[None]:
    """Raise OSError with the path for every error of writing it, those of safetensors included."""
    from safetensors import SafetensorError

    try:
        with files.add_path_to_errors(path):
            yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file atomically, with the default permissions (those of safetensors exclude all but the owner)."""
    from safetensors.torch import save_file

    with tensor_file_errors(path), files.replacing(path) as unfinished:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(tensors, unfinished)
        unfinished.chmod(stat.S_IMODE(mode))


def load(folder: Path | str, device: torch.device | str = "cpu") -> nn.Module:
    """Load the model in a folder, in evaluation mode and PyTorch's default dtype; ``config.json`` has its class.

    Raises ModelError if the folder does not contain a model of this version, or a file has changed since it was saved.
    """
    require(*_SAFETENSORS)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    if folder.name == "model" and not folder.exists() and (folder.parent / "checkpoints").exists():
        raise ModelError(f"the training in {folder.parent} has not ended: continue it with --resume")
    try:
        if model_type := files.read_json_object(folder / CONFIG).get("model_type"):
            raise ModelError(
                f"{folder} holds a model of transformers (model_type {model_type!r}), which sigattn's commands do not "
                "read: load it in Python with transformers; sigattn.convert converts it there, as in "
                "examples/convert_transformers.py"
            )
        description = files.read_json_object(folder / CONFIG, model=str, config=dict)
        config = from_dict(MODELS[description["model"]], description["config"])
        files.check_files(folder, (CONFIG, WEIGHTS))
        model = build(config, "meta").to_empty(device=device)
        _refill_buffers(model)
        model.load_state_dict(load_file(folder / WEIGHTS, device=str(device)))
    except (OSError, files.FileFormatError, KeyError, TypeError, ValueError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"cannot load a model from {folder}: {type(error).__name__}: {reason}") from error
    return model.eval()


def from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    """Create a configuration, a dataclass, from its JSON object: lists become tuples, objects configurations.

    Raises SettingsError for an unknown field, as in files of another version.
    """
    types = get_type_hints(kind)
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - {field.name for field in fields}):
        raise SettingsError(
            f"{kind.__name__} has no {', '.join(unknown)}: these settings were written by another version of sigattn"
        )

    def read(name: str, value: Any) -> Any:
        if dataclasses.is_dataclass(types[name]):
            return from_dict(types[name], value)
        return tuple(value) if isinstance(value, list) else value

    return kind(**{name: read(name, value) for name, value in values.items()})


def _refill_buffers(model: nn.Module) -> None:
    """Compute the buffers that are not saved (frequencies, slopes), which ``to_empty`` leaves uninitialised."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if module._non_persistent_buffers_set and reset is not None:
            reset()
