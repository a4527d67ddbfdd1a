"""What a backward pass is asked for and gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Needs(NamedTuple):
    """Which gradients are asked for."""

    query: bool = True
    key: bool = True
    value: bool = True
    bias: bool = False
    attn_mask: bool = False
    alibi_slopes: bool = False


class Gradients(NamedTuple):
    """The gradients, each of the shape and dtype of what it belongs to; None where not asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
