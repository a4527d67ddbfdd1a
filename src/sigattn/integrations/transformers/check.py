"""Find softmax attention that ``attn_implementation="sigmoid"`` does not replace in a model of transformers.

``unsupported_layers`` examines the code of a model's layers before they run; ``check`` runs a model and records its
calls. Both search for softmax *attention*; a softmax that selects experts (a router), gates features or pools over
layers does not count.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from sigattn.integrations.transformers.saving import NAME
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.sigmoid_layer import CONVERTED

_SOFTMAX = {"softmax", "_softmax", "Softmax", "flex_attention"}
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention"}
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_NO_ATTENTION = {  # "attention" in their names, but their softmax is none
    "PatchTSMixerGatedAttention",  # a gate over features
    "AttentiveStatisticsPooling",  # statistics over time
    "Sam2MultiScaleAttention",  # dispatches; computes a softmax before, and discards it
}
_known_names: dict[type[nn.Module], set[str]] = {}


def unsupported_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers of ``model`` that stay softmax although "sigmoid" was chosen, by name and reason.

    A part of the model with another explicitly chosen implementation (``attn_implementation`` as a dictionary) is left
    out.
    """
    return dict(_unsupported_layers(model, "", None, set()))


def fixed_choices(model_class: type[PreTrainedModel]) -> str | None:
    """Return the name of a table of attention classes in the model's module that has no entry for sigmoid, if any."""
    for name, table in vars(sys.modules.get(model_class.__module__, object())).items():
        if isinstance(table, dict) and "eager" in table and NAME not in table and isinstance(table["eager"], type):
            return name
    return None


def advice(model_class: type[PreTrainedModel], layers: Mapping[str, nn.Module]) -> str:
    """Return what can be done with a model whose attention "sigmoid" does not reach, a sentence for a message.

    Args:
        model_class: class of the model. layers: the attention layers that are not reached, by name; empty for all.
    """
    stuck = [name for name, layer in layers.items() if not (_calls_pytorch(type(layer)) or dispatches(layer))]
    if layers and not stuck and not any(map(dispatches, layers.values())):
        converted = ", ".join(f"sigattn.conversion.sigmoidify(model.get_submodule({name!r}))" for name in layers)
        return f'Build the model without it, and call {converted} and model.set_attn_implementation("{NAME}")'
    kinds = [k for k in vars(sys.modules[model_class.__module__]).values() if isinstance(k, type)]
    if not (model_class._supports_sdpa or any(issubclass(k, nn.Module) and _calls_pytorch(k) for k in kinds)):
        return "Its layers compute their softmax themselves, where nothing can replace it: use another model"
    allowed = f", allow_softmax={stuck}" if stuck else ""
    return (
        f"Build the model without it, and call sigattn.conversion.sigmoidify(model, example{allowed}) with arguments "
        "of its forward, which names the layers that it cannot convert"
    )


def _calls_pytorch(kind: type[nn.Module]) -> bool:
    """Return True if a class of layers calls PyTorch's attention functions, which ``sigmoidify`` replaces."""
    return issubclass(kind, nn.MultiheadAttention) or bool(_names(kind) & _ATTENTION)


