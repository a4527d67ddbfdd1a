"""Tile shapes of the kernels: data, per architecture, head size and dtype. Nothing is tuned while users wait.

``benchmarks/gpu.sh`` measures the candidates of ``candidates`` on the machine at hand; what it finds goes into these
tables. None of them has been measured on a GPU yet: they were chosen from what the compiler reports (``sigattn bench
static``): no spills in the loop over whole tiles, tensor cores fed from shared memory, and on Hopper the shortest time
by the model there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sigattn.ops.triton.args import padded_head_dim


class Config(NamedTuple):
    """A tile of ``block_m`` queries and ``block_n`` keys; warps of a program; tiles in flight.

    sigmoid: the form of σ in 16 bits, "accurate" or "paired" (activation.py). tma: whether the copy engine brings the
    tiles, of tensors that it can serve (tma.py); from Hopper on. split_dkdv: whether dK and dV are made one after
    the other (DKDV): five products instead of four, but each with registers enough for wide heads.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    sigmoid: str = "accurate"
    tma: bool = False
    split_dkdv: bool = False


class HopperConfig(NamedTuple):
    """Of the kernels in hopper.py and hopper_backward.py: rows of a tile that is walked, tiles in flight.

    prefetch: whether S of the next tile is issued before σ of this one (forward). sigmoid: as in ``Config``.
    persistent: whether there are as many programs as multiprocessors, each with many tiles, so that the next one's
    first operands are under way while this one's results are written.
    """

    block: int
    stages: int
    prefetch: bool = True
    sigmoid: str = "paired"
    persistent: bool = True


FWD, DKDV, DQ, DECODE = "fwd", "dkdv", "dq", "decode"
FUSED = "fused"  # the whole backward in one kernel

# Each table (decoding has a rule instead): by kernel and padded head size.

# 16-bit dtypes on Hopper (227 KiB of shared memory; wgmma wants 64 rows of a tile for each four warps, which at 256 the
# kernel of the keys can give to dK or to dV, but not to both at once). The paired form of σ takes two instructions a
# score less where numbers stay in their threads, as with wgmma they do. Two programs fit a multiprocessor wherever the
# model of time (bench/hopper_model.py, not measured) prefers that: one's σ then runs beside the other's products.
_HOPPER: dict[str, dict[int, Config]] = {
    FWD: {
        16: Config(128, 64, 8, 3, "paired"),
        32: Config(128, 64, 8, 3, "paired"),
        64: Config(128, 64, 8, 3, "paired"),
        128: Config(128, 32, 8, 3, "paired"),
        256: Config(128, 64, 8, 2, "paired"),
    },
    DKDV: {
        16: Config(64, 64, 4, 3, "paired"),
        32: Config(64, 64, 4, 3, "paired"),
        64: Config(64, 64, 4, 3, "paired"),
        128: Config(32, 64, 4, 3, "paired"),
        256: Config(32, 128, 8, 2, "paired", split_dkdv=True),
    },
    DQ: {
        16: Config(128, 64, 8, 3, "paired"),
        32: Config(128, 64, 8, 3, "paired"),
        64: Config(128, 64, 8, 3, "paired"),
        128: Config(64, 64, 4, 2, "paired"),
        256: Config(128, 32, 8, 2, "paired"),
    },
}

# Shapes of these tables that fill the registers in plain calls: what is used with options that need registers of their
# own (masks, ALiBi, a soft cap, dropout), and from that again with a gradient of the mask.
WITH_OPTIONS: Mapping[tuple[str, Config], Config] = MappingProxyType(
    {
        (DKDV, Config(32, 64, 4, 3, "paired")): Config(32, 128, 8, 2, "paired"),
        (DQ, Config(64, 64, 4, 2, "paired")): Config(64, 32, 4, 2, "paired"),
        (DQ, Config(64, 32, 4, 2, "paired")): Config(64, 16, 4, 2, "paired"),
    }
)

