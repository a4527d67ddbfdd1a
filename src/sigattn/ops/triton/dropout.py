"""Dropout in the kernels: the same numbers as ``ops/dropout.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Return the low 32 bits of the finaliser of splitmix64, of int64."""
    x = x.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def row_hash(seed, head, i):
    """Return the part of the hash that depends on head (b · Hq + h) and query."""
    by_head = _mix(head + tl.cast(seed, tl.int64) + tl.zeros_like(i).to(tl.int64))
    return _mix(by_head.to(tl.int64) + i)


@triton.jit
def column_hash(seed, j):
    """Return the part of the hash that depends on the key."""
    start = _mix((tl.cast(seed, tl.int64) ^ -7046029254386353131) + tl.zeros_like(j).to(tl.int64))
    return _mix(start.to(tl.int64) + j)


@triton.jit
def dropout_keep(by_row, by_column, threshold):
    """Return True where dropout keeps a weight."""
    x = (by_row ^ by_column).to(tl.int32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= -2073254261
    return x >= threshold
