"""The least-squares fit of one layer. (Compared with NumPy's: test_families.py.)"""

import math

import pytest
import torch

from sigattn.conversion.fit import MARGIN, SPREAD, BiasFit, RowStatistics, row_statistics
from sigattn.ops.problem import Problem, make_problem

B, H, N, D = 3, 2, 40, 4
LENGTHS = torch.tensor([40, 31, 25])  # the rows behind are padding


def problem_of(**options):
    query, key = torch.randn(B, H, N, D) * torch.tensor([1.0, 3, 0.5, 2]), torch.randn(B, H, N, D) + 0.5
    options = {"is_causal": True, "key_lengths": LENGTHS, **options}
    return make_problem(Problem, query, key, torch.randn(B, H, N, 5), **options)


def fitted(*rows):
    fit = BiasFit(H)
    for part in rows:
        fit.update(part)
    return fit.solve()


def test_rows_of_nearly_one_length_give_a_slope_near_minus_one():
    """Two numbers of visible keys that hardly differ, and denominators that differ more, as by chance."""
    visible = torch.tensor([100.0, 101.0]).repeat(50).view(1, 1, 100).expand(1, H, 100)
    lse = 5 + torch.tensor([-0.1, 0.1]).repeat(50).view(1, 1, 100).expand(1, H, 100)
    bias = fitted(RowStatistics(lse, visible, torch.ones_like(lse, dtype=torch.bool)))
    torch.testing.assert_close(bias.slope, -torch.ones(H), rtol=0, atol=0.2)  # that through both is -20
    b = bias(visible=visible.unsqueeze(-1))
    assert (b.squeeze(-1) + lse + MARGIN + SPREAD * 0.1).abs().max() < 0.15


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4])
def test_rows_of_padding_do_not_count(value):
    problem = problem_of()
    padding = (torch.arange(N) >= LENGTHS[:, None])[:, None, :, None]
    zeros, other = (
        problem._replace(query=problem.query.masked_fill(padding, v), key=problem.key.masked_fill(padding, v))
        for v in (0.0, value)
    )
    expected, got = fitted(row_statistics(zeros)), fitted(row_statistics(other))
    assert torch.equal(got.constant, expected.constant)
    assert torch.equal(got.slope, expected.slope)
