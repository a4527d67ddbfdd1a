"""Rows of weights that are divided by their sum t (NORMALIZE): W = P / t."""

import triton
import triton.language as tl

from sigattn.ops.triton.activation import LN2, LOG2E, sigmoid

LARGEST_Z = tl.constexpr(3.4e38)  # where a row's lift starts


@triton.jit
def add_to_sums(sums, p):
    """Add the weights of a tile to partial sums of its rows, [BLOCK_M, 4]."""
    # In the layout of a product's result, columns 8i + 2k and 8i + 2k + 1 are in the k-th of four threads: each of them
    # has a partial sum, and no number changes its thread.
    fours = tl.reshape(p, (p.shape[0], p.shape[1] // 8, 4, 2))
    return sums + tl.sum(tl.sum(fours, 3), 1)


@triton.jit
def lifted_weights(z, row_shift, least_shift, OPT: tl.constexpr):
    """Return P · 2^s of a tile, s of each row, and the factor of what earlier tiles summed with the exponent row_shift.

    s is about the least z of the row so far, but at least ``least_shift``, so that no row underflows: s · ln 2, the
    lift, is an integer, which float32 has exactly. z: +inf where a key is hidden.
    """
    least = tl.min(z, 1)
    rounded = tl.floor(least * LN2) * LOG2E
    # from 2^22 on one rounding of z is no small number: s must not be below the least z, nor z - s far below 0
    least = tl.where(least < 4194304.0, rounded, tl.maximum(rounded, least))
    new_shift = tl.maximum(tl.minimum(row_shift, least), least_shift)
    KIND: tl.constexpr = "exact" if OPT.SIGMOID == "exact" else "accurate"
    bounded = tl.maximum(z, (new_shift - 24.0)[:, None], propagate_nan=tl.PropagateNan.ALL)
    p = sigmoid(bounded, tl.exp2(-new_shift)[:, None], new_shift[:, None], KIND, True)
    return tl.where(z == float("inf"), 0.0, p), new_shift, tl.exp2(new_shift - row_shift)


@triton.jit
def sum_pointers(row_sums, b, h, q_start, rows, len_q, heads, OPT: tl.constexpr):
    """Return the addresses of the sum and the lift of each row: (B, Hq, N, 2) or packed (T, Hq, 2)."""
    row = (q_start + rows).to(tl.int64) * heads + h if OPT.VARLEN else (b * heads + h) * len_q + rows
    return row_sums + 2 * row


@triton.jit
def term_pointers(row_terms, b, h, q_start, rows, pitch, heads, OPT: tl.constexpr):
    """Return the addresses of the first of four numbers of each row: (B, Hq, N, 4) or packed (Hq, T, 4)."""
    head = h if OPT.VARLEN else b * heads + h
    return row_terms + 4 * (head * pitch + q_start + rows)


@triton.jit
def load_terms(pointers, start, length, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Return bias, factor of the weights and dO · O of rows start … start + ROWS - 1, each [1, ROWS]; 0 for no row."""
    # The four numbers of a row, of which the last is not used, are loaded together. Of fewer numbers than threads,
    # Triton would have each thread load what its own weights need: up to five instructions for each weight.
    rows = tl.arange(0, ROWS)[:, None, None]
    numbers = 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    if CHECKED:
        terms = tl.load(pointers + 4 * rows + numbers, mask=start + rows < length, other=0.0)
    else:
        terms = tl.load(pointers + 4 * rows + numbers)
    first, second = tl.split(terms)  # numbers 0 and 2, 1 and 3
    z_bias, delta = tl.split(first)
    gain, _ = tl.split(second)
    return z_bias[None, :], gain[None, :], delta[None, :]


@triton.jit
def divide_by_sums(row_sums, z_bias, rows, sizes):
    """Return the bias and the factor with which W = gain · P is the weight of a row, both [BLOCK_M].

    Where the whole row is so small that P = 2^-z up to rounding, W does not depend on a constant in z: one is
    subtracted there that makes the sum 2^-24.
    """
    total = tl.load(row_sums, mask=rows < sizes.len_q, other=0.0)
    lift = tl.load(row_sums + 1, mask=rows < sizes.len_q, other=0.0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    shift = lift * LOG2E
    drop = tl.maximum(shift - tl.log2(total) - 24.0, 0.0)
    gain = tl.where(is_empty, 0.0, tl.exp2(shift - drop) / total)
    return z_bias - drop, gain
