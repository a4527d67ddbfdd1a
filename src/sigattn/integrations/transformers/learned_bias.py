"""Learned biases of the attention layers of transformers' models, and their record in the configuration.

A converted model (``sigattn.convert``) has a module ``sigmoid_bias`` in each attention layer. Its configuration's
``sigmoid_bias`` is then a dictionary that gives the kind and the sizes of each layer's bias, so that a loaded model has
these modules before its weights are read:

    {"layers.0.self_attn": {"kind": "VisibleKeysLinearBias", "num_heads": 32}, ...}

A layer that keeps softmax has a ``KeptSoftmax`` in the place of the bias. The names are relative to the base model, so
that every Auto class finds them; "" has the bias of the layers that are not listed. The layers of a part of a composite
model are listed in the part's own configuration, so that the part can be loaded alone.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sigattn.integrations.transformers.check import KeptSoftmax, sub_configs
from sigattn.integrations.transformers.configured import ATTRIBUTE, CONFIGS, REST, is_attention, restore_class
from sigattn.integrations.transformers.saving import NORMALIZE, restored
from sigattn.nn.bias import VisibleKeysLinearBias

Record = dict[str, Any]


def records(model: PreTrainedModel) -> list[tuple[PretrainedConfig, Record]]:
    """Return the configurations that a saved model has, with the learned biases of the layers that belong to each.

    A layer belongs to the innermost model around it whose configuration is saved on its own: the model's, or one of its
    sub-configurations. (Models also make copies of their configuration for a part, an encoder for example.)
    """
    by_config: dict[int, tuple[PretrainedConfig, Record]] = {}
    saved = {id(model.config), *sub_configs(model.config)}
    for owner, name, bias in _layers_with_bias(model, model, "", saved, set()):
        before = getattr(owner.config, ATTRIBUTE, None)
        rest = {REST: before[REST]} if isinstance(before, dict) and REST in before else {}
        config, record = by_config.setdefault(id(owner.config), (owner.config, rest))
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
    """Return the kind and the sizes of a bias, from which ``create`` makes one; TypeError for one of another kind."""
    if type(bias) is KeptSoftmax:
        return {"kind": KeptSoftmax.__name__}
    if type(bias) is VisibleKeysLinearBias:
        return {"kind": VisibleKeysLinearBias.__name__, "num_heads": bias.num_heads}
    raise TypeError(f"{type(bias).__name__} cannot be saved in a configuration: use VisibleKeysLinearBias")


def shown(bias: Any) -> str:
    """Return a configuration's ``sigmoid_bias`` as it is shown in messages: of a record the number of layers."""
    return f"{{learned biases of {len(bias)} layers}}" if isinstance(bias, dict) else repr(bias)


def create(entry: Any) -> nn.Module:
    """Return a bias of an entry of a record, with initial values; ValueError for an unknown entry."""
    if entry == {"kind": KeptSoftmax.__name__}:
        return KeptSoftmax()
    num_heads: Any = entry.get("num_heads") if isinstance(entry, dict) else None
    if entry == {"kind": VisibleKeysLinearBias.__name__, "num_heads": num_heads}:
        return VisibleKeysLinearBias(num_heads)
    raise ValueError(
        f"config.sigmoid_bias has {entry!r} for a layer, which is no bias of this version of sigattn "
        "(VisibleKeysLinearBias, KeptSoftmax): load the model with the version that saved it"
    )


def attach(model: PreTrainedModel) -> None:
    """Add the biases that the configuration records to the layers of a new model, with initial values.

    They have the dtype of the model's weights: the rounding of b ≈ -7 changes all weights of a row alike, and they are
    divided by their sum.
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


def is_kept(model: PreTrainedModel, name: str) -> bool:
    """Return True if the configuration records that a layer keeps its softmax, perhaps below the name of a part.

    The parts of a model are initialised before the model, which alone has the names of the record.
    """
    record = getattr(model.config, ATTRIBUTE, None)
    entries = record.items() if isinstance(record, dict) else ()
    return any(f".{key}".endswith(f".{name}") and entry == describe(KeptSoftmax()) for key, entry in entries)


@contextlib.contextmanager
def recorded(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, the configurations of a model have the settings with which it is to be saved.

    These are the records of learned biases, and for a part of a composite model the values of those around it.
    """
    settings: list[tuple[PretrainedConfig, str, Any]] = [(c, ATTRIBUTE, record) for c, record in records(model)]
    for name in (ATTRIBUTE, NORMALIZE):
        values = (getattr(config, name, None) for config in (model.config, *getattr(model, CONFIGS, ())))
        value = next((v for v in values if v is not None), None)
        value = value.get(REST) if isinstance(value, dict) else value  # a record is of the layers of the whole
        if value is not None:
            settings.insert(0, (model.config, name, value))
    with restored([config for config, _, _ in settings], always=True):
        for config, name, value in settings:
            setattr(config, name, value)
        yield
