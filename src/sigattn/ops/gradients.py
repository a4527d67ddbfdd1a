"""Results of forward passes, and arguments and results of backward passes."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Saved = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of the weights that a forward pass saves
Prepared = dict[Hashable, Any]  # what a backend keeps for the passes with a signature (``call_cache``)


class Result(NamedTuple):
    """What a forward pass returns, and the backward pass needs."""

    out: Tensor  # output of attention
    weights: Tensor  # saved weights; empty if none are saved
    # (*query.shape[:-1], 2) in float32 or better, the sum of each query's weights and the lift with which they were
    # computed (``normalization``); empty without ``normalize``
    row_sums: Tensor


def without_saved(out: Tensor) -> Result:
    """Return a result of an output alone. Its empty tensors are two, because an op must not return one twice."""
    return Result(out, out.new_empty(0), out.new_empty(0))


class NeedsGrad(NamedTuple):
    """Flags of the gradients to compute."""

    query: bool = True
    key: bool = True
    value: bool = True
    bias: bool = False
    attn_mask: bool = False
    alibi_slopes: bool = False


class Gradients(NamedTuple):
    """Gradients, each of the shape and dtype of its argument; None if not needed."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
