"""Conversion of transformers' models from softmax to sigmoid attention with learned biases, for ``sigattn.convert``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from sigattn.integrations.transformers import interface, learned_bias
from sigattn.integrations.transformers.check import dispatches
from sigattn.integrations.transformers.saving import NAME, restored
from sigattn.integrations.transformers.selection import configurations, detach
from sigattn.nn.bias import AttentionBias


def roots(model: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost models of transformers in a model."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers of transformers' models in a model, by name; none if it contains no such model.

    Raises:
        ValueError: naming the layers that compute softmax themselves, or if a part has sigmoid attention already.
    """
    models = roots(model)
    for root in models:
        _refuse_converted(root)
        with _selected(root):
            pass  # raises for layers that the choice does not reach
    inside = {m for root in models for m in root.modules()}
    return {name: m for name, m in model.named_modules() if m in inside and dispatches(m)}


def swap(model: nn.Module, biases: Mapping[str, AttentionBias]) -> None:
    """Give the attention layers of transformers' models in a model sigmoid attention with learned biases.

    Args:
        model: the model, which is changed in place, or not at all.
        biases: a bias of ``sigattn.nn.fitted_bias`` for each layer of ``attention_layers``, not shared.

    Raises:
        ValueError: as ``attention_layers``; if names are missing or unknown; or if transformers ties the weights of
            layers, whose biases would be tied, too.
    """
    layers = attention_layers(model)
    if biases.keys() != layers.keys():
        raise ValueError(f"biases must be given for the layers {', '.join(layers)}; got {', '.join(biases) or 'none'}")
    models = roots(model)
    with restored([config for root in models for config in configurations(root)]):
        try:
            for name, layer in layers.items():
                place = next((p.device for p in layer.parameters()), torch.device("cpu"))
                layer.sigmoid_bias = biases[name].to(place).train(layer.training)
                for module in biases[name].modules():
                    module._is_hf_initialized = True  # type: ignore[assignment]  # init_weights leaves it as it is
            for root in models:
                _refuse_tied(root)
                for config, record in learned_bias.records(root):
                    config.sigmoid_bias = record
                root.set_attn_implementation(NAME)
        except BaseException:
            for layer in layers.values():
                layer._modules.pop(learned_bias.ATTRIBUTE, None)
            raise


def _refuse_converted(root: PreTrainedModel) -> None:
    for config in configurations(root):
        if config._attn_implementation == NAME or getattr(config, "sigmoid_bias", None) is not None:
            raise ValueError(
                f"{type(root).__name__} has sigmoid attention already: {type(config).__name__} has "
                f'attn_implementation="{config._attn_implementation}" and '
                f"sigmoid_bias={getattr(config, 'sigmoid_bias', None)!r}. Conversion starts from softmax attention"
            )


def _refuse_tied(root: PreTrainedModel) -> None:
    """Raise if transformers ties the weights of attention layers: it would tie their biases, too."""
    tied = root.get_expanded_tied_weights_keys(all_submodels=True)
    for name, source in tied.items():
        if f".{learned_bias.ATTRIBUTE}." in f".{name}":
            raise ValueError(
                f"{type(root).__name__}: attention layers share their weights ({name} is tied to {source}), and would "
                "have to share one bias: conversion is not supported"
            )


@contextlib.contextmanager
def observe(model: nn.Module, observer: interface.Observer) -> Iterator[None]:
    """Within the context, let ``observer`` compute each attention call of transformers' models in a model.

    It receives the calls with the masks that the layers would have with sigmoid attention.
    """
    with contextlib.ExitStack() as stack:
        for root in roots(model):
            stack.enter_context(_selected(root))
        with interface.observed_by(observer):
            yield


@contextlib.contextmanager
def _selected(root: PreTrainedModel) -> Iterator[None]:
    """Select "sigmoid" for a block, and restore the configurations after it."""
    with restored(configurations(root), always=True):
        try:
            root.set_attn_implementation(NAME)
            yield
        finally:
            detach(root)
