"""The logistic function of vectors of float32, several at once."""

from sigattn.ops.llvm.builder import Builder, Value

LOG2_E = 1.44269504088896341
_LARGEST = 87.0  # exp(x) of float32 is neither infinite nor subnormal for |x| up to this
_INFINITE = 89.0  # exp(x) of float32 is infinite
_LOG_2 = (0.693145751953125, 1.428606765330187045e-6)  # in two parts, of which the first has few bits
_SHIFT = 1.5 * 2**23 + 127  # the last bits of x + _SHIFT are 127 plus the integer nearest to x
_EXP2 = (0.009570101276, 0.055917859077, 0.240247443318, 0.693121790886, 0.999999284744)  # 2^x, |x| up to 1/2
# e^x, |x| up to log(2) / 2
_EXP = (1.38143206e-3, 8.36885069e-3, 4.16684002e-2, 1.66665196e-1, 4.99999940e-1, 1.0, 1.0)
_EXPONENT = 23  # position of the exponent in the bits of a float32


def sigmoid(b: Builder, ys: list[Value]) -> list[Value]:
    """Return 1 / (1 + exp(y)) of vectors, relative error a few units of the last place; 0 above 87, NaN for NaN."""
    ys = [b.select(y > _LARGEST, b.vector(_INFINITE), y) for y in ys]
    ys = [b.select(y < -_LARGEST, b.vector(-_LARGEST), y) for y in ys]
    shifted = b.together([b.fma(y, b.vector(LOG2_E), b.vector(_SHIFT)) for y in ys])
    integers = b.together([x - _SHIFT for x in shifted])
    for part in _LOG_2:  # y - n · log 2
        ys = b.together([b.fma(n, b.vector(-part), y) for n, y in zip(integers, ys, strict=True)])
    return [b.vector(1.0) / divisor for divisor in _add_one(b, _polynomials(b, _EXP, ys), shifted)]


def coarse_sigmoid(b: Builder, ys: list[Value]) -> list[Value]:
    """Return 1 / (1 + 2^y) of vectors, relative error up to 2^-13: a small part of that of rounding to bfloat16."""
    ys = [b.select(y > 128.0, b.vector(128.0), y) for y in ys]  # 2^128 is infinite; NaN remains
    ys = [b.select(y < -126.0, b.vector(-126.0), y) for y in ys]
    shifted = b.together([y + _SHIFT for y in ys])
    integers = b.together([x - _SHIFT for x in shifted])
    fractions = b.together([y - n for n, y in zip(integers, ys, strict=True)])
    divisors = _add_one(b, _polynomials(b, _EXP2, fractions), shifted)
    return [b.estimate_reciprocal(divisor) for divisor in divisors]  # relative error up to 2^-14


def _add_one(b: Builder, factors: list[Value], shifted: list[Value]) -> list[Value]:
    """Return 1 + factor · 2^n, given n + ``_SHIFT``."""
    powers = [(x.bitcast(b.int32s) << _EXPONENT).bitcast(b.floats) for x in shifted]
    return [b.fma(factor, power, b.vector(1.0)) for factor, power in zip(factors, powers, strict=True)]


def _polynomials(b: Builder, coefficients: tuple[float, ...], xs: list[Value]) -> list[Value]:
    """Return the polynomials with these coefficients, that of the largest power first."""
    ps = [b.vector(coefficients[0])] * len(xs)
    for coefficient in coefficients[1:]:
        ps = b.together([b.fma(p, x, b.vector(coefficient)) for p, x in zip(ps, xs, strict=True)])
    return ps
