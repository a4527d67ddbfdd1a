"""Memory of the C library's allocator on a CPU."""

from __future__ import annotations

import functools

import torch


@functools.cache
def keep_memory_warm() -> None:
    """Make glibc's allocator keep freed memory of up to 31 MiB for reuse, once per process.

    It returns larger freed blocks than a threshold to the system, so that each new one causes page faults, which
    doubled the time of a forward pass (docs/log.md). The threshold is the size of the largest block freed so far, up to
    32 MiB; allocating that much and freeing it, without touching it, raises it. Other allocators are not affected.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")
