"""Models on disk: ``config.json`` says what they are, ``model.safetensors`` holds their weights."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.files import FileFormatError, naming, read_object
from sigattn.models.autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.models.sequence import SequenceModel, SequenceModelConfig
from sigattn.models.speech import SpeechModel, SpeechModelConfig
from sigattn.models.vision import VisionTransformer, VisionTransformerConfig

ModelConfig = (
    LanguageModelConfig | VisionTransformerConfig | MaskedAutoencoderConfig | SpeechModelConfig | SequenceModelConfig
)

MODELS: dict[str, tuple[type[ModelConfig], type[nn.Module]]] = {
    "language": (LanguageModelConfig, LanguageModel),
    "vision": (VisionTransformerConfig, VisionTransformer),
    "masked-autoencoder": (MaskedAutoencoderConfig, MaskedAutoencoder),
    "speech": (SpeechModelConfig, SpeechModel),
    "sequence": (SequenceModelConfig, SequenceModel),
}


class ModelError(Exception):
    """A model folder that cannot be used; the message is one line."""


def build(config: ModelConfig, device: torch.device | str | None = None) -> nn.Module:
    """The model of a configuration; on "meta" it has shapes and no memory.

    Raises:
        TypeError: if no model has such a configuration.
    """
    for kind, model in MODELS.values():
        if type(config) is kind:
            with torch.device(device if device is not None else torch.get_default_device()):
                return model(config)
    raise TypeError(f"no model is made from a {type(config).__name__}")


def save(model: nn.Module, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write a model's configuration and weights into a folder, made if missing.

    Args:
        model: one of this library's. folder: where to.
        state: its weights, where they are not simply the model's own (because processes share them).

    Raises:
        TypeError: if it is none of this library's models.
        OSError: if it cannot be written.
    """
    # FSDP makes a subclass of a model's class
    name = next((n for n, (_, kind) in MODELS.items() if isinstance(model, kind)), None)
    if name is None:
        raise TypeError(f"save keeps {', '.join(k.__name__ for _, k in MODELS.values())}, got {type(model).__name__}")
    config: Any = model.config
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": name, "config": dataclasses.asdict(config)}
    tensors = {n: t.detach().cpu().contiguous() for n, t in (model.state_dict() if state is None else state).items()}
    _write_tensors(tensors, folder / "model.safetensors")
    with naming(folder / "config.json"):
        (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file whole or not at all, with the permissions of any new file (safetensors gives it to its owner only).

    Raises:
        OSError: if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(tensors, unfinished)
        unfinished.chmod(stat.S_IMODE(mode))
        unfinished.replace(path)
    except SafetensorError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(errno.EIO, str(error), str(path)) from error


def load(folder: Path, device: torch.device | str = "cpu") -> nn.Module:
    """The model in a folder, in evaluation mode, as it was saved: no class need be named.

    Raises:
        ModelError: if the folder holds no model that this version knows.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = read_object(folder / "config.json", model=str, config=dict)
        kind, _ = MODELS[about["model"]]
        config = from_dict(kind, about["config"])
        model = build(config, "meta").to_empty(device=device)
        _refill_buffers(model)
        model.load_state_dict(load_file(folder / "model.safetensors", device=str(device)))
    except (OSError, FileFormatError, KeyError, TypeError, ValueError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder} holds no model that can be loaded: {type(error).__name__}: {reason}") from error
    return model.eval()


def from_dict(kind: type[ModelConfig], values: dict[str, Any]) -> ModelConfig:
    """A configuration from its JSON.

    Raises:
        TypeError: for a name that it has not.
    """
    if kind is MaskedAutoencoderConfig:
        values = {**values, "encoder": from_dict(VisionTransformerConfig, values["encoder"])}
    if kind is SequenceModelConfig:
        values = {**values, "mlp_widths": tuple(values["mlp_widths"])}
    return kind(**values)


def _refill_buffers(model: nn.Module) -> None:
    """Buffers that are not saved (frequencies, slopes) are empty after a model left the meta device."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if module._non_persistent_buffers_set and reset is not None:
            reset()
