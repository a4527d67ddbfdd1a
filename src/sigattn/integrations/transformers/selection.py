"""Check of ``attn_implementation="sigmoid"`` in transformers: an error unless it reaches all attention of a model.

transformers accepts a registered implementation for every model, even if layers compute softmax attention themselves,
and only logs a warning in ``set_attn_implementation``. Here the choice raises and names the layers.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sigattn.integrations.transformers import learned_bias
from sigattn.integrations.transformers.check import sub_configs, unsupported_layers
from sigattn.integrations.transformers.configured import (
    CONFIGS,
    Configured,
    is_attention,
    needs_numbers,
    reason_against,
    replace_class,
    restore_class,
)
from sigattn.integrations.transformers.mask import ADDED
from sigattn.integrations.transformers.saving import NAME, read_implementation, restored, wrap
from sigattn.nn.bias import VisibleKeysLinearBias
from sigattn.nn.softmax_calls import known_for_another_softmax

_choosing: contextvars.ContextVar[bool] = contextvars.ContextVar("choosing", default=False)


@functools.cache  # once per process
def wrap_selection() -> None:
    """Wrap the methods of ``PreTrainedModel`` that choose an implementation or handle its biases."""
    wrappers: dict[str, Any] = {
        "_from_config": _from_config,
        "get_correct_attn_implementation": _get_correct_attn_implementation,
        "post_init": _post_init,
        "set_attn_implementation": _set_attn_implementation,
        "save_pretrained": _save_pretrained,
        "_check_and_adjust_attn_implementation": _check_and_adjust_attn_implementation,
        "_initialize_weights": _initialize_weights,
        "_can_set_attn_implementation": _can_set_attn_implementation,
    }
    for name, wrapper in wrappers.items():
        original = getattr(PreTrainedModel, name)
        function = getattr(original, "__func__", original)
        wrapped = wrap(function, wrapper)
        setattr(PreTrainedModel, name, wrapped if function is original else classmethod(wrapped))


def _from_config(original: Any, model_class: type[PreTrainedModel], config: PretrainedConfig, **kwargs: Any) -> Any:
    """Build a model from a copy of its configuration if the choice may change another model."""
    choice = kwargs.get("attn_implementation")
    changes = choice is not None and (_selects_sigmoid(choice) or config._attn_implementation == NAME)
    return original(model_class, copy.deepcopy(config) if changes else config, **kwargs)


def _can_set_attn_implementation(original: Any, model_class: type[PreTrainedModel]) -> bool:
    """Let a choice of "sigmoid", and another one after it, reach models that do not use the attention interface."""
    return _choosing.get() or bool(original(model_class))


def _get_correct_attn_implementation(
    original: Any, model: Any, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    """Let "sigmoid" choose the layers for SDPA, or else the eager ones, from a table of classes in a model's code."""
    if requested_attention == NAME:
        for table in vars(sys.modules[type(model).__module__]).values():
            if isinstance(table, dict) and isinstance(table.get("eager"), type):
                table[NAME] = table.get("sdpa", table["eager"])
    return original(model, requested_attention, *args, **kwargs)


def _post_init(original: Any, model: Any) -> None:
    """Add learned biases to a new model's layers. Raise for "sigmoid" if one of them computes softmax attention."""
    original(model)
    learned_bias.attach(model)
    if model.config._attn_implementation == NAME:  # chosen for parts, too, whose configuration the model has made
        model.set_attn_implementation({"": NAME})


