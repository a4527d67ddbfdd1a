"""Contextual mapping of App. C in exact integers: layers of modified sigmoid attention, and checks of the proof.

Everything is counted in units of δ. A quantised token is a column of d numbers in 0 … N - 1, N = 1/δ; the vector
u = (1, N, …, N^(d-1)) turns it into one index in 0 … G - 1, G = N^d. A sequence of n different tokens becomes n
different indices l₁ < … < l_n, and the layers add to the first row of the tokens, hence to the indices:

    selective shift Ψ⁽ⁱ⁾  (four heads)   l_j += c · Σ_{k: l_k > i} l_k     where l_j = i          i = 0 … G - 1
    global shift Ψ̄        (one head)     l_j += c^(n+1) · l_n              for every j

so that each token ends with a number that no other token of the sequence and no other sequence yields.
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Column = Sequence[int]


def sign(x: Any) -> Any:
    """Return -1, 0 or 1, the sign of an integer or elementwise of an integer tensor."""
    return x.sign() if isinstance(x, Tensor) else (x > 0) - (x < 0)


def modified_attention(l: Sequence[Any], b_q_twice: int, b_k_twice: int) -> list[Any]:
    """Return the first row of 4 ψ̃(X; b_q, b_k): 2 · Σ_k l_k · 2H((l_k - b_q)(l_j - b_k)) for each j.

    This is the definition of the modified sigmoid self-attention layer with q = k = v = u and o = e₀: row k of the
    weight matrix belongs to the value that is summed, column j to the token that is updated. Biases are given doubled,
    so that half units are integers. H(0) = 1/2, so that 2H is 1 plus the sign, and the weights are an outer product of
    signs plus one. The indices l are n integers, or n integer tensors with one entry per input.
    """
    signed, total = sum(v * sign(2 * v - b_q_twice) for v in l), sum(l)
    return [2 * (signed * sign(2 * w - b_k_twice) + total) for w in l]


class ContextualMapping:
    """Layers of the contextual mapping for one grid and sequence length.

    Args:
        d: numbers per token.
        n: tokens per sequence, at least 2.
        inverse_delta: N = 1/δ, at least 2.
        c: factor of the layers; None for the least integer that the proof allows.
        first_layer: index of the first selective shift: 0, or 1 for the composition as printed in the paper.

    Raises:
        ValueError: if a size is out of range, or there are fewer grid points than tokens (which must all differ).
        TypeError: if a size is not an integer, such as an inverse_delta of 2.5: δ must be a unit fraction.
    """

    def __init__(self, *, d: int, n: int, inverse_delta: int, c: int | None = None, first_layer: int = 0) -> None:
        sizes = {"d": d, "n": n, "inverse_delta": inverse_delta}
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"ContextualMapping: {name} must be an integer (δ is a unit fraction), got {value!r}")
        if d < 1 or n < 2 or inverse_delta < 2:
            raise ValueError(f"ContextualMapping: needs d ≥ 1, n ≥ 2 and inverse_delta ≥ 2, got {sizes}")
        self.d, self.n, self.inverse_delta, self.first_layer = d, n, inverse_delta, first_layer
        self.grid: Any = inverse_delta**d
        if n > self.grid:
            raise ValueError(
                f"ContextualMapping: {n} different tokens do not fit a grid of {inverse_delta}^{d} = {self.grid} points"
                "; increase inverse_delta or d"
            )
        self.c: int = self.proof_c if c is None else c

    @property
    def proof_c(self) -> int:
        """Least integer c that satisfies c > (n - 1)(δ^-d - 1) · binom(n - 1, ⌈(n - 1)/2⌉)."""
        return (self.n - 1) * (self.grid - 1) * math.comb(self.n - 1, math.ceil((self.n - 1) / 2)) + 1

    def index(self, column: Column) -> int:
        """Return the index uᵀx of a token, in units of δ."""
        return sum(x * self.inverse_delta**row for row, x in enumerate(column))

    def selective_shift(self, l: Sequence[Any], i: int) -> list[Any]:
        """Apply Ψ⁽ⁱ⁾: four heads of modified attention, times c/2, with the δ that Eq. "selective shift" misses."""
        low, high = 2 * i - 1, 2 * i + 1  # twice (i ∓ 1/2)
        heads = (modified_attention(l, *b) for b in ((0, low), (0, high), (high, high), (high, low)))
        return [x + self.c * (a - b - e + f) // 8 for x, a, b, e, f in zip(l, *heads, strict=True)]

    def selective_shifts(self, l: Sequence[Any]) -> list[Any]:
        """Apply all selective shifts in order."""
        for i in range(self.first_layer, self.grid):
            l = self.selective_shift(l, i)
        return list(l)

    def global_shift(self, l: Sequence[Any]) -> list[Any]:
        """Apply Ψ̄: one head with b_q = (c^n + 1/2) δ and b_k = 0, times c^(n+1)."""
        result = []
        for x, head in zip(l, modified_attention(l, 2 * self.c**self.n + 1, 0), strict=True):
            update = self.c ** (self.n + 1) * head
            is_half = (update % 4 != 0) * 1  # half units arise only from an index 0, equal to b_k, and are not divided
            result.append(x + is_half * update + (1 - is_half) * (update // 4))
        return result

    def apply(self, columns: Sequence[Column]) -> list[list[int]]:
        """Return n different tokens of d numbers in 0 … N - 1 after all layers, Ψ(X); their first numbers change."""
        if len(columns) != self.n or any(len(x) != self.d for x in columns):
            raise ValueError(f"ContextualMapping: needs {self.n} tokens of {self.d} numbers, got {columns}")
        if any(not 0 <= v < self.inverse_delta for x in columns for v in x):
            raise ValueError(f"ContextualMapping: numbers must lie in 0 … {self.inverse_delta - 1}, got {columns}")
        before = [self.index(x) for x in columns]
        if len(set(before)) < self.n:
            raise ValueError(f"ContextualMapping: tokens must all differ, got {columns}")
        l = self.global_shift(self.selective_shifts(before))
        return [[x[0] + after - b, *x[1:]] for x, b, after in zip(columns, before, l, strict=True)]

    def closed_form(self, l: Sequence[Any], *, as_printed: bool = False) -> list[Any]:
        """Return the indices l̃ after the selective shifts by the corrected formula with binomials.

        l̃_j = l_j + c s_j + Σ_i c^(i+2) Σ_{k=i}^{j-2} binom(k, i) s_{j-1-k}, where s_j is the sum of all l but l_j. (The
        paper prints s_{k-i+1}, which agrees with its own unrolled terms up to j = 3 only: ``as_printed``.) The indices
        l are n ascending integers, or integer tensors.
        """
        total, c = sum(l), self.c
        s = [total - x for x in l]
        result = []
        for j in range(1, self.n + 1):
            higher = 0
            for i in range(j - 1):
                terms = (math.comb(k, i) * s[(k - i + 1 if as_printed else j - 1 - k) - 1] for k in range(i, j - 1))
                higher += c ** (i + 2) * sum(terms)
            result.append(l[j - 1] + c * s[j - 1] + higher)
        return result

    @property
    def inputs(self) -> int:
        """Number of quantised inputs up to permutation."""
        return math.comb(self.grid, self.n)

    def all_inputs(self) -> Iterator[tuple[int, ...]]:
        """Iterate over every set of n different indices, each in ascending order."""
        return itertools.combinations(range(self.grid), self.n)

    def batches(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Iterate over the inputs, before and after the selective shifts: n integers each, or n tensors of many inputs.

        All inputs are one batch of 64-bit tensors where all sums fit.
        """
        if 8 * self.n * (self.c + 1) ** (self.n + 2) >= 2**62:
            yield from ((list(l), self.selective_shifts(l)) for l in self.all_inputs())
            return
        before = list(torch.tensor(list(self.all_inputs()), dtype=torch.int64).unbind(1))
        shifted = self.selective_shifts(before)
        if 8 * self.n * (self.c + 1) ** (2 * self.n + 2) < 2**62:  # of the global shift too
            yield before, shifted
        else:
            yield from zip(*(torch.stack(columns, 1).tolist() for columns in (before, shifted)), strict=True)

    def is_contextual(self) -> bool:
        """Return True if all tokens of all inputs end with different numbers."""
        final = [x for _, l in self.batches() for x in _numbers(self.global_shift(l))]
        return len(set(final)) == len(final)

    def smallest_c(self) -> int:
        """Return the least c with which the layers are a contextual mapping."""
        for c in range(1, self.proof_c):
            other = ContextualMapping(d=self.d, n=self.n, inverse_delta=self.inverse_delta, c=c)
            if other.is_contextual():
                return c
        return self.proof_c


