"""Adapter of Hugging Face's models, whose attention goes through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.conversion.attention_call import Attend, AttentionCall, ConversionError, refuse_offloaded
from sigattn.conversion.replacement import find_softmax, refuse_distributed
from sigattn.integrations.transformers import conversion
from sigattn.integrations.transformers.interface import Call
from sigattn.nn.bias import AttentionBias
from sigattn.nn.softmax_calls import listed
from sigattn.nn.visible_keys import evaluate_bias, is_visible
from sigattn.ops import reference
from sigattn.ops.operands import make_problem
from sigattn.ops.problem import Problem


class TransformersAdapter:
    """Softmax attention of models of transformers: a model, or several within one.

    Args:
        model: the model. run: runs the model on one batch, in evaluation mode.
    """

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        self.model: nn.Module = model
        self.run: Callable[[], object] = run
        self.names: dict[nn.Module, str] = {}

    def layers(self) -> Sequence[str]:
        """Return the names of the attention layers; see ``Adapter``."""
        try:
            refuse_distributed(self.model)
            self.names = {layer: name for name, layer in conversion.attention_layers(self.model).items()}
        except ValueError as error:
            raise ConversionError(f"convert: {error}") from error
        if not self.names:
            raise ConversionError(f"convert: {type(self.model).__name__} has no attention")
        refuse_offloaded({name: layer for layer, name in self.names.items()})
        inside = {m for root in conversion.roots(self.model) for m in root.modules()}
        if self.model not in inside:
            others = [f for f in find_softmax(self.model, self.run) if f.attention and f.module not in inside]
            if others:
                raise ConversionError(
                    f"convert: {type(self.model).__name__} contains models of transformers and other attention "
                    f"({listed(others)}): convert its parts one by one"
                )
        return list(self.names.values())

    def observe(self, attend: Attend) -> AbstractContextManager[None]:
        """Within the context, let ``attend`` answer every call of the layers; see ``Adapter``."""

        def answer(layer: nn.Module, call: Call) -> Tensor:
            name = self._name(layer)
            mask = call.mask
            if mask is not None and mask.is_floating_point():
                mask = mask.masked_fill(~is_visible(mask), -torch.inf)
            problem = make_problem(
                Problem,
                call.query,
                call.key,
                call.value,
                attn_mask=mask,
                is_causal=call.causal,
                scale=call.scale,
                softcap=call.softcap,
            )

            def sigmoid(bias: AttentionBias) -> Tensor:
                b = evaluate_bias(bias, call.query, call.key.shape[2], call.mask, is_causal=call.causal)
                return bias.scaled(call.sigmoid(b))

            result: Tensor = attend(AttentionCall(name, problem, lambda: _softmax(problem), sigmoid))
            return result

        return conversion.observe(self.model, answer)

    def swap(self, biases: Mapping[str, AttentionBias]) -> None:
        """Give each layer sigmoid attention with its bias; see ``Adapter``."""
        try:
            conversion.swap(self.model, biases)
        except ValueError as error:
            raise ConversionError(f"convert: {error}") from error

    def _name(self, layer: nn.Module) -> str:
        if layer not in self.names:
            raise ConversionError(f"convert: attention was called by a {type(layer).__name__} outside of the model")
        return self.names[layer]


def contains_transformers_model(model: nn.Module) -> bool:
    """Return True if a model is, or contains, a model of transformers."""
    return bool(conversion.roots(model))


def _softmax(problem: Problem) -> Tensor:
    """Return the output of softmax attention, (B, Hq, N, Dv)."""
    p = problem
    if not p.softcap:
        return F.scaled_dot_product_attention(
            p.query,
            p.key,
            p.value,
            p.attn_mask if p.attn_mask is None or p.attn_mask.dtype is torch.bool else p.attn_mask.to(p.query.dtype),
            is_causal=p.right == 0,
            scale=p.scale,
            enable_gqa=p.query.shape[1] != p.key.shape[1],
        )
    return torch.cat([reference.attention(p.rows(i, stop), "softmax") for i, stop in reference.row_blocks(p)], 2)
