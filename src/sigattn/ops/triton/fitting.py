"""Tile shapes that fit the shared memory of a device: estimated before a launch, reduced if a launch does not fit.

The tables of ``tuning`` are for calls without a mask. Tiles of ``attn_mask`` are in flight like those of keys and
values, and the gradient of the mask is a tile of float32. With a mask, and for decoding, which has no table, the first
smaller configuration is used that fits according to ``shared_memory``. That is an upper bound; the tests compare it
with the compiler for every option (tests/ops/compiled).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from triton.runtime.errors import OutOfResources

from sigattn.ops.triton import tuning
from sigattn.ops.triton.tuning import Config

_KIB = 1024
# Shared memory of a program in KiB, by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
_LIMITS = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_LEAST_LIMIT = 99
_RESERVED = 2 * _KIB  # barriers and sums of rows
_SMALLEST_BLOCK = 16  # rows of a tile, which tl.dot needs

Started = TypeVar("Started")


class Operands(NamedTuple):
    """Sizes that decide how much shared memory a kernel takes."""

    d: int  # features of query and key, padded
    dv: int  # of value, padded
    itemsize: int  # bytes of one of their numbers
    mask: int  # bytes of an entry of attn_mask, 0 without one
    mask_gradient: bool  # whether the mask's gradient is computed
    are_split: bool = False  # whether numbers are split in two for products in TF32


def shared_memory_limit(architecture: int) -> int:
    """Return the bytes of shared memory that a program may take on a GPU of a compute capability."""
    return _LIMITS.get(architecture, _LEAST_LIMIT) * _KIB


def shared_memory(kernel: str, config: Config, operands: Operands, architecture: int) -> int:
    """Return an upper bound on the bytes of shared memory of a kernel on an NVIDIA GPU."""
    d, dv, itemsize, mask, mask_gradient, are_split = operands
    m, n = config.block_m, config.block_n
    resident, streamed = {
        tuning.FWD: (m * d, n * (d + dv)),
        tuning.DKDV: (n * (d + dv), m * (d + dv)),
        tuning.DQ: (m * (d + dv), n * (d + dv)),
        tuning.DECODE: (m * d, n * (d + dv)),
    }[kernel]
    # wgmma and tcgen05 read a tile while the next ones arrive; before Hopper it has been copied to registers by then.
    buffers = config.stages if architecture in (90, 100, 103) else max(config.stages - 1, 1)
    buffers += 2 * are_split
    # Masks in flight and P on its way to a product, or one tile of float32 that changes its layout.
    per_score = max((config.stages - 1) * mask + itemsize, 4) + 4 * mask_gradient
    return itemsize * (resident + buffers * streamed) + m * n * per_score + _RESERVED


def fit(kernel: str, config: Config, operands: Operands, architecture: int) -> Config:
    """Return the configuration, or the first smaller one that fits. With one stage nothing is in flight."""
    scores, limit = _scores_with_mask(kernel, architecture) * 32 * config.warps, shared_memory_limit(architecture)
    while operands.mask and config.block_m * config.block_n > scores:
        config = _halved(config)
    while config.stages > 1 and shared_memory(kernel, config, operands, architecture) > limit:
        config = smaller(config) or config._replace(stages=1)
    return config


def _scores_with_mask(kernel: str, architecture: int) -> int:
    """Return the most scores of a thread for which registers suffice, because a mask's tile takes some as well.

    With 64, as without a mask, the forward pass spilled 52 to 88 in its loops on sm_90 (D = 128). Before Hopper
    operands lie in registers, too: with 32, bwd_dkdv_kernel spilled 321 (sm_86, D = 64), the forward 205 (D = 128).
    """
    if architecture in (90, 100, 103):
        return 32
    return 8 if kernel == tuning.DKDV else 16


def _halved(config: Config) -> Config:
    m, n = config.block_m, config.block_n
    return config._replace(block_m=m // 2) if m > n else config._replace(block_n=n // 2)


def smaller(config: Config) -> Config | None:
    """Return the next configuration that takes less memory, or None: first fewer stages, then smaller tiles."""
    m, n, stages = config.block_m, config.block_n, config.stages
    if stages > 2:
        return config._replace(stages=stages - 1)
    if max(m, n) > 2 * _SMALLEST_BLOCK or (stages == 1 and max(m, n) > _SMALLEST_BLOCK):
        return _halved(config)
    return config._replace(stages=1) if stages > 1 else None


_taken: dict[Hashable, Config] = {}  # by kind of call and configuration that did not fit


def launch_fitting(name: str, kind: Hashable, config: Config, launch: Callable[[Config], Started]) -> Started:
    """Launch a kernel, with smaller configurations if the device has too little memory for this one.

    kind: what determines, besides the configuration, how much memory is needed. The next call of a kind starts with the
        configuration that fitted.

    Raises:
        RuntimeError: if the smallest configuration does not fit.
    """
    first, reason = config, None
    config = _taken.get((name, first, kind), first)
    while True:
        try:
            started = launch(config)
            break
        except OutOfResources as error:
            if not tuning.SHRINK_TILES:
                raise
            below, reason = smaller(config), reason or error
            if below is None:
                raise RuntimeError(
                    f"sigattn: {name} does not fit this device in any tile shape: with the smallest, "
                    f"{_described(config)}, it needs {error.required} of {error.name}, and the device has "
                    f"{error.limit}. backend='blocked' does without these kernels."
                ) from error
            config = below
    if reason is not None:
        _taken[name, first, kind] = config
        warnings.warn(
            f"sigattn: {name} with {_described(first)} needs {reason.required} of {reason.name}, and this device has "
            f"{reason.limit}. Calls of this kind use {_described(config)}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return started


def _described(config: Config) -> str:
    return f"tiles of {config.block_m} × {config.block_n}, {config.warps} warps and {config.stages} stages"
