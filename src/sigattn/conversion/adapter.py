"""Interface of the families of models to ``convert``, and models that none of them supports."""

import abc
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from sigattn.conversion.report import ConversionError, SoftmaxLayer
from sigattn.nn.bias import AttentionBias
from sigattn.nn.observer import Attend
from sigattn.nn.run_search import Example


class Adapter(abc.ABC):
    """Softmax attention of one family of models: its layers, their calls, and their conversion.

    Args:
        model: the model. example: arguments of its forward, or a function that runs it; None to search its code only.
        keep: names, or patterns of names, of layers that keep their softmax.

    Attributes:
        softmax: each layer that computes a softmax, with its outcome; set by ``layers``.
    """

    softmax: tuple[SoftmaxLayer, ...] = ()

    def __init__(self, model: nn.Module, example: Example | None = None, keep: Sequence[str] = ()) -> None:
        self.model: nn.Module = model
        self.example: Example | None = example
        self.keep: Sequence[str] = keep

    @abc.abstractmethod
    def layers(self) -> Sequence[str]:
        """Return the names of the layers to convert; raise ConversionError for those that cannot be."""

    @abc.abstractmethod
    def observe(self, attend: Attend) -> AbstractContextManager[None]:
        """Within the context, let ``attend`` answer every call of the layers; the model is unchanged after it."""

    @abc.abstractmethod
    def swap(self, biases: Mapping[str, AttentionBias | None], normalize: bool) -> None:
        """Give the layers of ``biases`` sigmoid attention in place, all or none; others keep their softmax."""

    def keeps(self, name: str) -> bool:
        """Return True for a layer that ``keep`` names."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep)

    def check_keep(self, names: Sequence[str]) -> None:
        """Raise ConversionError if an entry of ``keep`` matches none of these layers with a softmax."""
        if unused := [pattern for pattern in self.keep if not fnmatch.filter(names, pattern)]:
            shown = ", ".join(map(repr, names)) or "none"
            raise ConversionError(f"keep={unused} matches no layer with a softmax; there are: {shown}")


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def refuse_offloaded(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ConversionError for layers with parameters on the meta device, because their biases would be lost there."""
    if offloaded := [n for n in names if any(p.is_meta for p in model.get_submodule(n).parameters())]:
        raise ConversionError(
            f"the parameters of {', '.join(map(repr, offloaded))} are on the meta device, where a bias has no "
            "values: convert the model before accelerate offloads it, or load its weights first"
        )


def refuse_distributed(model: nn.Module) -> None:
    """Raise ConversionError for a model that distributed training wraps or shards: it would not know new parameters."""
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    for name, module in model.named_modules():
        distributed = wrappers & {kind.__name__ for kind in type(module).__mro__}
        if distributed or any(type(p).__name__ == "DTensor" for p in module.parameters(recurse=False)):
            raise ConversionError(
                f"{name!r} ({type(module).__name__}) is part of distributed training, which would not "
                "synchronise the gradients of new biases: convert the model first, then wrap or shard it"
            )


def refuse_peft(model: nn.Module) -> None:
    """Raise ConversionError for adapters of peft, which are saved without their model and loaded on softmax."""
    for name, module in model.named_modules():
        if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
            where = f"{name} is a {type(module).__name__}" if name else f"it is a {type(module).__name__}"
            raise ConversionError(
                f"{type(model).__name__} has an adapter of peft ({where}), which is saved without the "
                "converted attention: convert the base model, save it, and add the adapter to it; or convert "
                "model.merge_and_unload()"
            )
