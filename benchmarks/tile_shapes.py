"""Tile shapes of the GPU kernels that ``python -m benchmarks tune`` measures."""

from __future__ import annotations

from sigattn.ops.triton import tuning
from sigattn.ops.triton.args import padded_head_dim
from sigattn.ops.triton.tuning import DKDV, DQ, FWD, Config, HopperConfig, parse

# Tile shapes to measure on a Hopper GPU, with the paired form of σ. They were chosen by what the compiler makes of them
# (``python -m benchmarks static``): asynchronous products, no spills in plain calls, and either several programs on a
# multiprocessor or few instructions per score.
CANDIDATES: dict[tuple[str, int], str] = {
    (FWD, 64): (
        "128x64/8/3 128x64/4/2+tma 64x128/4/2+tma 128x64/4/2 128x64/8/3+tma "
        "128x128/8/2+tma 64x64/4/2+tma 64x64/4/3 128x128/8/3"
    ),
    (FWD, 128): (
        "128x32/8/3 64x64/4/2+tma 128x128/8/2+tma 128x64/8/2+tma 128x32/8/3+tma 64x64/4/2 64x128/4/2+tma 128x128/8/2"
    ),
    (FWD, 256): "128x64/8/2 128x64/8/2+tma 64x64/4/1+tma 64x32/4/2+tma 128x32/8/2",
    (DKDV, 64): "64x64/4/3 64x64/4/2+tma 64x64/4/3+tma 64x64/4/2 64x128/8/3 64x128/8/2+tma 32x128/8/3",
    (DKDV, 128): "64x64/4/2+tma 32x64/4/2+tma 32x64/4/1 64x128/8/2+tma 32x128/8/2 32x128/8/3+tma",
    (DKDV, 256): "32x128/8/2 32x128/8/2+tma 32x64/4/2+tma",
    (DQ, 64): "128x64/8/3 128x64/8/2+tma 64x64/4/2+tma 64x128/4/2+tma 64x64/4/3 64x128/4/2",
    (DQ, 128): "64x64/4/2 64x64/4/2+tma 128x64/8/2+tma 128x64/8/3 64x32/4/2+tma 64x32/4/2",
    (DQ, 256): "128x32/8/2 128x32/8/2+tma 64x32/4/2+tma",
}


def candidates(kernel: str, head_dim: int) -> list[Config]:
    """Return the tile shapes that are worth measuring on a Hopper GPU, the most promising ones first."""
    size = max(64, padded_head_dim(head_dim))
    configs = [parse(shape, "paired") for shape in CANDIDATES[kernel, size].split()]
    if kernel == DKDV and size == 256:
        configs = [config._replace(split_dkdv=True) for config in configs]
    return configs + [config._replace(sigmoid="accurate") for config in configs[:1]]


def hopper_candidates(kernel: str) -> list[HopperConfig]:
    """Return the configurations of a Hopper kernel that are worth measuring: memory and registers suffice."""
    default = tuning.HOPPER_CONFIGS[kernel]
    configs = [HopperConfig(64, 2), HopperConfig(64, 3)]
    configs += [default._replace(persistent_keys=n) for n in (0, 1 << 30)]
    configs += [default._replace(sigmoid=form) for form in ("paired", "paired-rcp", "rcp")]
    return list(dict.fromkeys(configs))
