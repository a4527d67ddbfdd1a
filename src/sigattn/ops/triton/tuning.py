"""Tile shapes of the kernels, per architecture, head size and dtype. There is no autotuning at run time.

``benchmarks/gpu.sh`` measures the candidates of ``benchmarks/tile_shapes.py`` on a GPU; its results go into these
tables by hand. Where a table does not say that it was measured (docs/speed.md), its shapes were chosen from the
compiler's reports (``python -m benchmarks static``): no spills in the loop over tiles without a mask, tensor cores fed
from shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import triton

from sigattn.ops.triton.args import padded_head_dim


class Config(NamedTuple):
    """Tile shape of a portable kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int  # of a program
    stages: int  # tiles in flight
    sigmoid: str = "accurate"  # form of σ in 16 bits, also "paired" and "paired-rcp" (activation.py)
    tma: bool = False  # load tiles by TMA if the tensors allow it (tma.py); from Hopper on
    # compute dK and dV in two launches: five products instead of four, but each has enough registers for wide heads
    split_dkdv: bool = False


class HopperConfig(NamedTuple):
    """Tile shape of a kernel of ``ops/hopper``."""

    block: int  # rows of the tiles that are walked
    stages: int  # such tiles in flight
    sigmoid: str = "paired"  # or "paired-rcp"
    # As many programs as multiprocessors are launched, each for several tiles, so that the first operands of the next
    # tile are loaded while the results of this one are stored. Under a causal mask the GPU balances tiles of different
    # length better than a fixed order: there only for so many keys.
    persistent_keys: int = 0


FWD, DKDV, DQ, DECODE = "fwd", "dkdv", "dq", "decode"
_HEAD_DIMS = (16, 32, 64, 128, 256)


def parse(shape: str, sigmoid: str) -> Config:
    """Return the configuration for "block_m x block_n / warps / stages", with "+tma" or "+split" at the end."""
    numbers = shape.partition("+")[0].replace("x", "/").split("/")
    block_m, block_n, warps, stages = map(int, numbers)
    return Config(block_m, block_n, warps, stages, sigmoid, "+tma" in shape, "+split" in shape)


def _table(rows: str, sigmoid: str = "accurate") -> dict[tuple[str, int], Config]:
    """Return the configurations of a table, by kernel and padded head size."""
    table: dict[tuple[str, int], Config] = {}
    for kernel, *shapes in map(str.split, rows.strip().splitlines()):
        table |= {(kernel, d): parse(shape, sigmoid) for d, shape in zip(_HEAD_DIMS, shapes, strict=True)}
    return table


# Each table (decoding has a rule instead): tiles of queries x keys / warps / stages, for heads of
#        16          32          64          128         256

# 16-bit dtypes on Hopper (227 KiB of shared memory). wgmma needs 64 rows of a tile for each four warps; at 256 the dkdv
# kernel has registers for that only if it computes dK or dV, not both. The paired form of σ takes two instructions a
# score less if numbers stay in their threads, as with wgmma they do. Two programs fit a multiprocessor up to D = 128: σ
# of one overlaps with products of the other.
_HOPPER = _table(
    """
    fwd  128x64/8/3  128x64/8/3  128x64/8/3  128x32/8/3  128x64/8/2
    dkdv 64x64/4/3   64x64/4/3   64x64/4/3   32x64/4/3   32x128/8/2
    dq   128x64/8/3  128x64/8/3  128x64/8/3  64x64/4/2   128x32/8/2
    """,
    "paired",
)
_HOPPER[DKDV, 256] = _HOPPER[DKDV, 256]._replace(split_dkdv=True)

# Measured on an H100 (n = 4,096): plain calls whose operands TMA can load.
_HOPPER_TMA: dict[tuple[str, int], Config] = {
    (FWD, 64): parse("64x64/4/2+tma", "paired"),
    (DKDV, 64): parse("64x64/4/3+tma", "paired-rcp"),
    (DQ, 64): parse("64x64/4/2+tma", "paired-rcp"),
    (FWD, 128): parse("128x32/8/3+tma", "paired"),
    (DKDV, 128): parse("64x64/4/2+tma", "paired"),
    (DQ, 128): parse("64x64/4/2+tma", "paired"),
}

