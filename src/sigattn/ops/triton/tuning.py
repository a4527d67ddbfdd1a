"""Tile shapes of the kernels, per architecture, head size and dtype. There is no autotuning at run time.

``benchmarks/gpu.sh`` measures the candidates of ``benchmarks/tile_shapes.py``; its results go into the tables by hand.
Where a table does not say that it was measured (docs/speed.md), its shapes were chosen from the compiler's reports
(``python -m benchmarks static``): no spills in the loop over tiles without a mask.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import triton
from triton.runtime.errors import OutOfResources

from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem
from sigattn.ops.triton.args import Options, padded_head_dim

Started = TypeVar("Started")


class Config(NamedTuple):
    """Tile shape of a portable kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int  # of a program
    stages: int  # tiles in flight
    sigmoid: str = "accurate"  # form of σ in 16 bits, also "paired", "paired-rcp" and "rcp" (activation.py)
    tma: bool = False  # load tiles by TMA if the tensors allow it; from Hopper on
    # compute dK and dV in two launches: five products instead of four, but each has enough registers for wide heads
    split_dkdv: bool = False
    registers: int = 0  # of a thread at most, so that more programs fit a multiprocessor; 0 leaves it to the compiler


class HopperConfig(NamedTuple):
    """Tile shape of a kernel of ``ops/hopper``."""

    block: int  # rows of the tiles that are walked
    stages: int  # such tiles in flight
    sigmoid: str = "paired"  # or "paired-half", "paired-rcp", "rcp" (activation.py)
    # As many programs as multiprocessors are launched, each for several tiles, so that the first operands of the next
    # tile are loaded while the results of this one are stored. Under a causal mask the GPU balances tiles of different
    # length better than a fixed order: there only for so many keys.
    persistent_keys: int = 0
    # With fewer keys, or a smaller share of the multiprocessors at work, the portable kernels are used.
    min_keys: int = 1
    min_causal_keys: int = 1
    min_fill: float = 0.0


FWD, FWD_64, DKDV, DQ, FUSED, DECODE = "fwd", "fwd_64", "dkdv", "dq", "fused", "decode"
_HEAD_DIMS = (16, 32, 64, 128, 256)


def parse(shape: str, sigmoid: str) -> Config:
    """Return the configuration for "block_m x block_n / warps / stages", with "+tma", "+split", "+168" (registers)."""
    tile, *others = shape.split("+")
    block_m, block_n, warps, stages = map(int, tile.replace("x", "/").split("/"))
    registers = sum(int(x) for x in others if x.isdigit())
    return Config(block_m, block_n, warps, stages, sigmoid, "tma" in others, "split" in others, registers)


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
# (n = 4,096). By pointers, hidden keys are left out. With "rcp", which needs a selection less, and a limit of registers
# (spills only in the loop over the last tile) one more program fits a multiprocessor: with an added mask at D = 64
# the forward pass takes 1.92 ms instead of 2.50, dQ 2.31 instead of 4.15, dK and dV 2.86 instead of 4.38.
_MASKED = parse("64x64/4/2+tma", "paired-rcp")
HOPPER_MASKED: Mapping[tuple[str, str, int], Config] = MappingProxyType(
    {("bool", kernel, d): _MASKED for kernel in (FWD, DKDV, DQ) for d in (64, 128)}
    | {("added", kernel, d): _MASKED._replace(sigmoid="rcp") for kernel in (FWD, DKDV, DQ) for d in (64, 128)}
    | {(mask, FWD, 64): parse("64x64/4/2+tma+128", "rcp") for mask in ("bool", "added")}
    | {("added", FWD, 128): parse("64x32/4/2+tma+128", "rcp")}
    | {("bool", DQ, 64): parse("64x64/4/2+tma+128", "rcp"), ("added", DKDV, 64): parse("64x64/4/2+tma+168", "rcp")}
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
# 5.6 ms forward, 21.5 backward, before 25.9 and 121; the rest by the compiler's reports: no spills in the loops, which
# at D = 128 takes tiles too small for wgmma in the backward pass).
_HOPPER_TF32X3 = _table("""
    fwd  128x64/8/2  128x64/8/2  128x64/8/2       128x32/8/2      32x16/8/1
    dkdv 64x128/8/1  64x128/8/1  64x128/8/1+split 32x32/8/1+split 16x16/8/1
    dq   128x64/8/1  128x64/8/1  128x64/8/1       32x32/8/1       16x16/4/1
""")

# float32 on Hopper, by six products in bfloat16, whose tiles wgmma reads in either order of memory: plain calls.
# Measured on an H100 (n = 4,096, B = 2): 4.2 ms forward, 18.9 backward, by three products in TF32 7.0 and 48.3.
_HOPPER_BF16X6 = {
    (FWD, 128): parse("128x64/8/1", "accurate"),
    (DKDV, 128): parse("32x128/8/1+split", "accurate"),
    (DQ, 128): parse("128x32/8/1", "accurate"),
}

# float32 on Hopper where PyTorch allows TF32, by three products in bfloat16, not timed: the shapes of the backward pass
# of D = 64 and 128 are right on an H200; chosen by the compiler's reports (18 spills at D = 128, none in the loops).
_HOPPER_BF16X3 = {
    **_HOPPER_TF32X3,
    (DKDV, 64): parse("64x128/8/1", "accurate"),
    (DKDV, 128): parse("32x128/8/1+split", "accurate"),
    (DQ, 128): parse("128x32/8/1", "accurate"),
}

# 16-bit dtypes on AMD's GPUs (64 KiB). Untested; conservative defaults.
_AMD = _table("""
    fwd  128x64/4/2  128x64/4/2  128x64/4/2  128x32/4/1  64x32/4/1
    dkdv 64x64/4/1   64x64/4/1   64x64/4/1   32x64/4/1   16x32/4/1
    dq   64x64/4/1   64x64/4/1   64x64/4/1   64x32/4/1   32x16/4/1
""")


# Cached launches start their compiled kernels directly (launch_cache.py), not through Triton, which binds and
# specialises every argument again (some 30 µs of the CPU's time): with the versions of Triton on which
# tests/ops/compiled/test_calls.py has shown that both pass the same arguments.
DIRECT_LAUNCH = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])

