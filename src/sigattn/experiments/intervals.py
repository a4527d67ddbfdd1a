"""Means over seeds and differences of means with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

# two-sided 95 % points of Student's distribution, by degrees of freedom from 1 on
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960


def student_quantile(freedom: float) -> float:
    """Return the 95 % point for ``freedom`` ≥ 1 degrees of freedom, interpolated linearly in 1 / freedom."""
    whole = min(math.floor(freedom), len(_STUDENT))
    low = _STUDENT[whole - 1]
    if whole == len(_STUDENT):
        return _NORMAL + (low - _NORMAL) * whole / freedom
    share = (1 / whole - 1 / freedom) / (1 / whole - 1 / (whole + 1))
    return low + share * (_STUDENT[whole] - low)


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return mean(second) - mean(first) and half the width of its 95 % interval (infinite for one seed)."""
    delta = statistics.mean(second) - statistics.mean(first)
    if min(len(first), len(second)) < 2:
        return delta, math.inf
    parts = [statistics.variance(v) / len(v) for v in (first, second)]
    if not sum(parts):
        return delta, 0.0
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (first, second), strict=True))
    return delta, student_quantile(max(freedom, 1.0)) * math.sqrt(sum(parts))


Verdict = Literal["agrees", "differs", "not shown"]


def verdict_equal(delta: float, margin: float, within: float) -> Verdict:
    """Return the verdict on a claim of equality.

    Args:
        delta: measured difference.
        margin: half the width of its 95 % interval.
        within: largest half width with which equality counts as shown.
    """
    if abs(delta) > margin:
        return "differs"
    return "agrees" if margin <= within else "not shown"


def verdict_positive(delta: float, margin: float) -> Verdict:
    """Return the verdict on the claim that delta is positive; ``margin`` is half the width of its 95 % interval."""
    return "agrees" if delta > margin else "differs" if -delta > margin else "not shown"


def verdict_all(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on the conjunction of several claims."""
    return "differs" if "differs" in verdicts else "not shown" if "not shown" in verdicts else "agrees"


def mean_std(values: Sequence[float]) -> str:
    """Format mean ± standard deviation."""
    mean = f"{statistics.mean(values):.4g}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"


def interval(delta: float, margin: float) -> str:
    """Format a difference ± half the width of its interval."""
    return f"{delta:+.3g}" if math.isinf(margin) else f"{delta:+.3g} ± {margin:.2g}"