def _unsupported_layers(
    module: nn.Module, path: str, implementation: str | None, chosen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Walk through ``module``; ``chosen`` holds the ids of the configurations whose implementation the user can set."""
    config = getattr(module, "config", None)
    own = config._attn_implementation if isinstance(config, PretrainedConfig) else None
    if isinstance(module, PreTrainedModel):
        chosen = chosen | sub_configs(module.config)
        if own != NAME and implementation == NAME and id(config) not in chosen and _has_attention(module):
            yield path, module
        implementation = own
    elif implementation == NAME and own not in (None, NAME) and id(config) not in chosen and dispatches(module):
        yield path, module
    if implementation == NAME and computes_softmax(module):
        yield path, module
    for name, child in module.named_children():
        yield from _unsupported_layers(child, f"{path}.{name}" if path else name, implementation, chosen)


def sub_configs(config: PretrainedConfig) -> set[int]:
    """Return the ids of the registered sub-configurations, at any depth."""
    found: set[int] = set()
    for name in config.sub_configs:
        if (sub := getattr(config, name, None)) is not None:
            found |= {id(sub)} | sub_configs(sub)
    return found


def _has_attention(model: nn.Module) -> bool:
    return any(computes_softmax(m) or dispatches(m) for m in model.modules())


def computes_softmax(layer: nn.Module) -> bool:
    """Return True if ``layer`` is an attention layer that computes its softmax itself."""
    if isinstance(layer, CONVERTED):
        return False
    if type(layer).forward is nn.MultiheadAttention.forward:
        return True
    names = _names(type(layer))
    return _may_attend(layer) and _INTERFACE not in names and bool(names & (_SOFTMAX | _ATTENTION))


def dispatches(layer: nn.Module) -> bool:
    """Return True if ``layer`` uses transformers' attention interface."""
    return _INTERFACE in _names(type(layer))


def _may_attend(layer: nn.Module) -> bool:
    kind = type(layer).__name__
    return kind not in _NO_ATTENTION and ("att" in kind.lower() or dispatches(layer))


def _names(layer: type[nn.Module]) -> set[str]:
    """Return the names that a layer's methods use, functions of the same package that they call included."""
    if layer not in _known_names:
        _known_names[layer] = _collect_names(layer)
    return _known_names[layer]


def _collect_names(layer: type[nn.Module]) -> set[str]:
    if issubclass(layer, PreTrainedModel) or layer.__module__.partition(".")[0] in ("torch", "sigattn"):
        return set()
    methods = (
        inspect.getattr_static(layer, name)
        for base in layer.__mro__
        if not base.__module__.startswith("torch.")
        for name in vars(base)
    )
    seen: set[types.CodeType] = set()
    return set().union(*(_names_of(method, seen) for method in methods if callable(method)))


def _names_of(function: Any, seen: set[types.CodeType]) -> set[str]:
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function.__code__ in seen:
        return set()
    seen.add(function.__code__)
    names = set(_code_names(function.__code__))
    package = (function.__module__ or "").partition(".")[0]
    for called in [function.__globals__.get(name) for name in names]:
        if isinstance(called, types.FunctionType) and (called.__module__ or "").partition(".")[0] == package:
            names |= _names_of(called, seen)
    return names


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


# -- at run time ------------------------------------------------------------------------------------------------------


class CallRecorder(TorchFunctionMode):
    """Mode that counts calls of sigmoid attention and collects the names of layers that compute softmax attention."""

    calls: int
    running: list[tuple[str, nn.Module]]

    def __init__(self, running: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.running, self.calls = running, 0
        self.softmax: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention or name in _ATTENTION:
            self.softmax.add(self._innermost()[0])
        elif name in _SOFTMAX:
            path, module = self._innermost()
            if _may_attend(module):
                self.softmax.add(path)
        return func(*args, **(kwargs or {}))

    def _innermost(self) -> tuple[str, nn.Module]:
        """Return the innermost running layer that is not ``nn.Softmax`` itself."""
        layers = [(path, m) for path, m in self.running if not isinstance(m, nn.Softmax)]
        return layers[-1] if layers else ("", nn.Module())


active_recorders: list[CallRecorder] = []


def check(model: nn.Module, **inputs: Any) -> int:
    """Run a model once and verify that all attention is sigmoid attention.

    Args:
        model: any model. inputs: arguments of its forward.

    Returns:
        The number of calls of sigmoid attention.

    Raises:
        ValueError: naming the layers that computed softmax attention, or if sigmoid attention was never called.
    """
    running: list[tuple[str, nn.Module]] = []
    recorder = CallRecorder(running)

    def enter(path: str, module: nn.Module) -> Any:
        def hook(*_: Any) -> None:
            running.append((path, module))

        return hook

    def leave(*_: Any) -> None:
        running.pop()

    hooks = [m.register_forward_pre_hook(enter(path, m)) for path, m in model.named_modules()]
    hooks += [m.register_forward_hook(leave, always_call=True) for m in model.modules()]
    active_recorders.append(recorder)
    try:
        with evaluation_mode(model), torch.no_grad(), recorder:
            model(**inputs)
    finally:
        active_recorders.remove(recorder)
        for hook in hooks:
            hook.remove()
    if recorder.softmax:
        raise ValueError(
            f"these layers of {type(model).__name__} compute a softmax: {', '.join(sorted(recorder.softmax))}"
        )
    if not recorder.calls:
        raise ValueError(f"{type(model).__name__} did not call sigmoid attention")
    return recorder.calls
