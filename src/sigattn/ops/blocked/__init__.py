"""Backend "blocked": sigmoid attention in tiles, by PyTorch's operators."""

import functools

from sigattn.ops import packed
from sigattn.ops.blocked.dense import attend, backward, differentiate, forward, saved_weights

__all__ = ["backward", "forward", "kvcache_forward", "saved_weights", "varlen_backward", "varlen_forward"]

_PIECE = 1 << 19  # measured on CPUs
varlen_forward = functools.partial(packed.varlen_forward, attend)
varlen_backward = functools.partial(packed.varlen_backward, differentiate)
kvcache_forward = functools.partial(packed.kvcache_forward, attend, _PIECE)
