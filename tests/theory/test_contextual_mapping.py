"""The contextual mapping of App. C: its layers compared with their definition, and the claims of the proof."""

import math

import pytest

from sigattn.theory.contextual_mapping import ContextualMapping, Verification


@pytest.mark.parametrize(("d", "n", "inverse_delta"), [(2, 3, 3), (1, 5, 8)])
def test_mapping_is_contextual(d, n, inverse_delta):
    """On every input; the statements of the proof are in test_statements.py, of fewer tokens."""
    m = ContextualMapping(d=d, n=n, inverse_delta=inverse_delta)
    assert m.c - 1 <= (n - 1) * (m.grid - 1) * math.comb(n - 1, math.ceil((n - 1) / 2)) < m.c
    v = Verification(m)
    assert m.inputs == math.comb(inverse_delta**d, n) == len(set(m.all_inputs())) == v.checked[Verification.LAST]
    assert m.is_contextual()
    assert v.failed[Verification.PRINTED] == (m.inputs if n >= 4 else 0)


def test_batched_and_single_inputs_agree(monkeypatch):
    m = ContextualMapping(d=1, n=3, inverse_delta=9)
    ((given, shifted),) = m.batches()
    single = [m.selective_shifts(l) for l in m.all_inputs()]
    assert [list(l) for l in zip(*(x.tolist() for x in given), strict=True)] == [list(l) for l in m.all_inputs()]
    assert [list(l) for l in zip(*(x.tolist() for x in shifted), strict=True)] == single
    batched = Verification(m)
    cases = list(zip(m.all_inputs(), single, strict=True))
    monkeypatch.setattr(ContextualMapping, "batches", lambda self: cases)
    assert vars(Verification(m)) == vars(batched)


def test_printed_closed_form_agrees_up_to_three_tokens():
    """The paper unrolls l̃_4 = … + c³ (s_2 + 2 s_1) + …; its general formula gives s_1 + 2 s_2."""
    m = ContextualMapping(d=1, n=4, inverse_delta=7)
    l = [0, 1, 3, 6]
    total, c = sum(l), m.c
    s1, s2, s3, s4 = (total - x for x in l)
    unrolled = l[3] + c * s4 + c**2 * (s3 + s2 + s1) + c**3 * (s2 + 2 * s1) + c**4 * s1
    assert m.closed_form(l)[3] == unrolled
    assert m.closed_form(l, as_printed=True)[3] == unrolled + c**3 * (s2 - s1)
    assert m.closed_form(l)[:3] == m.closed_form(l, as_printed=True)[:3]


def test_too_small_c_is_not_contextual():
    m = ContextualMapping(d=1, n=2, inverse_delta=6)
    least = m.smallest_c()
    assert 1 < least <= m.proof_c
    worse = ContextualMapping(d=1, n=2, inverse_delta=6, c=least - 1)
    assert not worse.is_contextual()
    final = [x for l in worse.all_inputs() for x in worse.global_shift(worse.selective_shifts(l))]
    assert len(set(final)) < len(final)


def of_two(tokens):
    return lambda: ContextualMapping(d=1, n=2, inverse_delta=4).apply(tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ContextualMapping(d=1, n=1, inverse_delta=4), "n ≥ 2"),
        (lambda: ContextualMapping(d=1, n=2, inverse_delta=2.5), "unit fraction"),
        (lambda: ContextualMapping(d=1, n=5, inverse_delta=4), "5 different tokens do not fit"),
        (lambda: ContextualMapping(d=0, n=2, inverse_delta=4), "d ≥ 1"),
        (of_two([[0], [0]]), "differ"),
        (of_two([[0], [9]]), "0 … 3"),
        (of_two([[0]]), "2 tokens"),
        (of_two([[0, 1], [1, 0]]), "of 1"),
    ],
)
def test_invalid_sizes_and_tokens_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
