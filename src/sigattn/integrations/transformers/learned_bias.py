"""Learned biases of the attention layers of transformers' models, and their record in the configuration.

A converted model (``sigattn.convert``) has a module ``sigmoid_bias`` in each attention layer. Its configuration's
``sigmoid_bias`` is then a dictionary that gives the kind and the sizes of each layer's bias, so that a loaded model has
these modules before its weights are read:

    {"layers.0.self_attn": {"kind": "VisibleKeysLinearBias", "num_heads": 32}, ...}

A layer that keeps softmax has a ``KeptSoftmax`` in the place of the bias. The names are relative to the base model, so
that every Auto class finds them. The layers of a part of a composite model are listed in the part's own configuration,
so that the part can be loaded alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sigattn.integrations.transformers.check import KeptSoftmax, sub_configs
from sigattn.integrations.transformers.configured import ATTRIBUTE, is_attention, restore_class
from sigattn.nn.fitted_bias import VisibleKeysLinearBias

Record = dict[str, dict[str, Any]]


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (VisibleKeysLinearBias, KeptSoftmax)}


def records(model: PreTrainedModel) -> list[tuple[PretrainedConfig, Record]]:
    """Return the configurations that a saved model has, with the learned biases of the layers that belong to each.

    A layer belongs to the innermost model around it whose configuration is saved on its own: the model's, or one of its
    sub-configurations. (Models also make copies of their configuration for a part, an encoder for example.)

    Raises:
        ValueError: if two parts share a configuration, and layers of the same name have biases of different kinds.
    """
    by_config: dict[int, tuple[PretrainedConfig, Record]] = {}
    for owner, name, bias in _layers_with_bias(model, model, "", {id(model.config)} | sub_configs(model.config), set()):
        config, record = by_config.setdefault(id(owner.config), (owner.config, {}))
        name, entry = _base_name(owner, name), describe(bias)
        if record.setdefault(name, entry) != entry:
            raise ValueError(
                f"{type(model).__name__}: two attention layers called {name} share {type(config).__name__}, which "
                f"cannot record both of their biases: {record[name]} and {entry}"
            )
    return list(by_config.values())


def _layers_with_bias(
    module: nn.Module, owner: PreTrainedModel, path: str, saved: set[int], seen: set[nn.Module]
) -> Iterator[tuple[PreTrainedModel, str, nn.Module]]:
    """Yield the model to which a layer belongs, the layer's name in it, and its bias; shared layers once."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, PreTrainedModel) and module.config is not owner.config and id(module.config) in saved:
        owner, path = module, ""
    bias = getattr(module, ATTRIBUTE, None)
    if isinstance(bias, nn.Module) and is_attention(module):
        yield owner, path, bias
    for name, child in module.named_children():
        yield from _layers_with_bias(child, owner, f"{path}.{name}" if path else name, saved, seen)


def _base_name(model: PreTrainedModel, name: str) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.") if model.base_model_prefix else name


def describe(bias: nn.Module) -> dict[str, Any]:
    """Return the kind and the settings of a bias, from which ``create`` makes one with initial values.

    Raises:
        TypeError: if the bias is of another kind.
    """
    kind = type(bias).__name__
    if _KINDS.get(kind) is not type(bias):
        raise TypeError(f"{kind} cannot be saved in a configuration: use VisibleKeysLinearBias")
    return {"kind": kind, **{name: getattr(bias, name) for name in _settings(kind)}}


def _settings(kind: str) -> list[str]:
    return [name for name in inspect.signature(_KINDS[kind]).parameters if name not in ("args", "kwargs")]


def create(entry: Any) -> nn.Module:
    """Return a bias of the kind and settings of an entry of a record, in float32.

    Raises:
        ValueError: if this version has no such kind, or it has other settings.
    """
    settings = dict(entry) if isinstance(entry, dict) else {}
    kind = settings.pop("kind", None)
    if kind not in _KINDS or set(settings) != set(_settings(kind)):
        raise ValueError(
            f"config.sigmoid_bias has {entry!r} for a layer, which is no bias of this version of sigattn "
            f"({', '.join(_KINDS)}): load the model with the version that saved it"
        )
    module: nn.Module = _KINDS[kind](**settings).float()
    return module


def attach(model: PreTrainedModel) -> None:
    """Add the biases that the configuration records to the layers of a new model, with initial values.

    The values are kept in float32 when weights are loaded in half precision: b ≈ -7 has errors of 0.02 in bfloat16.
    """
    record = getattr(model.config, ATTRIBUTE, None)
    if not isinstance(record, dict):
        return
    for name, layer in model.named_modules():
        entry = record.get(name, record.get(_base_name(model, name)))
        if entry is not None and is_attention(layer) and not hasattr(layer, ATTRIBUTE):
            layer.sigmoid_bias = create(entry)
            if isinstance(layer.sigmoid_bias, KeptSoftmax):
                restore_class(layer)
            model._keep_in_fp32_modules_strict.add(ATTRIBUTE)


def is_kept(model: PreTrainedModel, name: str) -> bool:
    """Return True if the configuration records that a layer keeps its softmax, perhaps below the name of a part.

    The parts of a model are initialised before the model, which alone has the names of the record.
    """
    record = getattr(model.config, ATTRIBUTE, None)
    entries = record.items() if isinstance(record, dict) else ()
    return any(f".{key}".endswith(f".{name}") and entry.get("kind") == KeptSoftmax.__name__ for key, entry in entries)


@contextlib.contextmanager
def recorded(model: PreTrainedModel, inherited: Any = None) -> Iterator[None]:
    """Give the configurations of a model the ``sigmoid_bias`` with which it is to be saved; restore them afterwards.

    Args:
        model: the model. inherited: a value for its configuration if it has none, and no learned biases.
    """
    values: list[tuple[PretrainedConfig, Any]] = [*records(model)]
    if inherited is not None and model.config not in [config for config, _ in values]:
        values.append((model.config, inherited))
    before = [(config, getattr(config, ATTRIBUTE, None)) for config, _ in values]
    try:
        for config, value in values:
            config.sigmoid_bias = value
        yield
    finally:
        for config, value in before:
            if value is None:
                delattr(config, ATTRIBUTE)
            else:
                config.sigmoid_bias = value
