"""Backend "blocked": sigmoid attention in tiles, by PyTorch's operators."""

from sigattn.ops.blocked.dense import backward, forward, saved_weights, unavailable
from sigattn.ops.blocked.packed import kvcache_forward, varlen_backward, varlen_forward

__all__ = [
    "backward", "forward", "kvcache_forward", "saved_weights", "unavailable", "varlen_backward", "varlen_forward",
]  # fmt: skip
