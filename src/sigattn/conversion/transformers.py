"""Adapter of Hugging Face's models, whose attention goes through transformers' attention interface."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sigattn.conversion.adapter import Adapter, device_of, refuse_peft
from sigattn.conversion.modules import find_softmax
from sigattn.conversion.report import ConversionError, SoftmaxLayer
from sigattn.integrations.transformers import interface, learned_bias
from sigattn.integrations.transformers.check import KeptSoftmax, dispatches
from sigattn.integrations.transformers.configured import ATTRIBUTE, REST, is_attention
from sigattn.integrations.transformers.saving import LOG_VISIBLE, NAME, NORMALIZE, restored
from sigattn.integrations.transformers.selection import configurations, detach
from sigattn.nn.bias import AttentionBias, ConstantBias, VisibleKeysBias
from sigattn.nn.observer import Attend, CallObserver
from sigattn.nn.run_search import Example
from sigattn.nn.softmax_calls import MHA_NAME, SOFTMAX_NAME, listed


class TransformersAdapter(Adapter):
    """Softmax attention of models of transformers: a model, or several within one."""

    def __init__(self, model: nn.Module, example: Example | None = None, keep: Sequence[str] = ()) -> None:
        super().__init__(model, example, keep)
        self.roots: list[PreTrainedModel] = find_roots(model)
        self.names: list[str] = []  # not the layers, because a model may replace them when it runs

    def layers(self) -> Sequence[str]:
        inside = {m for root in self.roots for m in root.modules()}
        self.names = [name for name, m in self.model.named_modules() if m in inside and is_attention(m)]
        for root in self.roots:
            _refuse_converted(root)
            with _as_conversion_error(), self._kept(), _selected(root):
                pass  # raises for layers that the choice does not reach
        if self.model not in inside:
            others = [f for f in find_softmax(self.model, self.example) if f.attention and f.module not in inside]
            if others:
                raise ConversionError(
                    f"{type(self.model).__name__} contains models of transformers and other attention "
                    f"({listed(others)}): convert its parts one by one"
                )
        if not self.names:
            raise ConversionError(f"{type(self.model).__name__} has no attention")
        self.check_keep(self.names)
        names = [n for n in self.names if not self.keeps(n)]
        self._set_outcomes(names)
        if not names:
            raise ConversionError(f"keep={list(self.keep)} leaves no attention to convert")
        return names

    def reaches_all(self) -> bool:
        """Return True if the choice of "sigmoid" converts all attention; raise ConversionError if it is chosen."""
        refuse_peft(self.model)
        for root in self.roots:
            _refuse_converted(root)
        try:
            return bool(self.layers())
        except ConversionError:
            return False

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Within the context, layers that keep their softmax are marked, and the choice of "sigmoid" spares them."""
        marked = list(filter(self.keeps, self.names))
        for name in marked:
            self._layer(name).sigmoid_bias = KeptSoftmax()
        try:
            yield
        finally:
            for name in marked:
                del self._layer(name).sigmoid_bias

    def _layer(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def _set_outcomes(self, converted: Collection[str]) -> None:
        layers = []
        for name in self.names:
            layer = self._layer(name)
            multihead = MHA_NAME if type(layer) is nn.MultiheadAttention else SOFTMAX_NAME
            call = "attention interface" if dispatches(layer) else multihead
            outcome: Any = "materialised" if call == SOFTMAX_NAME else "converted"
            layers.append(SoftmaxLayer(name, type(layer).__name__, call, outcome if name in converted else "kept"))
        self.softmax = tuple(layers)

    @contextlib.contextmanager
    def observe(self, attend: Attend) -> Iterator[None]:
        def answer(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            if not hasattr(layer, ATTRIBUTE):
                raise ConversionError(f"attention was called by a {type(layer).__name__} outside of the model")
            return interface.attention(layer, *args, **kwargs)

        observed = [name for name in self.names if not self.keeps(name)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._kept())
            for root in self.roots:
                stack.enter_context(_selected(root))
            for name in observed:
                vars(self._layer(name))[ATTRIBUTE] = CallObserver(name, attend)
            stack.callback(lambda: [vars(self._layer(name)).pop(ATTRIBUTE) for name in observed])
            AttentionInterface.register(NAME, answer)
            stack.callback(AttentionInterface.register, NAME, interface.attention)
            yield

    def swap(self, biases: Mapping[str, AttentionBias | None], normalize: bool) -> None:
        """Give layers sigmoid attention with their biases; see ``Adapter``.

        A number and None (-log of the visible keys) are those of the configuration's ``sigmoid_bias``; others must be
        ``VisibleKeysLinearBias``. A layer that keeps softmax gets ``KeptSoftmax`` in the bias's place.
        """
        self._set_outcomes(biases)
        settings = {name: _setting(bias, normalize) for name, bias in biases.items()}
        learned: dict[Any, Any] = {
            self._layer(name): biases.get(name) or KeptSoftmax() for name in self.names if settings.get(name) is None
        }
        (setting,) = set(settings.values())  # None for learned biases
        with restored([config for root in self.roots for config in configurations(root)]), _as_conversion_error():
            try:
                for layer, bias in learned.items():
                    layer.sigmoid_bias = bias.to(device_of(layer)).train(layer.training)
                    for module in bias.modules():
                        module._is_hf_initialized = True  # init_weights leaves it as it is
                for root in self.roots:
                    _refuse_tied(root)
                    if setting is not None:
                        root.config.sigmoid_bias = setting
                    for config, record in learned_bias.records(root):
                        config.sigmoid_bias = record if setting is None else {**record, REST: setting}
                        setattr(config, NORMALIZE, normalize)
                    setattr(root.config, NORMALIZE, normalize)
                    root.set_attn_implementation(NAME)
            except BaseException:
                for layer in learned:
                    layer._modules.pop(ATTRIBUTE, None)
                raise


def find_roots(model: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost models of transformers in a model."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in find_roots(child)]


def _setting(bias: AttentionBias | None, normalize: bool) -> float | str | None:
    """Return the value of a configuration's ``sigmoid_bias`` for a bias; None for a learned one."""
    if bias is None or type(bias) is VisibleKeysBias:
        return LOG_VISIBLE
    if isinstance(bias, ConstantBias):
        return float(bias.of_call(bias.value, normalize))
    try:
        learned_bias.describe(bias)
    except TypeError as error:
        raise ConversionError(f"{error}, a number or None") from error
    return None


def _refuse_converted(root: PreTrainedModel) -> None:
    for config in configurations(root):
        bias = getattr(config, "sigmoid_bias", None)
        if config._attn_implementation == NAME or bias is not None:
            raise ConversionError(
                f"{type(root).__name__} has sigmoid attention already: {type(config).__name__} has "
                f'attn_implementation="{config._attn_implementation}" and '
                f"sigmoid_bias={learned_bias.shown(bias)}. Conversion starts from softmax attention"
            )


def _refuse_tied(root: PreTrainedModel) -> None:
    """Raise if transformers ties the weights of attention layers: it would tie their biases, too."""
    for name, source in root.get_expanded_tied_weights_keys(all_submodels=True).items():
        if f".{ATTRIBUTE}." in f".{name}":
            raise ConversionError(
                f"attention layers of {type(root).__name__} share their weights ({name} is tied to {source}), "
                "and would have to share one bias: conversion is not supported"
            )


@contextlib.contextmanager
def _selected(root: PreTrainedModel) -> Iterator[None]:
    """Select "sigmoid" for a block, and restore the configurations after it."""
    with restored(configurations(root), always=True):
        try:
            root.set_attn_implementation(NAME)
            yield
        finally:
            detach(root)


@contextlib.contextmanager
def _as_conversion_error() -> Iterator[None]:
    """Raise errors of the integration as ``ConversionError``."""
    try:
        yield
    except ConversionError:
        raise
    except ValueError as error:
        raise ConversionError(str(error)) from error