# Weights (B · Hq · N · M) from which on TMA and the Gluon kernels are used. A descriptor takes some 10 µs of host time
# at each launch (eleven took a fifth of a short training step with an H100), more than TMA gains there.
TMA_MIN_WEIGHTS = 1 << 26

# The warp-specialised kernels, used for the problems that they support. Measured on an H100 (docs/speed.md).
HOPPER_CONFIGS: dict[str, HopperConfig] = {
    FWD: HopperConfig(64, 3, "paired-rcp", persistent_keys=8192),
    # heads of 33 to 64: 1.04 to 1.05 times as fast as portable; causal 0.96 with 1,024 keys, 1.07 with 16,384
    FWD_64: HopperConfig(64, 4, "paired-half", min_keys=1024, min_causal_keys=16384, min_fill=0.85),
    DKDV: HopperConfig(64, 2),
    DQ: HopperConfig(64, 2),
    # dQ, dK and dV by one kernel: 1.16 times as fast with 1,024 keys, causal 0.89; with 4,096 1.34 and 1.30
    FUSED: HopperConfig(64, 3, "rcp", persistent_keys=8192, min_keys=1024, min_causal_keys=4096, min_fill=0.85),
}


def kernel_config(
    kernel: str, architecture: int, head_dim: int, itemsize: int, tma: bool = False, precision: str = "ieee"
) -> Config:
    """Return the tile shape of a kernel (FWD, DKDV or DQ) for numbers of ``itemsize`` bytes.

    architecture: compute capability, 90 for sm_90; 0 for other GPUs than NVIDIA's. head_dim: the larger one of D and
    Dv. tma: whether the call is a plain one whose operands TMA can load. precision: as ``Options.PRECISION``.
    """
    key = kernel, padded_head_dim(head_dim)
    if tma and (architecture, itemsize) == (90, 2) and key in _HOPPER_TMA:
        return _HOPPER_TMA[key]
    if itemsize == 4:
        tables = {"tf32x3": _HOPPER_TF32X3, "bf16x6": _HOPPER_BF16X6, "bf16x3": _HOPPER_BF16X3}
        table = tables.get(precision, _FLOAT32) if architecture == 90 else _FLOAT32
    else:
        table = {90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL, 0: _AMD}.get(architecture, _SMALL)
    return table[key]


def decode_config(head_dim: int, itemsize: int, rows: int) -> Config:
    """Return the tile shape of the decoding kernel, for a number of rows (queries of a group of heads)."""
    # reading the cache is the bottleneck, so tiles have as few rows as a product allows and many are in flight
    max_rows = 64 if itemsize < 4 else 16  # without tensor cores 64 rows of 256 spilled 5,825 registers in the loop
    block_m = min(max(16, 1 << (rows - 1).bit_length()), max_rows)
    padded = padded_head_dim(head_dim)
    keys = 64 if padded * itemsize <= 256 else 32
    stages = 3 if itemsize < 4 and block_m * padded < 64 * 256 else 2  # so that two programs fit a multiprocessor
    return Config(block_m, keys if itemsize < 4 or padded <= 64 else 16, 4, stages)


