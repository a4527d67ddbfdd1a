"""Key/value cache of a decoder's attention layers."""

import torch
from torch import Tensor


class KVCache:
    """Key/value cache of one attention layer, allocated once for the longest sequence.

    Args:
        capacity: length of the longest sequence.
        left_padding: (B,) integers, first position of each sample whose prompt is padded on the left; None for 0.

    Attributes:
        length: number of positions filled, padding included.
        key, value: (B, Hkv, capacity, D); None before the first ``append``.
    """

    def __init__(self, capacity: int, left_padding: Tensor | None = None) -> None:
        self.capacity: int = capacity
        self.left_padding: Tensor | None = left_padding
        self.length: int = 0
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, (B, Hkv, new, D), without gradients; return all of them, (B, Hkv, length, D)."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("a key/value cache has no gradient: use it under torch.no_grad()")
        new = key.shape[2]
        stop = self.length + new
        if stop > self.capacity:
            raise ValueError(f"the cache has {self.capacity} positions and holds {self.length}: {new} more do not fit")
        if self.left_padding is not None and self.left_padding.shape[0] != key.shape[0]:
            raise ValueError(f"the cache is for a batch of {self.left_padding.shape[0]}, got a batch of {key.shape[0]}")
        if self.key is None or self.value is None:
            self.key = key.new_empty(*key.shape[:2], self.capacity, key.shape[3])
            self.value = value.new_empty(*value.shape[:2], self.capacity, value.shape[3])
        if self.key.shape[0] != key.shape[0]:
            raise ValueError(f"the cache holds a batch of {self.key.shape[0]}, got a batch of {key.shape[0]}")
        self.key[:, :, self.length : stop] = key
        self.value[:, :, self.length : stop] = value
        self.length = stop
        return self.key[:, :, :stop], self.value[:, :, :stop]
