"""Loading of a converted model's state dict into a new softmax model."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.conversion.adapter import refuse_distributed, refuse_offloaded
from sigattn.conversion.modules import ModuleAdapter
from sigattn.conversion.report import ConversionError, errors_of
from sigattn.nn.bias import VisibleKeysLinearBias
from sigattn.nn.run_search import Example

_BIAS_KEY = re.compile(r"(?:(.+)\.)?(?:sigmoid_bias|attention_bias)\.(.+)")  # layer and parameter


class _RestoringAdapter(ModuleAdapter):
    """Adapter that keeps the softmax of all layers but those with a bias."""

    def __init__(self, model: nn.Module, example: Example | None, biases: Mapping[str, object]) -> None:
        super().__init__(model, example)
        self.biases = biases

    def keeps(self, name: str) -> bool:
        return name not in self.biases


@torch.inference_mode(False)  # or the biases could not be trained
@errors_of("restore")
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
        ConversionError: a ValueError, if the state dict has no fitted biases, or a layer that has one cannot be
            converted. The model is unchanged.
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
    if not biases:
        raise ConversionError("the state dict has no fitted biases: pass that of a model converted with batches")
    adapter = _RestoringAdapter(model, example, biases)
    names = adapter.layers()
    refuse_offloaded(model, names)
    if missing := ", ".join(repr(name) for name in biases if name not in names):
        raise ConversionError(
            f"the state dict has fitted biases for {missing}, where {type(model).__name__} has no softmax attention "
            f"that can be replaced (it has in {', '.join(map(repr, names))}): pass the state dict of the same model"
        )
    adapter.swap(biases, True)
    model.load_state_dict(state)


def _bias(parameters: Mapping[str, Tensor]) -> VisibleKeysLinearBias:
    """Return a new bias with the sizes of these parameters, which must be those of a fitted bias."""
    bias = VisibleKeysLinearBias(len(parameters.get("constant", ())))
    if {n: t.shape for n, t in bias.state_dict().items()} != {n: t.shape for n, t in parameters.items()}:
        raise ConversionError(
            f"the state dict has a bias with the parameters {', '.join(parameters)}, which is no "
            "VisibleKeysLinearBias: load it with the version of sigattn that wrote it"
        )
    return bias.to(parameters["constant"].dtype)
