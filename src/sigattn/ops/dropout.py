"""Dropout mask of attention weights, computed from the seed and the indices of the weight.

The mask of weight (b, h, i, j) is a hash of (seed, b·Hq + h, i, j). Forward and backward passes therefore agree
although their tiles differ, every backend drops the same weights, and the mask is not stored.
"""

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as int64: consecutive numbers spread over all bits
_MIX_1 = -4658895280553007687  # the two multipliers of the splitmix64 finaliser, as int64
_MIX_2 = -7723592293110705685
# of the hash of a weight: x ^= x >> shift, x *= factor, twice; odd 32-bit factors with good avalanche, as int32
SHIFTS = (16, 15)
FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))


def keep_mask(seed: Tensor, heads: Tensor, rows: Tensor, columns: Tensor, dropout_p: float) -> Tensor:
    """Return the mask of the weights that dropout keeps, (..., R, C): True with probability 1 - dropout_p.

    seed: 0-d int64, on the device of the indices. heads: indices b·Hq + h, of any shape (...). rows: (R,) indices of
    the queries. columns: (C,) indices of the keys.
    """
    by_row = row_hashes(seed, heads, rows).unsqueeze(-1)
    x = by_row ^ column_hashes(seed, columns)  # (..., R, C); int32 products wrap, as the hash requires
    for shift, factor in zip(SHIFTS, FACTORS, strict=True):
        x ^= x >> shift
        x *= factor
    return x >= threshold(dropout_p)


def row_hashes(seed: Tensor, heads: Tensor, rows: Tensor) -> Tensor:  # (..., R)
    """Return the rows' part of the hash, int32; arguments as in ``keep_mask``."""
    return _mix(_mix(heads + seed).unsqueeze(-1) + rows).to(torch.int32)


def column_hashes(seed: Tensor, columns: Tensor) -> Tensor:  # (C,)
    """Return the columns' part of the hash, int32; arguments as in ``keep_mask``."""
    return _mix(columns + _mix(seed ^ _GOLDEN)).to(torch.int32)


def threshold(dropout_p: float) -> int:
    """Return the smallest hash (int32) of a weight that is kept."""
    return min(round(dropout_p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def keep_scale(dropout_p: float) -> float:
    """Return the factor of the weights that are kept."""
    return 1.0 / (1.0 - dropout_p)


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser, in which every output bit depends on every input bit; return the low 32 bits."""
    x = x.to(torch.int64) * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    x = x ^ _shift(x, 31)
    return ((x & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)  # as a signed number, so that the cast to int32 does not overflow


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right (the operator >> keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