class Verification:
    """Numbers of cases of App. C's statements, counted over every input of a mapping.

    ``checked`` has the number of cases by statement, ``failed`` the number of those that fail.
    """

    FORMULA = "l̃ is given by the closed form, corrected"
    PRINTED = "l̃ is given by the closed form, as printed"
    ONE_TO_ONE = "l ↦ l̃_n is one-to-one"
    INCREASING = "l̃ is increasing"
    LOWER = "l̃_j > c^j δ for j > 1"
    UPPER = "l̃_j < c^(j+1) δ for 1 < j < n"
    LAST = "l̃_j ≤ c^n δ for j < n, and l̃_n > c^n δ"
    SHIFT = "the global shift adds c^(n+1) l̃_n"
    WITHIN = "(i) a sequence's numbers differ"
    BETWEEN = "(ii) different sequences have no number in common"
    AS_PRINTED = "|l̃_i - l̃'_j| < c^n δ, as the last proof says"
    LAST_INDEX_BOUND = "l̃_n < c^(n+1) δ, with which the last proof can be corrected"

    def __init__(self, m: ContextualMapping) -> None:
        self.checked: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        last: list[int] = []
        numbers: list[int] = []
        final: list[int] = []
        for before, shifted in m.batches():
            after = m.global_shift(shifted)
            self._check(m, before, shifted, after)
            last += _numbers(shifted[-1:])
            numbers += _numbers(shifted)
            final += _numbers(after)
        for statement, distinct in ((self.ONE_TO_ONE, last), (self.BETWEEN, final)):
            self.checked[statement] = len(distinct)
            self.failed[statement] = len(distinct) - len(set(distinct))
        # the largest difference over all pairs of inputs is that between the smallest and the largest index
        self._count(self.AS_PRINTED, max(numbers) - min(numbers) < m.c**m.n)

    def _check(self, m: ContextualMapping, before: Sequence[Any], l: Sequence[Any], final: Sequence[Any]) -> None:
        """Check the statements about single inputs.

        The indices are those before the layers, after the selective shifts (l) and after all layers: n integers each,
        or n tensors with one entry per input.
        """
        n, c = m.n, m.c
        self._count(self.FORMULA, _all_equal(m.closed_form(before), l))
        self._count(self.PRINTED, _all_equal(m.closed_form(before, as_printed=True), l))
        self._count(self.INCREASING, _all(x < y for x, y in itertools.pairwise(l)))
        for j in range(2, n + 1):
            self._count(self.LOWER, l[j - 1] > c**j)
            if j < n:
                self._count(self.UPPER, l[j - 1] < c ** (j + 1))
        self._count(self.LAST, _all(x <= c**n for x in l[:-1]) & (l[-1] > c**n))
        self._count(self.LAST_INDEX_BOUND, l[-1] < c ** (n + 1))
        self._count(self.SHIFT, _all_equal(final, [x + c ** (n + 1) * l[-1] for x in l]))
        self._count(self.WITHIN, _all(x != y for x, y in itertools.combinations(final, 2)))

    def _count(self, statement: str, holds: bool | Tensor) -> None:
        cases, true = (holds.numel(), int(holds.sum())) if isinstance(holds, Tensor) else (1, int(holds))
        self.checked[statement] += cases
        self.failed[statement] += cases - true


def _numbers(l: Iterable[Any]) -> list[int]:
    return [number for x in l for number in (x.tolist() if isinstance(x, Tensor) else (x,))]


def _all(conditions: Iterable[Any]) -> Any:
    return functools.reduce(operator.and_, conditions)


def _all_equal(first: Sequence[Any], second: Sequence[Any]) -> Any:
    return _all(x == y for x, y in zip(first, second, strict=True))
