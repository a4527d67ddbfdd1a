"""Keys and values of what a decoder has seen, kept so that each new token is computed once."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of one attention layer, in memory made once for a longest sequence.

    Args:
        capacity: the longest sequence.
        first: (B,) integers, where each sample begins whose prompt was padded on the left; None where all begin at 0.

    Attributes:
        length: how many positions are filled, padding included.
        key, value: (B, Hkv, capacity, D), once there is something in them.
    """

    def __init__(self, capacity: int, first: Tensor | None = None) -> None:
        self.capacity, self.first, self.length = capacity, first, 0
        self.key: Tensor | None = None
        self.value: Tensor | None = None

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
        if self.first is not None and len(self.first) != len(key):
            raise ValueError(f"the cache is for a batch of {len(self.first)}, and got one of {len(key)}")
        if self.key is None or self.value is None:
            self.key = key.new_empty(*key.shape[:2], self.capacity, key.shape[3])
            self.value = value.new_empty(*value.shape[:2], self.capacity, value.shape[3])
        if self.key.shape[0] != key.shape[0]:
            raise ValueError(f"the cache holds a batch of {self.key.shape[0]}, and got one of {key.shape[0]}")
        self.key[:, :, self.length : stop] = key
        self.value[:, :, self.length : stop] = value
        self.length = stop
        return self.key[:, :, :stop], self.value[:, :, :stop]

    def pick(self, samples: Tensor) -> None:
        """Go on with these samples, (any number,) of their numbers: some twice, others not."""
        if self.first is not None:
            self.first = self.first[samples]
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[samples], self.value[samples]