# 16-bit dtypes on datacentre Blackwell (as much memory; accumulators in tensor memory leave registers free, and the
# accurate form takes two numbers at a time).
_BLACKWELL: dict[str, dict[int, Config]] = {
    FWD: {
        16: Config(128, 128, 8, 3),
        32: Config(128, 64, 4, 3),
        64: Config(128, 128, 8, 3),
        128: Config(128, 128, 8, 3),
        256: Config(128, 64, 8, 2),
    },
    DKDV: {
        16: Config(64, 128, 8, 3),
        32: Config(64, 128, 8, 3),
        64: Config(64, 128, 8, 1),
        128: Config(64, 128, 8, 3),
        256: Config(32, 64, 4, 2),
    },
    DQ: {
        16: Config(128, 64, 8, 3),
        32: Config(128, 64, 8, 3),
        64: Config(128, 64, 8, 3),
        128: Config(128, 64, 8, 3),
        256: Config(128, 32, 8, 2),
    },
}

# 16-bit dtypes on Ampere, Ada and consumer Blackwell: 99 KiB is what all of them have.
_SMALL: dict[str, dict[int, Config]] = {
    FWD: {
        16: Config(128, 64, 4, 3),
        32: Config(128, 64, 4, 3),
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 3),
        256: Config(64, 32, 4, 2),
    },
    DKDV: {
        16: Config(64, 128, 8, 3),
        32: Config(64, 128, 8, 3),
        64: Config(64, 128, 8, 3),
        128: Config(32, 64, 4, 1),
        256: Config(32, 32, 8, 1),
    },
    DQ: {
        16: Config(128, 64, 8, 3),
        32: Config(128, 64, 8, 2),
        64: Config(128, 64, 8, 3),
        128: Config(64, 64, 4, 2),
        256: Config(64, 32, 4, 1),
    },
}

# float32: twice the memory and, in IEEE precision, no tensor core; operands live in registers. 99 KiB here too.
_WIDE: dict[str, dict[int, Config]] = {
    FWD: {
        16: Config(64, 32, 4, 2),
        32: Config(64, 32, 4, 2),
        64: Config(64, 32, 8, 2),
        128: Config(32, 16, 8, 1),
        256: Config(32, 16, 8, 1),
    },
    DKDV: {
        16: Config(32, 64, 4, 2),
        32: Config(32, 64, 8, 1),
        64: Config(32, 32, 8, 1),
        128: Config(16, 32, 8, 1),
        256: Config(16, 16, 8, 1),
    },
    DQ: {
        16: Config(64, 32, 4, 2),
        32: Config(64, 32, 4, 2),
        64: Config(32, 32, 4, 1),
        128: Config(16, 16, 8, 1),
        256: Config(16, 16, 4, 1),
    },
}

# 16-bit dtypes on AMD's GPUs (64 KiB): no compiler for them was asked, so these are merely modest.
_OTHER: dict[str, dict[int, Config]] = {
    FWD: {
        16: Config(128, 64, 4, 2),
        32: Config(128, 64, 4, 2),
        64: Config(128, 64, 4, 2),
        128: Config(128, 32, 4, 1),
        256: Config(64, 32, 4, 1),
    },
    DKDV: {
        16: Config(64, 64, 4, 1),
        32: Config(64, 64, 4, 1),
        64: Config(64, 64, 4, 1),
        128: Config(32, 64, 4, 1),
        256: Config(16, 32, 4, 1),
    },
    DQ: {
        16: Config(64, 64, 4, 1),
        32: Config(64, 64, 4, 1),
        64: Config(64, 64, 4, 1),
        128: Config(64, 32, 4, 1),
        256: Config(32, 16, 4, 1),
    },
}

# dQ added atomically by the kernel of the keys: two products of seven saved, the order of addition lost. By
# architecture, from how many queries on that is done; whether it is faster was not measured on any, so no one has it by
# default. On Hopper it is the kernel in Gluon that does it, where that is in WARP_SPECIALIZED and serves.
ATOMIC_DQ_MIN_QUERIES: Mapping[int, int] = MappingProxyType({})

