"""Evaluation mode of a model within a context."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the context a model is in evaluation mode; the mode of each layer is restored after it.

    It is set by the layer's ``train``, which some layers override: to merge weights, or to keep values in evaluation.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            if module.training != mode:
                module.train(mode)