# 16-bit dtypes on Hopper with attn_mask, without its gradient; by kind of mask (``args.Options``). Measured on an H100
# (n = 4,096). By pointers, hidden keys are left out.
_MASKED = parse("64x64/4/2+tma", "paired-rcp")
HOPPER_MASKED: Mapping[tuple[str, str, int], Config] = MappingProxyType(
    {(mask, kernel, d): _MASKED for mask in ("bool", "added") for kernel in (FWD, DKDV, DQ) for d in (64, 128)}
    | {("bool", DKDV, 64): _MASKED._replace(stages=3), ("bool", DKDV, 128): _MASKED._replace(sigmoid="paired")}
    | {("keys", kernel, d): _HOPPER[kernel, d] for kernel in (FWD, DKDV, DQ) for d in (64, 128)}
    | {("keys", DQ, 128): _MASKED}
)

# Used instead of a shape of the tables that fills the registers in plain calls, if options need registers of their own
# (masks, ALiBi, a soft cap, dropout); applied twice with a gradient of the mask.
WITH_OPTIONS: Mapping[tuple[str, Config], Config] = MappingProxyType(
    {
        (DKDV, _HOPPER[DKDV, 128]): parse("32x128/8/2", "paired"),
        (DQ, _HOPPER[DQ, 128]): parse("64x32/4/2", "paired"),
        (DQ, parse("64x32/4/2", "paired")): parse("64x16/4/2", "paired"),
        (DKDV, parse("64x128/8/1+split", "accurate")): parse("32x128/8/1+split", "accurate"),
        (DQ, parse("128x64/8/1", "accurate")): parse("128x32/8/1", "accurate"),
    }
)

# 16-bit dtypes on datacentre Blackwell (as much memory; accumulators in tensor memory leave registers free, and the
# accurate form takes two numbers at a time).
_BLACKWELL = _table("""
    fwd  128x128/8/3 128x64/4/3  128x128/8/3 128x128/8/3 128x64/8/2
    dkdv 64x128/8/3  64x128/8/3  64x128/8/2  64x128/8/3  32x64/4/2
    dq   128x64/8/3  128x64/8/3  128x64/8/3  128x64/8/3  128x32/8/2
""")

# 16-bit dtypes on Ampere, Ada and consumer Blackwell; all of them have at least 99 KiB.
_SMALL = _table("""
    fwd  128x64/4/3  128x64/4/3  128x64/8/2  128x64/8/3  64x32/4/2
    dkdv 64x128/8/3  64x128/8/3  64x128/8/3  32x64/4/1   32x32/8/1
    dq   128x64/8/3  128x64/8/2  128x64/8/3  64x64/4/2   64x32/4/1
""")

# float32: twice the memory and, in IEEE precision, no tensor cores; operands live in registers. 99 KiB here too.
_FLOAT32 = _table("""
    fwd  64x32/4/2   64x32/4/2   64x32/8/2   32x16/8/1   32x16/8/1
    dkdv 32x64/4/2   32x64/8/1   32x32/8/1   16x32/8/1   16x16/8/1
    dq   64x32/4/2   64x32/4/2   32x32/4/1   16x16/8/1   16x16/4/1
""")

