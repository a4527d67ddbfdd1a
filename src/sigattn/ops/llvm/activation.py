"""The logistic function of vectors of float32."""

from __future__ import annotations

from sigattn.ops.llvm.builder import Builder, Value

LOG2_E = 1.44269504088896341
_LARGEST = 87.0  # exp(x) of float32 is neither infinite nor subnormal for |x| up to this
_LOG_2 = (0.693145751953125, 1.428606765330187045e-6)  # in two parts, of which the first has few bits
_SHIFT = 1.5 * 2**23 + 127  # the last bits of x + _SHIFT are 127 plus the integer nearest to x
_EXP2 = (0.009570101276, 0.055917859077, 0.240247443318, 0.693121790886, 0.999999284744)  # 2^x, |x| up to 1/2
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXPONENT = 23  # position of the exponent in the bits of a float32


def sigmoid(b: Builder, x: Value) -> Value:
    """Return σ(x) = 1 / (1 + exp(-x)), relative error a few units of the last place; 0 below -87, NaN for NaN."""
    y, largest = -x, b.vector(_LARGEST)
    small = y > largest
    y = b.select(small, largest, y)
    y = b.select(y < -_LARGEST, b.vector(-_LARGEST), y)
    return b.select(small, b.vector(0.0), b.divide(b.vector(1.0), 1.0 + _exp(b, y)))


def coarse_sigmoid(b: Builder, y: Value) -> Value:
    """Return 1 / (1 + 2^y), relative error up to 2^-13: a small part of that of rounding it to bfloat16."""
    y = b.select(y > 128.0, b.vector(128.0), y)  # 2^128 is infinite; NaN remains
    y = b.select(y < -126.0, b.vector(-126.0), y)
    shifted = y + _SHIFT
    fraction = y - (shifted - _SHIFT)
    p = _polynomial(b, _EXP2, fraction)
    power = (shifted.bitcast(b.int32s) << _EXPONENT).bitcast(b.floats)
    divisor = b.fma(p, power, b.vector(1.0))
    return b.estimate_reciprocal(divisor)  # relative error up to 2^-14


def _exp(b: Builder, x: Value) -> Value:
    """Return e to the power of x for |x| up to ``_LARGEST``: 2^n times a polynomial (Cephes)."""
    n = b.nearest_integer(x * LOG2_E)
    r = x
    for part in _LOG_2:
        r = b.fma(n, b.vector(-part), r)
    p = b.fma(_polynomial(b, _EXP, r), r * r, r + 1.0)
    power = ((n.to_int32() + 127) << _EXPONENT).bitcast(b.floats)
    return p * power


def _polynomial(b: Builder, coefficients: tuple[float, ...], x: Value) -> Value:
    """Return the polynomial with these coefficients, that of the largest power first."""
    p = b.vector(coefficients[0])
    for coefficient in coefficients[1:]:
        p = b.fma(p, x, b.vector(coefficient))
    return p
