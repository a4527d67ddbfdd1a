"""Replacement of the computation in a model's attention layers, to observe or to change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sigattn.nn import functional
from sigattn.nn.attention import Attention


def replace_attention(model: nn.Module, attend: functional.AttentionFn) -> None:
    """Make every attention layer of a model compute its output by ``attend``."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.attention_fn = attend


@contextmanager
def replaced_attention(model: nn.Module, attend: functional.AttentionFn) -> Iterator[None]:
    """Use ``attend`` in every attention layer of a model within the context."""
    replace_attention(model, attend)
    try:
        yield
    finally:
        replace_attention(model, functional.attend)
