"""Keys and values of what a decoder has seen, kept so that each new token is computed once."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of one attention layer, in memory made once for a longest sequence.

    Args:
        capacity: the longest sequence.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, Hkv, new, D); gives all of them, (B, Hkv, length, D).

        Raises:
            ValueError: if they do not fit.
            RuntimeError: if they want a gradient, which would be lost.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("a cache of keys and values has no gradient: use it under torch.no_grad()")
        stop = self.length + key.shape[2]
        if stop > self.capacity:
            new = key.shape[2]
            raise ValueError(f"a cache of {self.capacity} positions holds {self.length}: {new} more do not fit")
        if self._key is None or self._value is None:
            self._key = key.new_empty(*key.shape[:2], self.capacity, key.shape[3])
            self._value = value.new_empty(*value.shape[:2], self.capacity, value.shape[3])
        if self._key.shape[0] != key.shape[0]:
            raise ValueError(f"the cache holds a batch of {self._key.shape[0]}, and got one of {key.shape[0]}")
        self._key[:, :, self.length : stop] = key
        self._value[:, :, self.length : stop] = value
        self.length = stop
        return self._key[:, :, :stop], self._value[:, :, :stop]
