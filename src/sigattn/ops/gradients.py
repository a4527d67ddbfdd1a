"""Arguments and results of backward passes: flags of the needed gradients, and the gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Saved = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of the weights that a forward pass saves


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
