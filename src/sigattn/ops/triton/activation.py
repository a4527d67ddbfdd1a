"""The sigmoid of a tile in several forms.

Special-function (MUFU) and other instructions per score, and the error relative to P (docs/operator.md has the
measured ones):

    accurate   1 MUFU, 8 others   3.3e-5 at every P; ex2, then 1/d on the FMA units: for half precision, whose own
                                  rounding is 5e-4 (float16) and 4e-3 (bfloat16)
    paired     1⅛ MUFU, 6 others  the same: 1/a = b · 1/(ab), one reciprocal for two neighbours, a quarter of them by
                                  the special-function unit, which is not the bottleneck; P is 1e-18 below that
    paired-half 1¼ MUFU, 5 others the same, with half of the reciprocals by the special-function unit (Gluon only)
    paired-rcp 1½ MUFU, 4 others  the same, with all reciprocals by the special-function unit: less work, faster where
                                  products leave it time, as in the backward pass
    rcp        2 MUFU, 2 others   2e-7; the fewest instructions: where masks or dropout take many of their own and those
                                  of a weight do not depend on its neighbour, and in Gluon's kernel of all gradients
    exact      2 MUFU, 2 others   2e-7; ex2, then a division: for float32
    fast       1 MUFU, 1 other    unbounded as P → 0, because the error is absolute; tanh.approx, as in the paper's
                                  kernel (App. F); NVIDIA only

The argument is z = -log₂e · S, so that scale, bias and the change of base are one multiply-add: P = 1 / (1 + 2^z). For
"fast" it is S / 2.

With ``SHIFT`` the result is the weight times 2^shift: P · 2^shift = 1 / (unit + 2^(z - shift)) with unit = 2^-shift. In
float16 that keeps weights of 1/n as accurate as weights of 1, at no cost; the power of two is taken out at the end.
"""

import math
import os

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
Z_TO_HALF = tl.constexpr(-math.log(2) / 2)  # from z to S / 2

# Triton's interpreter runs no machine code, has no products of bfloat16 and truncates where the hardware rounds.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.constexpr_function
def runs_ptx() -> bool:
    """Return True if kernels are compiled for an NVIDIA GPU, whose assembly may be part of them."""
    return not INTERPRETED.value and is_cuda()


@triton.jit
def reciprocal(d):
    """Return 1/d for normal positive d, without the special-function unit; NaN stays NaN."""
    # A guess from the bits of d: t = d · guess lies in [0.9494, 1.0506] for every normal d. The polynomial p of degree
    # 2 for which |t · p(t) - 1| is least there, 3.3e-5 at most, corrects it.
    guess = (0x7EF311C7 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    t = d * guess
    return guess * (3.003833286708749 + t * (-3.005749435911007 + t * 1.001916149831417))


@triton.jit
def special_reciprocal(d):
    """Return 1/d, by the special-function unit."""
    if INTERPRETED:
        r = 1.0 / d
    else:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
    return r


@triton.jit
def reciprocal_of_some(d):
    """Return 1/d, computed for a quarter of the entries by the special-function unit, which is not the bottleneck."""
    ROWS: tl.constexpr = d.shape[0]
    COLUMNS: tl.constexpr = d.shape[1]
    # In the layout of a product's result each four columns are in four threads; the quarter consists of such fours, so
    # that no number changes its thread.
    if COLUMNS % 16 != 0:
        r = reciprocal(d)
    else:
        fours = tl.permute(tl.reshape(d, (ROWS, COLUMNS // 16, 2, 2, 4)), (0, 1, 4, 2, 3))
        x, y = tl.split(fours)
        u, v = tl.split(x)
        r = tl.join(tl.join(special_reciprocal(u), reciprocal(v)), reciprocal(y))
        r = tl.reshape(tl.permute(r, (0, 1, 3, 4, 2)), (ROWS, COLUMNS))
    return r


@triton.jit
def fast_sigmoid(half):
    """Return P from S / 2 by tanh.approx: its error is relative to 1."""
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 + 0.5 * tanh


@triton.jit
def sigmoid(z, unit, shift, KIND: tl.constexpr, SHIFT: tl.constexpr):
    """Return P, or with SHIFT P · 2^shift; z float32. KIND: a form of the table above; z is S / 2 for "fast"."""
    if KIND == "fast":
        p = fast_sigmoid(z)
        if SHIFT:
            p = p / unit
    elif KIND == "paired" or KIND == "paired-rcp":
        # two neighbours, both in one thread, share a reciprocal; the product of two must stay finite
        e = tl.exp2(tl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))
        e, f = tl.split(tl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
        d = 1.0 + e
        product = d * f + d  # (1 + e) (1 + f)
        r = special_reciprocal(product) if KIND == "paired-rcp" else reciprocal_of_some(product)
        if SHIFT:
            r = r * tl.exp2(shift)
        p = tl.reshape(tl.join(r * f + r, r * d), z.shape)
    else:
        if SHIFT:
            z = z - shift
            one = unit
        else:
            one = 1.0
        if KIND == "rcp":  # 0 where 2^z overflows
            p = special_reciprocal(one + tl.exp2(z))
        elif KIND == "accurate":
            # 2^z must stay finite and its inverse normal; P is below 1e-36 where this changes it
            z = tl.minimum(z, 120.0, propagate_nan=tl.PropagateNan.ALL)
            p = reciprocal(one + tl.exp2(z))
        else:
            tl.static_assert(KIND == "exact")
            p = 1.0 / (one + tl.exp2(z))
    return p


@triton.jit
def absolute_tanh(x):
    """Return the hyperbolic tangent with an absolute error of 2e-7."""
    d = 1.0 + tl.exp2(x * (2.0 * LOG2E))
    if runs_ptx():
        t = 1.0 - 2.0 * special_reciprocal(d)
    else:
        t = 1.0 - 2.0 / d
    return t


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, float32, with a relative error of 2e-7 also where x is small."""
    square = x * x
    p = 0.020403679591350515 - 0.005444794718221899 * square
    p = p * square - 0.05366715532981363
    p = p * square + 0.13330574169428253
    p = p * square - 0.3333325032287628
    near = x + x * (square * p)
    size = tl.abs(x)
    far = 1.0 - 2.0 / (1.0 + tl.exp2(size * (2.0 * LOG2E)))
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def tanh_slope(t):
    """Return the derivative 1 - t² of t = tanh(x). 0 for NaN, where dS, which it multiplies, is NaN or masked."""
    slope = 1.0 - t * t
    return tl.where(slope == slope, slope, 0.0)


@triton.jit
def logit_gradient(w, p, dp, unit, lower, SHIFT: tl.constexpr):
    """Return W · (1 − P) · dP; with SHIFT, ``lower`` is the factor from the weights' power of two to that of dS."""
    if SHIFT:
        ds = w * dp * (lower - p * (unit * lower))
    else:
        ds = (w - w * p) * dp
    return ds
