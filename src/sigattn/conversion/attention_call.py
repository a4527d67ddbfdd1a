"""Calls of attention in a model that is being converted, and the interface of the families of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from sigattn.nn.bias import AttentionBias
from sigattn.ops.problem import Problem


class ConversionError(ValueError):
    """A model cannot be converted; the message names the layer or the batch, and the model is unchanged."""


def refuse_offloaded(layers: Mapping[str, nn.Module]) -> None:
    """Raise for layers whose parameters are on the meta device, because their biases would be lost there.

    Raises:
        ConversionError: naming the layers.
    """
    names = [name for name, layer in layers.items() if any(p.is_meta for p in layer.parameters())]
    if names:
        raise ConversionError(
            f"convert: the parameters of {', '.join(map(repr, names))} are on the meta device, where a bias has no "
            "values: convert the model before accelerate offloads it, or load its weights first"
        )


@dataclass(frozen=True)
class AttentionCall:
    """One call of a softmax attention, which the receiver answers with ``softmax()`` or ``sigmoid(bias)``.

    Attributes:
        name: name of the layer within the model.
        problem: operands and masks of the call; its bias is None.
        softmax: returns the layer's own result.
        sigmoid: returns the result of the converted layer with this bias.
    """

    name: str
    problem: Problem
    softmax: Callable[[], Any]
    sigmoid: Callable[[AttentionBias], Any]


Attend = Callable[[AttentionCall], Any]  # returns the result of a call


@runtime_checkable
class Adapter(Protocol):
    """Softmax attention of one family of models: its layers, their calls, and their conversion."""

    def layers(self) -> Sequence[str]:
        """Return the names of the layers to convert, in the model's order.

        Raises:
            ConversionError: naming the layers that cannot be converted, or if there is none to convert.
        """

    def observe(self, attend: Attend) -> AbstractContextManager[None]:
        """Within the context, let ``attend`` answer every call of the layers; the model is unchanged after it."""

    def swap(self, biases: Mapping[str, AttentionBias]) -> None:
        """Give each layer sigmoid attention with its bias, in place; all layers or, if it raises, none."""