# float32 on Hopper, by three products in TF32 (at most 128 features; D = 64 measured on an H100, 2026-11-27, n = 4,096:
# 5.6 ms forward, 21.5 backward, before 25.9 and 121; D = 128 by the compiler's reports, like the rest: no spills in the
# loops, which at D = 128 takes tiles too small for wgmma in the backward pass), and in TF32.
_HOPPER_TF32X3 = _table("""
    fwd  128x64/8/2  128x64/8/2  128x64/8/2       128x32/8/2      32x16/8/1
    dkdv 64x128/8/1  64x128/8/1  64x128/8/1+split 32x32/8/1+split 16x16/8/1
    dq   128x64/8/1  128x64/8/1  128x64/8/1       32x32/8/1       16x16/4/1
""")
_HOPPER_TF32 = _table("""
    fwd  128x64/8/2  128x64/8/2  128x64/8/2  128x64/8/1  32x16/8/1
    dkdv 64x128/8/2  64x128/8/2  64x128/8/2  32x128/8/1  16x16/8/1
    dq   128x64/8/2  128x64/8/2  128x64/8/2  128x32/8/1  16x16/4/1
""")

# 16-bit dtypes on AMD's GPUs (64 KiB). Untested; conservative defaults.
_AMD = _table("""
    fwd  128x64/4/2  128x64/4/2  128x64/4/2  128x32/4/1  64x32/4/1
    dkdv 64x64/4/1   64x64/4/1   64x64/4/1   32x64/4/1   16x32/4/1
    dq   64x64/4/1   64x64/4/1   64x64/4/1   64x32/4/1   32x16/4/1
""")


def supports_direct_launch(version: str) -> bool:
    """Return True for versions of Triton on which tests/ops/compiled/test_direct_launch.py has run."""
    return version.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])


# Cached launches start their compiled kernels directly (launch_cache.py), not through Triton, which binds and
# specialises every argument again (some 30 µs of the CPU's time).
DIRECT_LAUNCH = supports_direct_launch(triton.__version__)

# Weights (B · Hq · N · M) from which on TMA and the Gluon kernels are used. A descriptor takes some 10 µs of host time
# at each launch (eleven took a fifth of a short training step with an H100), more than TMA gains there.
TMA_MIN_WEIGHTS = 1 << 26

# Replace a configuration that does not fit the device by a smaller one (fitting.py); if False, raise.
SHRINK_TILES = True

# The warp-specialised kernels, used for the problems that they support. Measured on an H100 (docs/speed.md).
HOPPER_CONFIGS: dict[str, HopperConfig] = {
    FWD: HopperConfig(64, 3, "paired-rcp", persistent_keys=8192),
    DKDV: HopperConfig(64, 2),
    DQ: HopperConfig(64, 2),
}


def kernel_config(
    kernel: str, architecture: int, head_dim: int, itemsize: int, tma: bool = False, precision: str = "ieee"
) -> Config:
    """Return the tile shape of a kernel (FWD, DKDV or DQ) for numbers of ``itemsize`` bytes.

    architecture: compute capability, 90 for sm_90; 0 for other GPUs than NVIDIA's. head_dim: the larger one of D and
    Dv. tma: whether the call is a plain one whose operands TMA can load. precision: of float32 products.
    """
    key = kernel, padded_head_dim(head_dim)
    if tma and (architecture, itemsize) == (90, 2) and key in _HOPPER_TMA:
        return _HOPPER_TMA[key]
    if itemsize == 4:
        table = {(90, "tf32x3"): _HOPPER_TF32X3, (90, "tf32"): _HOPPER_TF32}.get((architecture, precision), _FLOAT32)
    else:
        table = {90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL, 0: _AMD}.get(architecture, _SMALL)
    return table[key]


def decode_config(head_dim: int, itemsize: int, rows: int) -> Config:
    """Return the tile shape of the decoding kernel, for a number of rows (queries of a group of heads).

    Reading the cache is the bottleneck, so tiles have as few rows as a product allows and many are in flight.
    """
    max_rows = 64 if itemsize < 4 else 16  # without tensor cores 64 rows of 256 spilled 5,825 registers in the loop
    block_m = min(max(16, 1 << (rows - 1).bit_length()), max_rows)
    padded = padded_head_dim(head_dim)
    keys = 64 if padded * itemsize <= 256 else 32
    stages = 3 if itemsize < 4 and block_m * padded < 64 * 256 else 2  # so that two programs fit a multiprocessor
    return Config(block_m, keys if itemsize < 4 or padded <= 64 else 16, 4, stages)
