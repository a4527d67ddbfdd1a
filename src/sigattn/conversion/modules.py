"""Adapter of models whose attention is ``sigattn.nn.Attention``, ``nn.MultiheadAttention``, or PyTorch's function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.conversion.adapter import Adapter
from sigattn.conversion.replacement import (
    enable_fused_attention,
    find_softmax,
    observed_layers,
    refuse_wrapped,
    replace_layers,
)
from sigattn.conversion.report import ConversionError, SoftmaxLayer
from sigattn.models.autoencoder import MaskedAutoencoderConfig
from sigattn.models.config import TransformerConfig
from sigattn.models.transformer import Transformer
from sigattn.nn import functional
from sigattn.nn.attention import Attention
from sigattn.nn.bias import AttentionBias, BatchLengthBias, ConstantBias, LearnableBias, VisibleKeysBias
from sigattn.nn.fitted_bias import VisibleKeysLinearBias
from sigattn.nn.functional import MaskSpec
from sigattn.nn.observer import Attend, AttentionCall, CallObserver
from sigattn.nn.run_search import Example
from sigattn.nn.sigmoid_layer import CONVERTED
from sigattn.nn.softmax_calls import SOFTMAX_NAME, Finding, listed


class ModuleAdapter(Adapter):
    """Softmax attention of a model of PyTorch.

    Args:
        fitted: True if batches run the model: every attention must then be called.
    """

    def __init__(
        self, model: nn.Module, example: Example | None = None, keep: Sequence[str] = (), *, fitted: bool = True
    ) -> None:
        super().__init__(model, example, keep)
        self.fitted: bool = fitted
        self.names: list[str] = []
        self.library: dict[str, Attention] = {}  # layers of this library
        self.called: list[Finding] = []  # layers that call PyTorch's functions
        self.staying: list[Finding] = []

    def layers(self) -> Sequence[str]:
        """Return the names of the attention layers; see ``Adapter``."""
        attention = {n: m for n, m in self.model.named_modules() if isinstance(m, Attention) and not self.keeps(n)}
        library = {name: layer for name, layer in attention.items() if _is_softmax(name, layer)}
        with enable_fused_attention(self.model, restore=True):
            findings = find_softmax(self.model, self.example)
        self.check_keep([f.name for f in findings])
        self.softmax = tuple(SoftmaxLayer(f.name, type(f.module).__name__, f.call, self._outcome(f)) for f in findings)
        converted = [f for f, layer in zip(findings, self.softmax, strict=True) if layer.is_sigmoid]
        self.staying = [f for f in findings if f not in converted and f.called]
        if refused := [f for f in self.staying if f.attention and not self.keeps(f.name)]:
            advice = (
                "Only their code was examined: pass example=(...), arguments of one forward, so that a run shows what "
                "their softmax belongs to"
                if self.example is None
                else "Let them call F.softmax over keys once, or F.scaled_dot_product_attention (a flag such as "
                'fused_attn=True or attn_implementation="sdpa"), or rewrite them with sigattn.nn.Attention'
            )
            raise ConversionError(
                f"convert: the softmax of these layers cannot be replaced: {listed(refused)}. {advice}. To keep their "
                "softmax, pass their names, or patterns, as keep"
            )
        if self.fitted and (uncalled := [f for f in findings if not (f.called or self.keeps(f.name))]):
            raise ConversionError(
                f"convert: the batches do not reach the attention of {listed(uncalled)}, which stays softmax: pass "
                "batches that come to it"
            )
        unconverted = {f.name for f in findings if f not in converted}
        self.library = {name: layer for name, layer in library.items() if name not in unconverted}
        self.called = [f for f in converted if f.name not in self.library]
        self._check_nesting()
        refuse_wrapped(self.called)
        names = {*self.library, *(f.name for f in self.called)}
        if not names:
            raise ConversionError(self._nothing_to_convert())
        self.names = [name for name, _ in self.model.named_modules() if name in names]
        return self.names

    @contextlib.contextmanager
    def observe(self, attend: Attend) -> Iterator[None]:
        """Within the context, let ``attend`` answer every call of the layers; see ``Adapter``."""
        observers = {f.name: CallObserver(f.name, attend) for f in self.called}
        try:
            for name, layer in self.library.items():
                layer.attention_fn = functools.partial(_answer, name, layer, attend)
            with (
                enable_fused_attention(self.model, restore=True),
                observed_layers(self.model, self.called, self.staying, observers),
            ):
                yield
        finally:
            for layer in self.library.values():
                layer.attention_fn = functional.attend

    def swap(self, biases: Mapping[str, AttentionBias | None], normalize: bool) -> None:
        """Give layers sigmoid attention with their biases; see ``Adapter``."""
        self._keep_softmax([name for name in self.names if name not in biases])
        placed = {
            name: None if bias is None else bias.to(next(self.model.get_submodule(name).parameters(), _ON_CPU).device)
            for name, bias in biases.items()
        }
        for name, bias in placed.items():
            if bias is not None and (bias.needs_alibi or bias.needs_lengths):
                raise ConversionError(
                    f"convert: {type(bias).__name__} needs lengths or ALiBi, which {name!r} does not give; use another "
                    "bias (None is -log of the number of visible keys)"
                )
        of_library = {name: placed[name] or VisibleKeysBias() for name in self.library}
        configs = _converted_configs(self.model, of_library, normalize) if of_library else []
        with enable_fused_attention(self.model):
            replace_layers(self.model, self.called, self.staying, placed, normalize)
        for name, layer in self.library.items():
            layer.activation, layer.attention_bias, layer.normalize = "sigmoid", of_library[name], normalize
        for part, config in configs:
            part.config = config

    def _keep_softmax(self, names: Sequence[str]) -> None:
        """Let these of the layers keep their softmax."""
        if not names:
            return
        self.softmax = tuple(dataclasses.replace(s, outcome="kept") if s.name in names else s for s in self.softmax)
        self.library = {name: layer for name, layer in self.library.items() if name not in names}
        self.staying += [f for f in self.called if f.name in names]
        self.called = [f for f in self.called if f.name not in names]
        self._check_nesting()

    def _outcome(self, finding: Finding) -> Any:
        if self.keeps(finding.name):
            return "kept"
        if not finding.called:
            return "not called"
        if not finding.replaceable:
            return "not attention"
        return "materialised" if finding.call == SOFTMAX_NAME else "converted"

    def _check_nesting(self) -> None:
        """Raise for a layer that keeps softmax inside one that becomes sigmoid, whose forward would change it too."""
        for outer in self.called:
            modules = set(outer.module.modules()) - {outer.module}
            softmax = [f for f in self.staying if f.replaceable or outer.call == SOFTMAX_NAME]
            if inside := [f.name for f in softmax if f.module in modules]:
                raise ConversionError(
                    f"convert: {outer.name!r} is converted and contains {', '.join(inside)}, which keeps its softmax: "
                    "keep both or neither"
                )

    def _nothing_to_convert(self) -> str:
        kind = type(self.model).__name__
        converted = [
            name
            for name, m in self.model.named_modules()
            if isinstance(m, CONVERTED) or (isinstance(m, Attention) and m.activation == "sigmoid")
        ]
        if converted:
            shown = ", ".join(map(repr, converted[:3])) + (", …" if len(converted) > 3 else "")
            return f"convert: {kind} has sigmoid attention already ({shown}) and no softmax attention"
        message = f"convert: {kind} has no softmax attention that can be replaced"
        if self.staying:
            message += f". These compute a softmax that is kept, or is not an attention's: {listed(self.staying)}"
        return message + ("" if self.example else ". Pass example=(...) to find attention by running the model")


_ON_CPU = torch.empty(0, device="cpu")


def _is_softmax(name: str, layer: Attention) -> bool:
    """Return True for a layer with softmax; raise ConversionError for one that computes it in another way."""
    if layer.activation == "performer":
        raise ConversionError(f"convert: {name!r} has activation='performer', which is not supported; use softmax")
    if layer.activation != "softmax":
        return False
    if layer.attention_fn is not functional.attend or layer.sequence_shard is not None:
        raise ConversionError(
            f"convert: {name!r} has a custom attention_fn, or is part of a context-parallel model: reset it"
        )
    return True


def _answer(
    name: str, layer: Attention, attend: Attend, _: str, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec
) -> Tensor:
    """Answer a call of an ``Attention``, as its ``attention_fn``."""

    def normalized(bias: AttentionBias) -> Tensor:
        b = layer.evaluate_bias(bias, query, key.shape[2], spec)
        return bias.scaled(functional.attend("sigmoid", query, key, value, spec._replace(bias=b, normalize=True)))

    if spec.left_padding is not None:
        raise ConversionError(f"convert: {name!r} was called with a cache of padded prompts: pass batches without")
    problem = functional.make_problem(query, key, value, spec)._replace(bias=None)
    call = AttentionCall(name, problem, lambda: functional.attend("softmax", query, key, value, spec), normalized)
    result: Tensor = attend(call)
    return result


def _converted_configs(model: nn.Module, biases: Mapping[str, AttentionBias], normalize: bool) -> list[tuple[Any, Any]]:
    """Return this library's softmax models in a model, with their configurations after the swap."""
    pairs: list[tuple[Any, Any]] = []
    for path, part in model.named_modules():
        config: Any = part.config if isinstance(part, Transformer) else None
        encoder = config.encoder if isinstance(config, MaskedAutoencoderConfig) else None
        settings = {**_settings(next(iter(biases.values()))), "normalize": normalize}
        if isinstance(config, TransformerConfig) and config.activation == "softmax":
            pairs.append((part, dataclasses.replace(config, **settings)))
        elif encoder is not None and encoder.activation == "softmax":
            pairs.append((part, dataclasses.replace(config, encoder=dataclasses.replace(encoder, **settings))))
        else:
            continue
        layers = (f"{path}.{name}".removeprefix(".") for name, m in part.named_modules() if isinstance(m, Attention))
        if kept := [name for name in layers if name not in biases]:
            raise ConversionError(
                f"convert: {type(part).__name__} would keep softmax in {', '.join(map(repr, kept))}, but its "
                "configuration has one kind of attention for all layers: keep all of its layers, or none"
            )
    return pairs


def _settings(bias: AttentionBias) -> dict[str, Any]:
    """Return the settings of ``TransformerConfig`` that make such a bias."""
    if isinstance(bias, ConstantBias) and not bias.is_rule:
        return {"activation": "sigmoid", "attention_bias": bias.value}
    if type(bias) is LearnableBias:
        learn = "layer" if bias.value.numel() == 1 else "head"
        return {"activation": "sigmoid", "attention_bias": bias.initial, "learn_bias": learn}
    if type(bias) not in _RULES:
        raise ConversionError(
            f"convert: no configuration of sigattn.models names {type(bias).__name__}: use another bias"
        )
    rule, learn = _RULES[type(bias)]
    return {"activation": "sigmoid", "attention_bias": rule, "learn_bias": learn}


_RULES: dict[type[AttentionBias], tuple[str, str]] = {
    BatchLengthBias: ("log_batch", "no"),
    VisibleKeysBias: ("log_visible", "no"),
    VisibleKeysLinearBias: ("log_visible", "head"),
}
