"""Loading of a converted model's state dict into a new softmax model."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.conversion.adapter import refuse_distributed, refuse_offloaded
from sigattn.conversion.modules import ModuleAdapter
from sigattn.conversion.report import ConversionError
from sigattn.nn.fitted_bias import VisibleKeysLinearBias

_BIAS_KEY = re.compile(r"(?:(.+)\.)?(?:sigmoid_bias|attention_bias)\.(.+)")  # layer and parameter


@torch.inference_mode(False)  # or the biases could not be trained
def restore(
    model: nn.Module, state: Mapping[str, Tensor], example: Sequence[Any] | Mapping[str, Any] | None = None
) -> None:
    """Convert a softmax model as ``convert`` converted that of a state dict with batches, in place, and load it.

    Models of this library have folders (``sigattn.models.saving``), and transformers' models ``from_pretrained``; this
    is for all others. Layers without a fitted bias in the state dict keep softmax.

    Args:
        model: a softmax model of the same class and sizes, such as a new one. state: from a model that ``convert``
            converted with batches.
        example: arguments of one forward call, positional or by name, as in ``convert``: the model is run once to
            distinguish other softmaxes from attention. None examines its code only.

    Raises:
        TypeError: if state is not a state dict.
        ConversionError: a ValueError, if the state dict has no fitted biases, or they belong to other layers.
        RuntimeError: as in ``load_state_dict``. The model is then converted, and some weights may be loaded.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"restore: state must be a state dict (torch.load reads one), got {state!r:.80}")
    first_names: dict[nn.Module, str] = {}  # a state dict has all names of a shared layer, ``layers`` the first
    aliases = {n: first_names.setdefault(m, n) for n, m in model.named_modules(remove_duplicate=False)}
    parameters: dict[str, dict[str, Tensor]] = {}
    for key in filter(None, map(_BIAS_KEY.fullmatch, state)):
        name = key[1] or ""
        parameters.setdefault(aliases.get(name, name), {})[key[2]] = state[key[0]]
    biases = {name: _bias(tensors) for name, tensors in parameters.items()}
    refuse_distributed(model)
    adapter = ModuleAdapter(model, example)
    names = adapter.layers()
    refuse_offloaded(model, names)
    if not biases or not set(biases) <= set(names):
        softmax, fitted = (", ".join(map(repr, of)) for of in (names, biases))
        raise ConversionError(
            f"restore: {type(model).__name__} has softmax attention in {softmax}, and the state dict has fitted biases "
            f"for {fitted or 'no layer'}: pass the state dict of the same model, converted with batches"
        )
    adapter.swap(biases, True)
    model.load_state_dict(state)


def _bias(parameters: Mapping[str, Tensor]) -> VisibleKeysLinearBias:
    """Return a new bias with the sizes of these parameters, which must be those of a fitted bias."""
    bias = VisibleKeysLinearBias(len(parameters.get("constant", ())))
    if {n: t.shape for n, t in bias.state_dict().items()} != {n: t.shape for n, t in parameters.items()}:
        raise ConversionError(
            f"restore: the state dict has a bias with the parameters {', '.join(parameters)}, which is no "
            "VisibleKeysLinearBias: load it with the version of sigattn that wrote it"
        )
    return bias.to(parameters["constant"].dtype)
