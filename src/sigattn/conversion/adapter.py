"""Interface of the families of models to ``convert``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import nn

from sigattn.conversion.report import ConversionError, SoftmaxLayer
from sigattn.nn.bias import AttentionBias
from sigattn.nn.observer import Attend


@runtime_checkable
class Adapter(Protocol):
    """Softmax attention of one family of models: its layers, their calls, and their conversion."""

    softmax: tuple[SoftmaxLayer, ...]  # set by ``layers``

    def layers(self) -> Sequence[str]:
        """Return the names of the layers to convert, in the model's order.

        Raises:
            ConversionError: naming the layers that cannot be converted, or if there is none to convert.
        """

    def observe(self, attend: Attend) -> AbstractContextManager[None]:
        """Within the context, let ``attend`` answer every call of the layers; the model is unchanged after it."""

    def swap(self, biases: Mapping[str, AttentionBias | None], normalize: bool) -> None:
        """Give each layer that has a bias sigmoid attention with it, in place; all of them or, if it raises, none.

        Other layers keep their softmax, also in ``self.softmax``. ``normalize``: divide the weights of each query by
        their sum.
        """


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


def refuse_distributed(model: nn.Module) -> None:
    """Raise for a model that distributed training has wrapped or sharded, because it would not know new parameters.

    Raises:
        ConversionError: naming the wrapped layer.
    """
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    for name, module in model.named_modules():
        distributed = wrappers & {kind.__name__ for kind in type(module).__mro__}
        if distributed or any(type(p).__name__ == "DTensor" for p in module.parameters(recurse=False)):
            raise ConversionError(
                f"convert: {name!r} ({type(module).__name__}) is part of distributed training, which would not "
                "synchronise the gradients of new biases: convert the model first, then wrap or shard it"
            )
