"""Interface through which the attention calls of another library's layers are observed before a conversion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sigattn.nn.bias import AttentionBias


class CallObserver(ABC):
    """Receiver of a layer's attention calls; it takes the place of the layer's bias while the layer is observed."""

    @abstractmethod
    def answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        window: tuple[int, int] | None,
        scale: float | None,
        softmax: Callable[[], Any],
        sigmoid: Callable[[AttentionBias], Any],
    ) -> Any:
        """Return the result of a call.

        Args:
            query, key, value: (B, Hq, N, D), (B, Hkv, M, D), (B, Hkv, M, Dv); of any dimensions if the layer's are.
            mask, is_causal, window, scale: as in ``sigmoid_attention``.
            softmax: computes the result with softmax. sigmoid: computes it with sigmoid attention of this bias.
        """
