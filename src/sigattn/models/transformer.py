"""Base class of the models, and recording of what their attention layers compute."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sigattn.nn.attention import Attention, Record
from sigattn.nn.batch_norm import unchanged_running_stats
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.initialization import initialize
from sigattn.ops.statistics import AttentionStatistics


@contextmanager
def recording(module: nn.Module, what: Record = "norm") -> Iterator[list[Attention]]:
    """Set ``Attention.record`` of a module's attention layers within the context, and yield the layers."""
    layers = [m for m in module.modules() if isinstance(m, Attention)]
    try:
        for layer in layers:
            layer.record = what
        yield layers
    finally:
        for layer in layers:
            layer.record = "nothing"


def residual_stream(x: Tensor) -> Tensor:
    """Return the input of the first block, in float32 under autocast: 16 bits would lose LayerScale's small updates."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


class Transformer(nn.Module):
    """Base class of the models.

    Attributes:
        checkpoint_activations: True to recompute each block in the backward pass instead of storing its activations.
    """

    checkpoint_activations = False
    config: Any

    def reset_parameters(self) -> None:
        initialize(self, self.config.initialization)

    def extra_repr(self) -> str:
        """Return the settings of the configuration that differ from the default ones."""
        default = type(self.config)()
        values = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))

    def run_block(self, block: nn.Module, x: Tensor, **options: Any) -> Tensor:
        """Return a block's output, with activation checkpointing if it is on."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            if not torch.compiler.is_compiling():  # compiled, recomputation does not update buffers
                options["context_fn"] = lambda: (nullcontext(), unchanged_running_stats(block))
            return checkpoint(block, x, use_reentrant=False, **options)
        return block(x, **options)

    def attention_report(self, *inputs: object, **options: object) -> list[AttentionStatistics]:
        """Return row mass, output norm, largest logit and sparsity of each attention layer for one forward.

        Each statistic is (batch, heads). The arguments are those of forward, which runs in evaluation mode; memory is
        linear in the length.
        """
        with evaluation_mode(self), recording(self, "everything") as layers:
            self(*inputs, **options)
            report = [layer.statistics for layer in layers if layer.statistics is not None]
            for layer in layers:
                layer.statistics = None
        return report
