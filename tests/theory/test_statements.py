"""The table of ``sigattn theory``: its verdicts agree with ``docs/paper-notes.md``."""

import pytest

from sigattn import cli
from sigattn.cli import theory
from sigattn.theory import statements
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]  # PyTorch's, of forward mode

NOT_PLAIN = {
    "l̃ after the selective shifts is given by binomials": statements.CORRECTED,
    "|l̃_i - l̃'_j| < c^n δ, as the last proof says": statements.CORRECTED,
    "the layers are Ψ⁽¹⁾, Ψ⁽²⁾, …": statements.CORRECTED,
    "b_q of the fourth head of a selective shift is i + ½": statements.CORRECTED,
    "‖M‖_F² ≤ n⁻² σ'∞ ‖x‖_F² ‖A‖² ‖δ‖_F²": statements.CORRECTED,
    "b ≈ -(M + log n) ≈ -max(M, log n)": statements.DEPENDS,
}


def test_verdicts():
    found = list(statements.check_all(limit=100, longest=4))
    assert len(found) >= 19
    assert all(s.cases > 0 for s in found)
    assert {s.claim: s.verdict for s in found if s.verdict != statements.HOLDS} == NOT_PLAIN


def test_command(monkeypatch, capsys):
    made = [
        statements.Statement("1 < 2", "App. A", 3, statements.HOLDS, ""),
        statements.Statement("x", "App. C", 4000, statements.CORRECTED, "y"),
    ]
    monkeypatch.setattr(theory, "check_all", lambda limit, longest: iter(made[: longest - 2]))
    cli.main(["theory", "--limit", "60", "--longest", "4"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == ["holds: 1 < 2 (App. A; 3 cases)", "holds corrected: x (App. C; 4,000 cases)", "    y"]
    assert last == "2 statements: 1 holds, 1 holds corrected"