# Plain calls that were made before launch their compiled kernels directly (repeats.py), not through Triton, which binds
# and specialises every argument again (some 30 µs of the CPU's time). Each kept launch is compared with Triton's once.
DIRECT_LAUNCH = True

# A configuration that does not fit the device is replaced by a smaller one (fitting.py); False: it raises.
SHRINK_TILES = True


# The specialised kernels (docs/speed.md), by head size; FUSED serves from ATOMIC_DQ_MIN_QUERIES on. They were compiled
# and simulated, never run. Those named in WARP_SPECIALIZED are used where they serve: none, until ``benchmarks/gpu.sh``
# has shown it to be right and faster.
HOPPER_CONFIGS: dict[str, dict[int, HopperConfig]] = {
    FWD: {64: HopperConfig(128, 3), 128: HopperConfig(128, 2, prefetch=False)},
    DKDV: {64: HopperConfig(64, 3), 128: HopperConfig(64, 2)},
    DQ: {64: HopperConfig(128, 2), 128: HopperConfig(64, 2)},
    FUSED: {64: HopperConfig(64, 3), 128: HopperConfig(64, 3)},
}
WARP_SPECIALIZED: frozenset[str] = frozenset()


def config_table(architecture: int, itemsize: int) -> dict[str, dict[int, Config]]:
    """The table for a compute capability (90 for sm_90; 0 for what is not NVIDIA's)."""
    if itemsize == 4:
        return _WIDE
    return {90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL, 0: _OTHER}.get(architecture, _SMALL)


def kernel_config(kernel: str, architecture: int, width: int, itemsize: int) -> Config:
    """The tile shapes for a kernel whose wider head (of D and Dv) has this width."""
    return config_table(architecture, itemsize)[kernel][padded_head_dim(width)]


def supports_atomic_dq(config: Config, architecture: int) -> bool:
    """Return True if the kernel of the keys may add dQ: on Hopper its tile of dQ has to be one for wgmma, too.

    With fewer than 64 queries that product moves its operands through registers: at D = 128 the kernel takes 37 to 44
    instructions a score.
    """
    return architecture != 90 or config.block_m >= 64


def decode_config(width: int, itemsize: int, rows: int) -> Config:
    """The tile shape of the decoding kernel, for heads of a width and so many rows (queries of a group of heads).

    What binds is reading the cache, so tiles are as short as a product allows and deep in flight.
    """
    most = 64 if itemsize < 4 else 16  # without tensor cores 64 rows of 256 spilled 5,825 registers in the loop
    block_m = min(max(16, 1 << (rows - 1).bit_length()), most)
    keys = 64 if padded_head_dim(width) * itemsize <= 256 else 32
    return Config(block_m, keys if itemsize < 4 or padded_head_dim(width) <= 64 else 16, 4, 3 if itemsize < 4 else 2)


