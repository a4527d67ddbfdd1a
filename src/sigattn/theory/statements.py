"""Numerical checks of the paper's statements, each with the number of cases and a verdict.

A verdict is "holds", "holds corrected" (the printed form fails, the form given in the note holds), "fails", or
"depends" (it holds under conditions that the paper does not name). ``docs/paper-notes.md`` explains every verdict other
than "holds".
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

import sigattn.ops.attention as operator
from sigattn.ops.custom_ops import FLOP_FORMULAS
from sigattn.theory import bias, regularity
from sigattn.theory.contextual_mapping import ContextualMapping, Verification, modified_attention

HOLDS, CORRECTED, FAILS, DEPENDS = "holds", "holds corrected", "fails", "depends"


@dataclass(frozen=True)
class Statement:
    """Statement of the paper, where it stands, the number of cases checked, and the verdict with an optional note."""

    claim: str
    where: str
    cases: int
    verdict: str
    note: str


def check_all(limit: int = 50_000, longest: int = 8) -> Iterator[Statement]:
    """Check every statement in turn.

    Contextual mappings are enumerated with up to ``limit`` tokens (inputs times n) and n up to ``longest``, and Theorem
    3.2's bound is searched with ``limit`` random inputs, at most 2,000; 50,000 takes a minute.
    """
    yield from contextual_mappings(limit, longest)
    yield from jacobian_bounds(min(limit, 2000))
    yield from bias_rules()
    yield from operation_counts()


def grids(limit: int, longest: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Iterate over (G, n, [(d, 1/δ) with G = δ^-d, d ≤ 3]) for which all inputs have at most ``limit`` tokens."""
    for n in range(2, longest + 1):
        points = n
        while math.comb(points, n) * n <= limit:
            roots = [(d, round(points ** (1 / d))) for d in (1, 2, 3)]
            yield points, n, [(d, root) for d, root in roots if root**d == points and root >= 2]
            points += 1


def contextual_mappings(limit: int, longest: int) -> Iterator[Statement]:
    """Check the contextual mapping and its lemmas on every quantised input of every grid."""
    checked: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    smallest: dict[int, list[str]] = {}
    sizes, tokens = 0, 0
    for points, n, shapes in grids(limit, longest):
        mapping = ContextualMapping(d=1, n=n, inverse_delta=points)
        result = Verification(mapping)  # the layers act on indices, so the result depends on d and δ through G only
        checked.update(result.checked)
        failed.update(result.failed)
        sizes += len(shapes)
        tokens += sum(_tokens_agree(d, n, root) for d, root in shapes if d > 1)
        if mapping.inputs <= 500 and points <= 12:
            smallest.setdefault(n, []).append(f"{mapping.smallest_c()} of {mapping.proof_c}")
    v = Verification
    yield _verdict(
        "the layers form a contextual mapping, with the proof's c",
        "App. C, last theorem",
        checked[v.BETWEEN],
        failed[v.WITHIN] + failed[v.BETWEEN],
        f"{sizes} pairs of grid and length, all inputs up to permutation",
    )
    least = "; ".join(f"n = {n}: {', '.join(c[-3:])}" for n, c in smallest.items() if n <= 5)
    yield Statement(
        "smallest possible c", "App. C, condition on c", len(smallest), HOLDS, f"least c that works: {least}"
    )
    if tokens:
        note = "layers applied to tokens of d = 2 and 3 change the index uᵀx like layers applied to indices"
        yield Statement("u reduces d dimensions to one", "App. C, map u", tokens, HOLDS, note)
    claim = "l̃ after the selective shifts is given by binomials"
    wrong = failed[v.PRINTED]
    note = f"s_(k-i+1) must be s_(j-1-k): as printed it is wrong in {wrong:,} cases, all with n ≥ 4"
    yield _verdict(claim, "App. C, Eq. for l̃_j", checked[v.PRINTED], failed[v.FORMULA], note, printed_failures=wrong)
    for key in (v.ONE_TO_ONE, v.INCREASING, v.LOWER, v.UPPER, v.LAST):
        yield _verdict(key, "App. C, lemma", checked[key], failed[key])
    yield _verdict(v.SHIFT, "App. C, global shift", checked[v.SHIFT], failed[v.SHIFT])
    note = "l̃_n itself exceeds c^n δ. By cases: i = n, j < n needs l̃_n < c^(n+1) δ, which holds"
    bound, wrong = v.LAST_INDEX_BOUND, failed[v.AS_PRINTED]
    yield _verdict(v.AS_PRINTED, "App. C, last proof", checked[bound], failed[bound], note, printed_failures=wrong)
    yield _first_layer()
    yield _missing_delta()


