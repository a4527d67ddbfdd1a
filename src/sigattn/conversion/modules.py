"""Adapter of models whose attention is ``sigattn.nn.Attention``, ``nn.MultiheadAttention``, or PyTorch's function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from sigattn.conversion.attention_call import Attend, AttentionCall, ConversionError, refuse_offloaded
from sigattn.conversion.channel_attention import channel_attention
from sigattn.conversion.replacement import (
    enable_fused_attention,
    find_softmax,
    observed_layers,
    refuse_distributed,
    refuse_wrapped,
    replace_layers,
)
from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.config import TransformerConfig
from sigattn.models.transformer import Transformer
from sigattn.nn import functional
from sigattn.nn.attention import Attention
from sigattn.nn.bias import AttentionBias
from sigattn.nn.fitted_bias import QuadraticBias, VisibleKeysLinearBias
from sigattn.nn.functional import MaskSpec
from sigattn.nn.observer import CallObserver
from sigattn.nn.run_search import Example
from sigattn.nn.sigmoid_layer import CONVERTED
from sigattn.nn.softmax_calls import Finding, listed
from sigattn.nn.visible_keys import is_visible
from sigattn.ops.operands import make_problem
from sigattn.ops.problem import Problem


class ModuleAdapter:
    """Softmax attention of a model of PyTorch, found by ``replacement.find_softmax``.

    Args:
        model: the model. example: arguments of its forward, or a function that runs it; None to search its code only.
    """

    def __init__(self, model: nn.Module, example: Example | None = None) -> None:
        self.model: nn.Module = model
        self.example: Example | None = example
        self.own: dict[str, Attention] = {}
        self.called: list[Finding] = []  # layers that call PyTorch's functions
        self.staying: list[Finding] = []

    def layers(self) -> Sequence[str]:
        """Return the names of the attention layers; see ``Adapter``."""
        try:
            return self._layers()
        except ConversionError:
            raise
        except ValueError as error:
            raise ConversionError(f"convert: {error}") from error

    def _layers(self) -> Sequence[str]:
        refuse_distributed(self.model)
        with enable_fused_attention(self.model, restore=True):
            findings = find_softmax(self.model, self.example)
        self.staying = [f for f in findings if not f.replaceable]
        if refused := [f for f in self.staying if f.attention]:
            raise ConversionError(
                f"convert: these layers compute a softmax themselves, where it cannot be replaced: {listed(refused)}. "
                "Let them use F.scaled_dot_product_attention, or rewrite them with sigattn.nn.Attention"
                + (". Only the code was examined: pass example=(...)" if self.example is None else "")
            )
        self.own = {n: m for n, m in self.model.named_modules() if isinstance(m, Attention) and _is_normalised(n, m)}
        self.called = [f for f in findings if f.replaceable and f.name not in self.own]
        if uncalled := [f for f in findings if not f.called]:
            raise ConversionError(
                f"convert: the batches do not reach the attention of {listed(uncalled)}, which stays softmax: pass "
                "batches that come to it"
            )
        refuse_wrapped(self.called)
        names = {*self.own, *(f.name for f in self.called)}
        if not names:
            raise ConversionError(_nothing_found(self.model))
        layers = {name: m for name, m in self.model.named_modules() if name in names}
        refuse_offloaded(layers)
        return list(layers)

    def refuse_channel_attention(self, run: Callable[[], object]) -> None:
        """Raise ConversionError for layers whose features are positions, because a bias would be tied to their number.

        Args:
            run: runs the model on a batch.
        """
        with enable_fused_attention(self.model, restore=True):
            refused = channel_attention(self.model, run, self.called)
        if refused:
            raise ConversionError(
                f"convert: the features of the queries of {listed(refused)} are positions (attention over channels). A "
                "bias with a coefficient for each would fit inputs of one size only: pass bias=VisibleKeysLinearBias"
            )

    @contextlib.contextmanager
    def observe(self, attend: Attend) -> Iterator[None]:
        """Within the context, let ``attend`` answer every call of the layers; see ``Adapter``."""
        observers = {f.name: _Observer(f.name, attend) for f in self.called}
        try:
            for name, layer in self.own.items():
                layer.attention_fn = functools.partial(_answer_own, name, layer, attend)
            with (
                enable_fused_attention(self.model, restore=True),
                observed_layers(self.model, self.called, self.staying, observers),
            ):
                yield
        finally:
            for layer in self.own.values():
                layer.attention_fn = functional.attend

    def swap(self, biases: Mapping[str, AttentionBias]) -> None:
        """Give each layer sigmoid attention with its bias; see ``Adapter``."""
        placed = {
            name: bias.to(next(self.model.get_submodule(name).parameters(), torch.empty(0)).device)
            for name, bias in biases.items()
        }
        configs = _converted_configs(self.model, placed) if self.own else []
        with enable_fused_attention(self.model):
            replace_layers(self.model, self.called, self.staying, placed)
        for name, layer in self.own.items():
            layer.activation, layer.attention_bias = "sigmoid", placed[name]
        for part, config in configs:
            part.config = config


class _Observer(CallObserver):
    """Passes the calls of a layer to ``attend``."""

    def __init__(self, name: str, attend: Attend) -> None:
        self.name, self.attend = name, attend

    def answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        window: tuple[int, int] | None,
        scale: float | None,
        softmax: Callable[[], Any],
        sigmoid: Callable[[AttentionBias], Any],
    ) -> Any:
        """Return the result of a call; see ``CallObserver``."""
        if query.is_nested or not query.dim() == key.dim() == value.dim() == 4:
            raise ConversionError(
                f"convert: the attention of {self.name!r} must be called with plain tensors of shape (B, H, N, D), got "
                f"{'nested ones' if query.is_nested else tuple(query.shape)}"
            )
        if mask is not None and mask.is_floating_point():
            mask = mask.masked_fill(~is_visible(mask), -torch.inf)
        problem = make_problem(
            Problem, query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, window=window
        )
        with _without_function_modes():
            return self.attend(AttentionCall(self.name, problem, softmax, sigmoid))


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """Within the context no ``TorchFunctionMode`` is active: those of the layers around a call refuse its softmax."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _is_normalised(name: str, layer: Attention) -> bool:
    """Return True for a layer with softmax.

    Raises:
        ConversionError: for a layer that computes its attention in another way.
    """
    if layer.activation == "performer":
        raise ConversionError(f"convert: {name!r} has activation='performer', which is not supported; use softmax")
    if layer.activation != "softmax":
        return False
    if layer.attention_fn is not functional.attend or layer.sequence_shard is not None:
        raise ConversionError(
            f"convert: {name!r} has an attention_fn of its own, or is part of a context-parallel model: reset it"
        )
    return True