# -- tiles that fit the shared memory of a device ---------------------------------------------------------------------
#
# The tables are for calls without a mask, whose tiles take memory like those of keys and values. With a mask, and for
# decoding, the first smaller configuration is used that fits by ``shared_memory``, an upper bound that the tests
# compare with the compiler. If a launch does not fit all the same, smaller ones are tried.

_KIB = 1024
# Shared memory of a program in KiB, by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
_LIMITS = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_LEAST_LIMIT = 99
_RESERVED = 2 * _KIB  # barriers and sums of rows
_SMALLEST_BLOCK = 16  # rows of a tile, which tl.dot needs
_READS_SHARED = (90, 100, 103)  # architectures whose tensor cores read operands from shared memory


def shared_memory_limit(architecture: int) -> int:
    """Return the bytes of shared memory that a program may take on a GPU of a compute capability."""
    return _LIMITS.get(architecture, _LEAST_LIMIT) * _KIB


def shared_memory(kernel: str, config: Config, o: Options, itemsize: int, mask_itemsize: int, architecture: int) -> int:
    """Return an upper bound on the bytes of shared memory of a kernel on an NVIDIA GPU (mask_itemsize: 0 without)."""
    d, dv = padded_head_dim(o.D), padded_head_dim(o.DV)
    rows, walked = config.block_m, config.block_n
    if kernel == DKDV:
        rows, walked = walked, rows
    resident = rows * (d + dv if kernel in (DKDV, DQ) else d)
    # wgmma and tcgen05 read a tile while the next ones arrive; before Hopper it has been copied to registers by then.
    buffers = config.stages if architecture in _READS_SHARED else max(config.stages - 1, 1)
    buffers += 2 if o.PRECISION == "tf32x3" else 0
    # Masks in flight and P on its way to a product, or one tile of float32 that changes its layout.
    per_score = max((config.stages - 1) * mask_itemsize + itemsize, 4) + (4 if o.NEED_MASK != "none" else 0)
    return itemsize * (resident + buffers * walked * (d + dv)) + rows * walked * per_score + _RESERVED


def fit(kernel: str, config: Config, o: Options, itemsize: int, mask_itemsize: int, architecture: int) -> Config:
    """Return the configuration, or the first smaller one that fits. With one stage nothing is in flight."""
    # A mask's tile takes registers. With 64 scores of a thread, as without a mask, the forward pass spilled 52 to 88 in
    # its loops on sm_90 (D = 128). Before Hopper operands lie in registers, too: with 32, bwd_dkdv_kernel spilled 321
    # (sm_86, D = 64), the forward 205 (D = 128).
    per_thread = 32 if architecture in _READS_SHARED else 8 if kernel == DKDV else 16
    while mask_itemsize and config.block_m * config.block_n > per_thread * 32 * config.warps:
        config = _halved(config)
    limit = shared_memory_limit(architecture)
    while config.stages > 1 and shared_memory(kernel, config, o, itemsize, mask_itemsize, architecture) > limit:
        config = smaller(config) or config._replace(stages=1)
    return config


def _halved(config: Config) -> Config:
    m, n = config.block_m, config.block_n
    return config._replace(block_m=m // 2) if m > n else config._replace(block_n=n // 2)


def smaller(config: Config) -> Config | None:
    """Return the next configuration that takes less memory, or None: first fewer stages, then smaller tiles."""
    if config.stages > 2:
        return config._replace(stages=config.stages - 1)
    if max(config.block_m, config.block_n) > _SMALLEST_BLOCK * config.stages:
        return _halved(config)
    return config._replace(stages=1) if config.stages > 1 else None


_taken: dict[Hashable, Config] = {}  # by kind of call whose first configuration did not fit


def launch_fitting(
    name: str, problem: Problem | VarlenProblem | KVCacheProblem, options: Options, config: Config,
    launch: Callable[[Config], Started],
) -> Started:  # fmt: skip
    """Launch a kernel, with smaller tiles if the device has too little memory, also in later calls of the same kind."""
    mask_dtype = None if problem.attn_mask is None else problem.attn_mask.dtype
    kind = (name, config, options, problem.query.dtype, mask_dtype, problem.query.device)
    while True:
        taken = _taken.get(kind, config)
        try:
            return launch(taken)
        except OutOfResources as error:
            below = smaller(taken)
            said = (
                f"sigattn: {name} with tiles of {taken.block_m} × {taken.block_n}, {taken.warps} warps and "
                f"{taken.stages} stages needs {error.required} of {error.name}, and this device has {error.limit}."
            )
            if below is None:
                raise RuntimeError(f"{said} No tiles are smaller; backend='blocked' needs no GPU kernel.") from error
            if kind not in _taken:
                warnings.warn(f"{said} Calls of this kind use smaller tiles.", RuntimeWarning, stacklevel=2)
            _taken[kind] = below
