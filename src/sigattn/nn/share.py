"""What an attention layer asks where several processes share each sequence (``sigattn.distributed``)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class SequenceShare(Protocol):
    """This process's share of each sequence.

    Attributes:
        length: of the whole sequence.
    """

    length: int

    def positions(self, device: torch.device) -> Tensor:
        """(n,) integers, this process's."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        window: tuple[int, int] | None,
        bias: float | Tensor,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        """(B, Hq, n, D), (B, Hkv, n, D), (B, Hkv, n, Dv) → (B, Hq, n, Dv), over the whole sequence."""
