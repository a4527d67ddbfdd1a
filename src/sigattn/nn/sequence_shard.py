"""Interface between an attention layer and context parallelism (``sigattn.distributed``)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class SequenceShard(Protocol):
    """Part of each sequence that this process holds.

    Attributes:
        length: length of the whole sequence.
    """

    length: int

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions that this process holds, (n,) integers."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the output (B, Hq, n, Dv) of this process's queries over the whole sequence.

        query is (B, Hq, n, D), key (B, Hkv, n, D) and value (B, Hkv, n, Dv): the parts that this process holds.
        Options are is_causal, window, bias, alibi_slopes and normalize, as in ``sigattn.sigmoid_attention``.
        """