def _tokens_agree(d: int, n: int, inverse_delta: int) -> int:
    """Assert for two inputs, the first and the last, that layers on tokens and on indices agree; return their count."""
    m = ContextualMapping(d=d, n=n, inverse_delta=inverse_delta)
    for indices in (tuple(range(n)), tuple(range(m.grid - n, m.grid))):
        tokens = [[i // inverse_delta**row % inverse_delta for row in range(d)] for i in indices]
        assert [m.index(t) for t in tokens] == list(indices)
        assert [m.index(t) for t in m.apply(tokens)] == m.global_shift(m.selective_shifts(indices))
    return 2


def _first_layer() -> Statement:
    """Check the composition as printed, which starts at Ψ⁽¹⁾ and so never shifts an index 0."""
    mapping = ContextualMapping(d=1, n=3, inverse_delta=8, first_layer=1)
    broken = Verification(mapping).failed[Verification.LAST]
    note = "from i = 0: without Ψ⁽⁰⁾ a token of index 0 is not shifted, and the lemmas fail for "
    note += f"{broken} of {mapping.inputs} inputs"
    claim = "the layers are Ψ⁽¹⁾, Ψ⁽²⁾, …"
    return _verdict(claim, "App. C, composition", mapping.inputs, 0, note, printed_failures=broken)


def _missing_delta() -> Statement:
    """Check the fourth head of the selective shift as printed, with b_q = i + 1/2 instead of (i + 1/2) δ."""
    m = ContextualMapping(d=1, n=3, inverse_delta=8)
    failures = 0
    for l in m.all_inputs():
        for i in range(m.grid):
            printed = modified_attention(l, (2 * i + 1) * m.inverse_delta, 2 * i - 1)
            failures += printed != modified_attention(l, 2 * i + 1, 2 * i - 1)
    claim, cases = "b_q of the fourth head of a selective shift is i + ½", m.inputs * m.grid
    note = f"(i + ½) δ: as printed the head gives another result in {failures} of {cases} cases"
    return _verdict(claim, "App. C, Eq. selective shift", cases, 0, note, printed_failures=failures)


def jacobian_bounds(trials: int) -> Iterator[Statement]:
    """Check Theorem 3.2's bound, an inequality of its proof, and the growth of softmax's Jacobian norm."""
    drawn, climbed = regularity.search(trials, climbs=trials // 100)
    exceeded = sum(ratio > 1 + 1e-9 for ratio in (*drawn, *climbed))
    note = f"A = scale · W_q W_kᵀ; largest ratio to the bound {max(drawn):.3f} at random, {max(climbed):.3f} by "
    note += "gradient ascent (attained if the logits hardly vary)"
    claim = "‖Jac‖ ≤ ‖W_v‖ (σ∞ + 2 σ'∞ ‖A‖ mean ‖x‖²)"
    yield _verdict(claim, "Thm. 3.2", len(drawn) + len(climbed), exceeded, note)
    yield _frobenius_step()
    yield _exponential_of_the_largest_logit()
    one = torch.ones(1, 1, dtype=torch.float64)
    softmax, sigmoid = (regularity.Head(one, one, one, kind, scale=1.0) for kind in ("softmax", "sigmoid"))
    norms, failures = [], 0
    for radius in (2.0, 3.0, 4.0, 5.0):
        x = regularity.exponential_sequence(radius)
        norms.append(regularity.jacobian_norm_matrix_free(softmax, x))
        failures += norms[-1] < regularity.exponential_lower_bound(radius) * (1 - 1e-6)
        failures += regularity.jacobian_norm_matrix_free(sigmoid, x) > regularity.sigmoid_bound(sigmoid, x)
    note = f"n - 1 = e^(R²/4) tokens at R/2, one at R: R = 2 … 5 gives {' → '.join(f'{x:.1f}' for x in norms)}"
    claim = "softmax: ‖Jac‖ ≥ c R² e^(cR²) for some sequence; sigmoid stays below its bound for it"
    yield _verdict(claim, "Sect. 3.2 (Castin et al.)", 2 * len(norms), failures, note)


def _frobenius_step() -> Statement:
    """Check ‖M‖_F² ≤ n⁻² σ'∞ … of App. D as printed and with σ'∞ squared; they differ if σ'∞ > 1."""
    generator = torch.Generator().manual_seed(0)
    printed = corrected = 0
    cases = 300
    for _ in range(cases):
        x = 1 + 0.1 * torch.randn(8, 1, generator=generator, dtype=torch.float64)
        a = 0.1 * torch.rand(1, 1, generator=generator, dtype=torch.float64)
        p = torch.sigmoid(x @ a @ x.mT)  # b = 0, so that σ'∞ is about n/4
        slope = p * (1 - p)
        sigma_slope = 8 * slope.max()
        square = (slope * (x @ (x @ a.mT).mT)).square().sum()  # ‖M‖_F² with δ = x
        factors = x.square().sum() ** 2 * a.square().sum() / 64
        printed += bool(square > sigma_slope * factors)
        corrected += bool(square > sigma_slope**2 * factors * (1 + 1e-12))
    note = f"σ'∞² instead of σ'∞; as printed it is exceeded in {printed} cases. (The theorem uses σ'∞².)"
    claim = "‖M‖_F² ≤ n⁻² σ'∞ ‖x‖_F² ‖A‖² ‖δ‖_F²"
    return _verdict(claim, "App. D", cases, corrected, note, printed_failures=printed)


def _exponential_of_the_largest_logit() -> Statement:
    """Check σ∞ ≤ e^μ and σ'∞ ≤ e^μ with b = -log n for logits of at most μ."""
    n = torch.tensor([1, 2, 10, 1000, 10**6], dtype=torch.float64)[:, None]
    mu = torch.linspace(-5, 20, 51, dtype=torch.float64)
    p = torch.sigmoid(mu - n.log())
    failures = sum(int((x > mu.exp() * (1 + 1e-12)).sum()) for x in (n * p, n * p * (1 - p)))
    return _verdict("σ∞ ≤ e^μ and σ'∞ ≤ e^μ with b = -log n", "Sect. 3.2", 2 * p.numel(), failures)


def bias_rules() -> Iterator[Statement]:
    """Check the normalizing bias, its bounds and the rules derived from it."""
    generator = torch.Generator().manual_seed(0)
    outside = unsolved = cases = 0
    for n in (2, 3, 10, 100, 4096):
        count = min(2000, 400_000 // n)
        z = 5 * torch.randn(count, n, generator=generator, dtype=torch.float64)
        b = bias.normalizing_bias(z)
        low, high = bias.bias_bounds(z)
        outside += int(((b < low - 1e-12) | (b > high + 1e-12)).sum())
        unsolved += int(((torch.sigmoid(z + b.unsqueeze(-1)).sum(-1) - 1).abs() > 1e-9).sum())
        cases += count
    note = "b* by bisection; for equal logits it is -log(n - 1) exactly"
    yield _verdict("-log(n-1) - M ≤ b* ≤ -log(n-1) - m", "App. E, proposition", cases, outside + unsolved, note)
    z = torch.randn(2000, 64, generator=generator, dtype=torch.float64)
    p, softmax = torch.sigmoid(z - math.log(64)), z.softmax(-1)
    gap = (p * (1 - p) - softmax * (1 - softmax)).abs()
    failures = int((gap - ((p - softmax) * (1 - p - softmax)).abs()).abs().gt(1e-12).sum())
    note = "p(1-p) - p*(1-p*) = (p - p*)(1 - p - p*): the derivatives agree if the weights do"
    yield _verdict("gradients agree if p ≈ p*", "App. E", z.numel(), failures, note)
    ratios = [(m + math.log(n)) / max(m, math.log(n)) for n in (10, 100, 4096, 10**6) for m in (1.0, 3.0, 10.0)]
    note = f"-max(M, log n) is up to {max(ratios):.2f} times too small, at most 2 times: right in order only"
    yield Statement("b ≈ -(M + log n) ≈ -max(M, log n)", "App. E", len(ratios), DEPENDS, note)


def operation_counts() -> Iterator[Statement]:
    """Check that PyTorch's FlopCounterMode counts our operator's products like Table 1."""
    failures, sizes = 0, ((16, 8), (256, 64), (100, 40))
    for n, d in sizes:
        with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
            query, key, value = torch.zeros(3, 1, 3, n, d).unbind()
            operator.sigmoid_attention(query, key, value)
        failures += counter.get_total_flops() != 3 * n * (2 * n * d + 2 * n * d)  # of 3 heads
    note = "the operator's registered counts are those of both products (logits and values), unmasked, like PyTorch's"
    yield _verdict("FLOPs per token and head: 2nd for the logits", "Table 1", len(sizes), failures, note)


def _verdict(
    claim: str, where: str, cases: int, failures: int, note: str = "", *, printed_failures: int = 0
) -> Statement:
    """Return a statement that fails if its corrected form does, and holds corrected if only its printed form fails."""
    verdict = FAILS if failures else CORRECTED if printed_failures else HOLDS
    return Statement(claim, where, cases, verdict, note)