def _set_attn_implementation(
    original: Any, model: Any, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Raise for "sigmoid" where transformers would only log a warning, and leave the model unchanged."""
    chooses = _selects_sigmoid(attn_implementation)
    token = _choosing.set(chooses or any(isinstance(m, Configured) for m in model.modules()))
    try:
        with restored(configurations(model)):
            original(model, attn_implementation, *args, **kwargs)
            _choose_in_parts(model)
            if chooses:
                _verify_and_attach(model)
            else:
                _replace_classes(model, None)
            for part in model.modules():  # those for which "sigmoid" is chosen verify each call, and no others
                _unguard(part)
                if isinstance(part, PreTrainedModel) and part.config._attn_implementation == NAME:
                    part.register_forward_pre_hook(_verify_call, with_kwargs=True)
    finally:
        _choosing.reset(token)


def _save_pretrained(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model with its learned biases, and a part of a composite model with the settings that hold for it."""
    with learned_bias.recorded(model):
        return original(model, *args, **kwargs)


def _check_and_adjust_attn_implementation(
    original: Any, model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any
) -> str:
    """Let ``sigmoid_bias`` of a configuration select sigmoid attention, or warn that it is ignored."""
    attn_implementation = read_implementation(attn_implementation)  # from before this package was imported
    bias = getattr(model.config, "sigmoid_bias", None)
    if bias is not None and attn_implementation is None:
        attn_implementation = NAME
        _select_in_parts(model.config)
    elif bias is not None and attn_implementation != NAME:
        warnings.warn(  # names the configuration, which a model and its base share, so that Python shows it once
            f'attn_implementation="{attn_implementation}" ignores sigmoid_bias = {learned_bias.shown(bias)} of '
            f'{type(model.config).__name__}: this is not sigmoid attention. Choose "{NAME}", or remove sigmoid_bias',
            stacklevel=3,
        )
    return original(model, attn_implementation, *args, **kwargs)


def _select_in_parts(config: PretrainedConfig) -> None:
    """Select "sigmoid" in the sub-configurations for which no implementation was chosen."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part._attn_implementation_internal is None:
            part._attn_implementation_internal = NAME
            _select_in_parts(part)


def _initialize_weights(original: Any, model: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """Give learned biases that a checkpoint lacks their initial values, instead of leaving their memory as it is."""
    if isinstance(module, VisibleKeysLinearBias) and not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()  # with torch.nn.init, whose functions transformers lets skip loaded parameters
    original(model, module, *args, **kwargs)


def _selects_sigmoid(choice: Any) -> bool:
    return any(map(_selects_sigmoid, choice.values())) if isinstance(choice, dict) else choice == NAME


def configurations(model: nn.Module) -> list[PretrainedConfig]:
    """Return the configurations of a model, of its parts and their sub-configurations, each once."""
    by_id: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PretrainedConfig) and id(config) not in by_id:
            by_id |= {id(config): config} | sub_configs(config)
    return list(by_id.values())


def _choose_in_parts(module: nn.Module, config: PretrainedConfig | None = None) -> None:
    """Let a choice reach parts and layers with another configuration object than the model around them.

    A part of EncoderDecoderModel was built before the whole, which then gave it, but not its layers, a configuration.
    """
    own: Any = getattr(module, "config", None)
    if config is not None and type(own) is type(config):
        choices = (own._attn_implementation, config._attn_implementation)
        if NAME in choices and choices[0] != choices[1]:
            own._attn_implementation_internal = config._attn_implementation
    if isinstance(module, PreTrainedModel):
        config = own
    for child in module.children():
        _choose_in_parts(child, config)


def _replace_classes(module: nn.Module, implementation: str | None) -> list[nn.Module]:
    """Replace the classes of layers outside of the interface where "sigmoid" is chosen; return these layers."""
    if isinstance(module, PreTrainedModel):
        implementation = module.config._attn_implementation
    if implementation != NAME:
        restore_class(module)
    replaced = [module] if implementation == NAME and replace_class(module) else []
    return replaced + [m for child in module.children() for m in _replace_classes(child, implementation)]


def _verify_and_attach(model: PreTrainedModel) -> None:
    """Verify that the choice reaches all attention of a model, and attach the configurations to its layers."""
    replaced = _replace_classes(model, None)
    if stay := {n: m for n, m in unsupported_layers(model) if not learned_bias.is_kept(model, n)}:
        for layer in replaced:
            restore_class(layer)
        shown = ", ".join(f"{name} ({_described(layer)})" for name, layer in [*stay.items()][:4])
        more = f" and {len(stay) - 4} more" if len(stay) > 4 else ""
        raise ValueError(
            f'attn_implementation="{NAME}" does not reach all attention of {type(model).__name__}. These layers would '
            f"silently use softmax: {shown}{more}. {_advice(stay)}"
        )
    others = [m for m in model.modules() if "Attention" in type(m).__name__ and not isinstance(m, PreTrainedModel)]
    others = [m for m in others if not known_for_another_softmax(m)]
    if others and not any(map(is_attention, model.modules())):
        raise ValueError(
            f'attn_implementation="{NAME}" does not reach the attention of {type(model).__name__}, which has no '
            f"softmax over keys: {type(others[-1]).__name__}"
        )
    for config in configurations(model):
        vars(config).pop(ADDED, None)
    _attach(model, ())


def _advice(layers: Mapping[str, nn.Module]) -> str:
    """Return what can be done with a model whose attention "sigmoid" does not reach in some layers."""
    known = all(
        isinstance(m, PreTrainedModel) or type(m).__module__.startswith("transformers.") for m in layers.values()
    )
    arguments = f"batches, keep={list(layers)}" if known else "example=example"
    return f"Build the model without it, and call sigattn.convert(model, {arguments}): " + (
        "these layers keep their softmax" if known else "it is run once with these arguments of its forward"
    )


def _described(layer: nn.Module) -> str:
    """Return the class of a layer, and why it cannot compute sigmoid attention."""
    reason = None if isinstance(layer, PreTrainedModel) else reason_against(layer)
    return type(layer).__name__ + (f": {reason}" if reason else "")


def _attach(
    module: nn.Module, configs: tuple[PretrainedConfig, ...], around: tuple[PretrainedConfig, ...] = ()
) -> None:
    """Set on each layer the configurations around it, from which ``sigmoid_bias`` is read at each call.

    A configuration of the same type as one around it is a copy that the model made for a part (an encoder, say); its
    values may be out of date, so it is left out.
    """
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig):
        around = (*around, config)
        if not any(type(config) is type(c) for c in configs):
            configs = (config, *configs)
    setattr(module, CONFIGS, configs)
    if needs_numbers(module):
        for each in around:
            setattr(each, ADDED, True)
    for child in module.children():
        _attach(child, configs, around)


def _unguard(part: nn.Module) -> None:
    for key, hook in list(part._forward_pre_hooks.items()):
        if hook is _verify_call:
            del part._forward_pre_hooks[key], part._forward_pre_hooks_with_kwargs[key]


def detach(model: nn.Module) -> None:
    """Remove what the choice of "sigmoid" has attached to a model, so that it can be pickled without this package."""
    for module in model.modules():
        vars(module).pop(CONFIGS, None)
        restore_class(module)
        _unguard(module)


def _verify_call(model: PreTrainedModel, _args: Any, kwargs: dict[str, Any]) -> None:
    """Raise where a model with sigmoid attention would compute softmax, or return an empty tuple of attention weights.

    As a hook of the model this function also makes a process that unpickles it import this package.
    """
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f'{type(model).__name__} with attn_implementation="{NAME}": its {type(model.config).__name__} now says '
            f'"{model.config._attn_implementation}", which was not chosen by set_attn_implementation of this model. '
            "Either another model has the same configuration object: call it here with what is meant, and build each "
            "from its own copy.deepcopy(config). Or the call needs attention weights, as Whisper's timestamps of words "
            "do, which are never formed"
        )
    asked = kwargs.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if asked is None else asked:
        raise ValueError(
            f'{type(model).__name__} with attn_implementation="{NAME}": output_attentions: attention weights are never '
            "formed; pass output_attentions=False"
        )
