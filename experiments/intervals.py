"""Means over seeds, differences of means with 95 % confidence intervals, and verdicts on claims about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from scipy.special import stdtrit

Verdict = Literal["agrees", "differs", "equivalent", "depends", "not shown"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


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

    def verdict_equal(self, tolerance: float) -> Verdict:
        """Return the verdict on a claim of equality by two one-sided tests, each at 2.5 %.

        Args:
            tolerance: the largest difference that does not matter.

        Returns:
            "agrees" if the whole interval lies within ± tolerance, or "equivalent" if it then
            excludes 0; "differs" if it lies outside ± tolerance; "not shown" otherwise.
        """
        if abs(self.delta) + self.margin <= tolerance:
            return "agrees" if abs(self.delta) <= self.margin else "equivalent"
        return "differs" if abs(self.delta) - self.margin > tolerance else "not shown"

    def verdict_positive(self, tolerance: float = 0.0) -> Verdict:
        """Return the verdict on the claim that the difference is positive.

        Args:
            tolerance: the smallest difference that would matter.

        Returns:
            "agrees" if the interval lies above 0; "differs" if it does not and lies below ``tolerance``, so that there
            is no difference that would matter; "not shown" otherwise.
        """
        if self.delta - self.margin > 0:
            return "agrees"
        return "differs" if self.delta + self.margin < tolerance else "not shown"

    def verdict_not_above(self, tolerance: float) -> Verdict:
        """Return the verdict on the claim that the difference is at most ``tolerance``, a one-sided test at 2.5 %."""
        if self.delta + self.margin <= tolerance:
            return "agrees"
        return "differs" if self.delta - self.margin > tolerance else "not shown"


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return mean(second) - mean(first) with Welch's interval, which is infinite for one seed."""
    delta = statistics.mean(second) - statistics.mean(first)
    if min(len(first), len(second)) < 2:
        return Difference(delta, math.inf)
    variances = [statistics.variance(v) / len(v) for v in (first, second)]
    if not sum(variances):
        return Difference(delta, 0.0)
    freedom = sum(variances) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(variances, (first, second), strict=True))
    return Difference(delta, float(stdtrit(freedom, 0.975)) * math.sqrt(sum(variances)))  # two-sided: 95 %


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean of second - first with its interval, for two measurements of each run; infinite for one run."""
    changes = [b - a for a, b in zip(first, second, strict=True)]
    if len(changes) < 2:
        return Difference(changes[0], math.inf)
    margin = float(stdtrit(len(changes) - 1, 0.975)) * statistics.stdev(changes) / math.sqrt(len(changes))
    return Difference(statistics.mean(changes), margin)


def verdict_all(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on the conjunction of several claims: the least favourable one."""
    order: tuple[Verdict, ...] = ("differs", "not shown", "depends", "equivalent", "agrees")
    return min(verdicts, key=order.index)


def mean_std(values: Sequence[float]) -> str:
    """Format mean ± standard deviation."""
    mean = significant(statistics.mean(values), 4)
    return mean if len(values) < 2 else f"{mean} ± {significant(statistics.stdev(values), 2)}"


def significant(value: float, digits: int) -> str:
    """Format a number with ``digits`` significant digits; thousands have a comma and no exponent."""
    return f"{float(f'{value:.{digits}g}'):,.6g}"
