"""Means over seeds, differences of means with 95 % confidence intervals, and verdicts on claims about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

Verdict = Literal["agrees", "differs", "not shown"]

# two-sided 95 % points of Student's t distribution, by degrees of freedom from 1 on
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960


class Difference(NamedTuple):
    """Difference of two means with its 95 % confidence interval; ``-difference`` swaps the two means.

    Attributes:
        delta: the difference. margin: half the width of its interval.
    """

    delta: float
    margin: float

    def __neg__(self) -> Difference:
        return Difference(-self.delta, self.margin)

    def __str__(self) -> str:
        return f"{self.delta:+.3g}" if math.isinf(self.margin) else f"{self.delta:+.3g} ± {self.margin:.2g}"

    def verdict_equal(self, within: float) -> Verdict:
        """Return the verdict on a claim of equality; ``within`` is the largest margin with which it counts as shown."""
        if abs(self.delta) > self.margin:
            return "differs"
        return "agrees" if self.margin <= within else "not shown"

    def verdict_positive(self) -> Verdict:
        """Return the verdict on the claim that the difference is positive."""
        return "agrees" if self.delta > self.margin else "differs" if -self.delta > self.margin else "not shown"


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return mean(second) - mean(first) with Welch's interval, which is infinite for one seed."""
    delta = statistics.mean(second) - statistics.mean(first)
    if min(len(first), len(second)) < 2:
        return Difference(delta, math.inf)
    parts = [statistics.variance(v) / len(v) for v in (first, second)]
    if not sum(parts):
        return Difference(delta, 0.0)
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (first, second), strict=True))
    return Difference(delta, _student_quantile(max(freedom, 1.0)) * math.sqrt(sum(parts)))


def _student_quantile(freedom: float) -> float:
    """Return the 95 % point for ``freedom`` ≥ 1 degrees of freedom, interpolated linearly in 1 / freedom."""
    whole = min(math.floor(freedom), len(_STUDENT))
    low = _STUDENT[whole - 1]
    if whole == len(_STUDENT):
        return _NORMAL + (low - _NORMAL) * whole / freedom
    fraction = (1 / whole - 1 / freedom) / (1 / whole - 1 / (whole + 1))
    return low + fraction * (_STUDENT[whole] - low)


def verdict_all(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on the conjunction of several claims."""
    return "differs" if "differs" in verdicts else "not shown" if "not shown" in verdicts else "agrees"


def mean_std(values: Sequence[float]) -> str:
    """Format mean ± standard deviation."""
    mean = f"{statistics.mean(values):.4g}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"