def _answer_own(
    name: str, layer: Attention, attend: Attend, _: str, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec
) -> Tensor:
    """Answer a call of an ``Attention``, as its ``attention_fn``."""

    def sigmoid(bias: AttentionBias) -> Tensor:
        b = layer.evaluate_bias(bias, query, key.shape[2], spec)
        return bias.scaled(functional.attend("sigmoid", query, key, value, spec._replace(bias=b)))

    if spec.left_padding is not None:
        raise ConversionError(f"convert: {name!r} was called with a cache of padded prompts: pass batches without")
    problem = functional.make_problem(query, key, value, spec)._replace(bias=None)
    call = AttentionCall(name, problem, lambda: functional.attend("softmax", query, key, value, spec), sigmoid)
    result: Tensor = attend(call)
    return result


def _converted_configs(model: nn.Module, biases: Mapping[str, AttentionBias]) -> list[tuple[Any, Any]]:
    """Return this library's models in a model whose attention is softmax, with their configurations after the swap."""
    settings = [_RULES[type(b)] for b in biases.values()]
    changes: dict[str, Any] = {"activation": "sigmoid", **settings[0]}
    found: list[tuple[Any, Any]] = []
    for part in model.modules():
        config = part.config if isinstance(part, Transformer) else None
        if isinstance(config, TransformerConfig) and config.activation == "softmax":
            found.append((part, dataclasses.replace(config, **changes)))
        elif isinstance(config, MaskedAutoencoderConfig) and config.encoder.activation == "softmax":
            encoder = dataclasses.replace(config.encoder, **changes)
            found.append((part, dataclasses.replace(config, encoder=encoder)))
    return found


# settings of ``TransformerConfig`` that make a bias of this class
_RULES: dict[type[AttentionBias], dict[str, Any]] = {
    VisibleKeysLinearBias: {"attention_bias": "log_visible", "learn_bias": "head"},
    QuadraticBias: {"attention_bias": "log_visible", "learn_bias": "quadratic"},
}


def _nothing_found(model: nn.Module) -> str:
    converted = [
        name
        for name, m in model.named_modules()
        if isinstance(m, CONVERTED) or (isinstance(m, Attention) and m.activation == "sigmoid")
    ]
    if converted:
        return (
            f"convert: {type(model).__name__} has sigmoid attention already ({', '.join(map(repr, converted[:3]))}"
            f"{', …' if len(converted) > 3 else ''}) and no softmax attention"
        )
    return f"convert: {type(model).__name__} has no softmax attention: the batches ran without calling any"