# Tile shapes to measure on a Hopper GPU, with the paired form of σ: (block_m, block_n, warps, stages, tma). They were
# chosen by what the compiler makes of them (``sigattn bench static``): asynchronous products, no spills in plain calls
# (all shapes of FUSED at 128 spill), and either several programs on a multiprocessor or few instructions per score.
_CANDIDATES: dict[str, dict[int, list[tuple[int, int, int, int, bool]]]] = {
    FWD: {
        64: [
            (128, 64, 8, 3, False),
            (128, 64, 4, 2, True),
            (64, 128, 4, 2, True),
            (128, 64, 4, 2, False),
            (128, 64, 8, 3, True),
            (128, 128, 8, 2, True),
            (64, 64, 4, 2, True),
            (64, 64, 4, 3, False),
            (128, 128, 8, 3, False),
        ],
        128: [
            (128, 32, 8, 3, False),
            (64, 64, 4, 2, True),
            (128, 128, 8, 2, True),
            (128, 64, 8, 2, True),
            (128, 32, 8, 3, True),
            (64, 64, 4, 2, False),
            (64, 128, 4, 2, True),
            (128, 128, 8, 2, False),
        ],
        256: [
            (128, 64, 8, 2, False),
            (128, 64, 8, 2, True),
            (64, 64, 4, 1, True),
            (64, 32, 4, 2, True),
            (128, 32, 8, 2, False),
        ],
    },
    DKDV: {
        64: [
            (64, 64, 4, 3, False),
            (64, 64, 4, 2, True),
            (64, 64, 4, 3, True),
            (64, 64, 4, 2, False),
            (64, 128, 8, 3, False),
            (64, 128, 8, 2, True),
            (32, 128, 8, 3, False),
        ],
        128: [
            (64, 64, 4, 2, True),
            (32, 64, 4, 2, True),
            (32, 64, 4, 1, False),
            (64, 128, 8, 2, True),
            (32, 128, 8, 2, False),
            (32, 128, 8, 3, True),
        ],
        256: [(32, 128, 8, 2, False), (32, 128, 8, 2, True), (64, 128, 8, 1, True), (32, 128, 8, 1, True)],
    },
    DQ: {
        64: [
            (128, 64, 8, 3, False),
            (128, 64, 8, 2, True),
            (64, 64, 4, 2, True),
            (64, 128, 4, 2, True),
            (64, 64, 4, 3, False),
            (64, 128, 4, 2, False),
        ],
        128: [
            (64, 64, 4, 2, False),
            (64, 64, 4, 2, True),
            (128, 64, 8, 2, True),
            (128, 64, 8, 3, False),
            (64, 32, 4, 2, True),
            (64, 32, 4, 2, False),
        ],
        256: [(128, 32, 8, 2, False), (128, 32, 8, 2, True), (64, 32, 4, 2, True)],
    },
    FUSED: {  # with fewer than 64 queries dQ is no product for wgmma (supports_atomic_dq)
        64: [(64, 64, 4, 2, True), (64, 64, 4, 3, False), (64, 128, 8, 2, True), (64, 128, 8, 3, False)],
        128: [(64, 128, 8, 2, True), (64, 64, 4, 2, True)],
        256: [],
    },
}


def candidates(kernel: str, width: int) -> list[Config]:
    """Return the tile shapes that are worth measuring on a Hopper GPU, the most promising ones first."""
    size = max(64, padded_head_dim(width))
    split_dkdv = kernel == DKDV and size == 256
    found = [
        Config(m, n, warps, stages, "paired", tma, split_dkdv) for m, n, warps, stages, tma in _CANDIDATES[kernel][size]
    ]
    return found + [config._replace(sigmoid="accurate") for config in found[:1]]


def hopper_candidates(kernel: str, width: int) -> list[HopperConfig]:
    """What is worth measuring of the specialised kernels; none for heads that they do not serve."""
    if width not in HOPPER_CONFIGS[kernel]:
        return []
    if kernel == FWD:
        own = HOPPER_CONFIGS[kernel][width]
        found = [HopperConfig(block, stages, a) for a in (True, False) for block in (64, 128) for stages in (2, 3)]
        found += [own._replace(persistent=False), own._replace(sigmoid="accurate")]
    else:
        found = [
            HopperConfig(block, stages) for block in ((64,) if kernel == FUSED else (64, 128)) for stages in (2, 3)
        ]
        own = HOPPER_CONFIGS[kernel][width]
        found += [own._replace(persistent=False), own._replace(sigmoid="accurate")]
    return [config for config in found if _fits(kernel, width, config)]


def _fits(kernel: str, width: int, config: HopperConfig) -> bool:
    """Whether registers and shared memory suffice, by what the compiler says."""
    own = 4 * 64  # rows of two tensors for two groups
    walked = 2 * config.stages * config.block
    gradients = 2 * 128 * config.block if kernel == FUSED else 0
    if 2 * ((own + walked) * width + gradients) > 226 * 1024:
        return False
    if kernel == FWD:
        return config.block == 64 or not (config.prefetch and width > 64)
    return config.block * width <= (4096 if kernel == DKDV and width == 64 else 8192)
