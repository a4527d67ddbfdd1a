"""Find softmax attention that ``attn_implementation="sigmoid"`` does not replace in a model of transformers.

``unsupported_layers`` examines the code of a model's layers before they run; ``check`` runs a model and records its
calls. Both search for softmax *attention*; a softmax that selects experts (a router), gates features or pools over
layers does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sigattn.integrations.transformers.saving import NAME
from sigattn.nn.code_search import calls_of_class, reachable_calls
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.nn.run_search import search
from sigattn.nn.sigmoid_layer import CONVERTED
from sigattn.nn.softmax_calls import ATTENTION_NAMES, INTERFACE_NAME, SOFTMAX_MODULES, SOFTMAX_NAMES, named_as_attention


class KeptSoftmax(nn.Module):
    """Mark of a layer that computes softmax attention in a model whose other layers compute sigmoid attention."""


def unsupported_layers(
    module: nn.Module, path: str = "", implementation: str | None = None, chosen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer of attention that stays softmax although "sigmoid" was chosen around it.

    ``chosen`` has the ids of the configurations around a part whose implementation the user can set.
    """
    config = getattr(module, "config", None)
    chosen_here = config._attn_implementation if isinstance(config, PretrainedConfig) else None
    if isinstance(module, PreTrainedModel):
        chosen = chosen.union(sub_configs(module.config))
        is_excluded = chosen_here != NAME and implementation == NAME and id(config) not in chosen
        if is_excluded and any(computes_softmax(m) or dispatches(m) for m in module.modules()):
            yield path, module
        implementation = chosen_here
    elif implementation == NAME and chosen_here not in (None, NAME) and id(config) not in chosen and dispatches(module):
        yield path, module
    if implementation == NAME and computes_softmax(module):
        yield path, module
    for name, child in module.named_children():
        yield from unsupported_layers(child, f"{path}.{name}" if path else name, implementation, chosen)


def sub_configs(config: PretrainedConfig) -> dict[int, PretrainedConfig]:
    """Return the registered sub-configurations, at any depth, by their ids."""
    subs = [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return {id(c): c for sub in subs for c in (sub, *sub_configs(sub).values())}


def computes_softmax(layer: nn.Module) -> bool:
    """Return True if ``layer`` is an attention layer that computes its softmax itself, and is not to keep it."""
    if isinstance(getattr(layer, "sigmoid_bias", None), KeptSoftmax):
        return False
    if type(layer).forward is nn.MultiheadAttention.forward:
        return True
    if isinstance(layer, (PreTrainedModel, *CONVERTED)) or not named_as_attention(layer):
        return False
    if type(layer).__module__.partition(".")[0] in ("torch", "sigattn"):
        return False
    calls = reachable_calls(layer)
    # a layer's call of a submodule, such as I-BERT's IntSoftmax, is not among its own calls
    softmax = any(isinstance(m, SOFTMAX_MODULES) or name == "softmax" for name, m in layer.named_children())
    return INTERFACE_NAME not in calls and (softmax or bool(calls & (ATTENTION_NAMES | SOFTMAX_NAMES)))


def dispatches(layer: nn.Module) -> bool:
    """Return True if ``layer`` uses transformers' attention interface."""
    kind: Any = type(layer)
    return not isinstance(layer, PreTrainedModel) and INTERFACE_NAME in calls_of_class(kind)


def check(model: nn.Module, **inputs: Any) -> int:
    """Run a model once and verify that all attention is sigmoid attention.

    Args:
        model: any model. inputs: arguments of its forward.

    Returns:
        The number of calls of sigmoid attention.

    Raises:
        ValueError: naming the layers that computed softmax attention, or if sigmoid attention was never called.
    """
    result = search(model, inputs, (SigmoidMultiheadAttention,))  # whose normalised weights are a softmax of log σ
    if softmax := sorted({f.name for f in result.findings if f.attention}):
        raise ValueError(f"these layers of {type(model).__name__} compute a softmax: {', '.join(softmax)}")
    if not result.sigmoid_calls:
        raise ValueError(f"{type(model).__name__} did not call sigmoid attention")
    return result.sigmoid_calls
