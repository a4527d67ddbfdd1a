"""The least-squares fit of one layer, term by term, compared with NumPy's on the same rows in float64."""

import math

import numpy as np
import pytest
import torch

from sigattn.conversion import ConversionError
from sigattn.conversion.fit import BiasFit, QueryFeatures, check_finite, fit_biases
from sigattn.conversion.row_statistics import RowStatistics, row_statistics
from sigattn.nn import QuadraticBias, VisibleKeysLinearBias
from sigattn.nn.observer import AttentionCall
from sigattn.ops.problem import Problem, make_problem

B, H, N, D = 3, 2, 40, 4
LENGTHS = torch.tensor([40, 31, 25])  # the rows behind are padding


def problem_of(**options):
    query, key = torch.randn(B, H, N, D) * torch.tensor([1.0, 3, 0.5, 2]), torch.randn(B, H, N, D) + 0.5
    options = {"is_causal": True, "key_lengths": LENGTHS, **options}
    return make_problem(Problem, query, key, torch.randn(B, H, N, 5), **options)


def fitted(problem):
    fit, rows = BiasFit(problem), row_statistics(problem)
    fit.update(problem.query, rows)
    return fit, rows


def design(fit, problem, rows, head):
    """Return the features and the target -lse + log(visible) of the rows that count, in float64."""
    counted = rows.counted[:, head]
    x = fit.features(problem.query[:, head][counted], head).double()
    log_visible = rows.visible.expand(B, H, N)[:, head][counted].double().log()
    y = log_visible - rows.lse[:, head][counted].double()
    return torch.cat([torch.ones(len(x), 1).double(), log_visible[:, None], x], 1).numpy(), y.numpy()


def ridge(x, y):
    """Minimise the mean squared error plus 1e-3 of each feature's mean square (at least 1), and as much as ten rows."""
    square = np.square(x).mean(0)
    strength = (1e-3 + 10 / len(x)) * np.maximum(square, 1)
    strength[:2] = 1e-12, 1e-6
    return np.linalg.solve(x.T @ x / len(x) + np.diag(strength), x.T @ y / len(x))


def term_of(bias, query, head):
    return bias.query_term(query)[:, head, :, 0].double()


def test_all_terms_are_those_of_ridge_regression():
    problem = problem_of()
    fit, rows = fitted(problem)
    bias = fit.solve(with_query=True)
    bias.query_term.lower.fill_(-math.inf)
    bias.query_term.upper.fill_(math.inf)
    for head in range(H):
        x, y = design(fit, problem, rows, head)
        solution = ridge(x, y)
        assert bias.constant[head].item() == pytest.approx(solution[0] - 2, abs=1e-3)
        assert bias.slope[head].item() == pytest.approx(solution[1] - 1, abs=1e-3)
        term = term_of(bias, problem.query, head)[rows.counted[:, head]]
        np.testing.assert_allclose(term.detach().numpy(), x[:, 2:] @ solution[2:], atol=1e-3)


def test_without_the_query_they_are_ordinary_least_squares():
    problem = problem_of()
    fit, rows = fitted(problem)
    for bias, margin in ((fit.solve(with_query=False), 2), (fit.solve_visible(), 0)):
        for head in range(H):
            x, y = design(fit, problem, rows, head)
            constant, slope = np.linalg.lstsq(x[:, :2], y, rcond=None)[0]
            assert bias.constant[head].item() == pytest.approx(constant - margin, abs=1e-3)
            assert bias.slope[head].item() == pytest.approx(slope - 1, abs=1e-3)
    quadratic = fit.solve(with_query=False)
    assert quadratic.query_term(problem.query).eq(0).all()
    assert quadratic.query_term.upper.gt(1e38).all()  # no limits
    assert quadratic.query_term.lower.lt(-1e38).all()


def test_the_slope_is_minus_one_where_every_row_sees_as_many_keys():
    problem = problem_of(is_causal=False, key_lengths=None)
    fit, rows = fitted(problem)
    bias = fit.solve_visible()
    torch.testing.assert_close(bias.slope, -torch.ones(H), rtol=0, atol=1e-4)
    expected = (math.log(N) - rows.lse).mean((0, 2))
    torch.testing.assert_close(bias.constant, expected, rtol=0, atol=1e-3)


def test_the_limits_are_five_standard_deviations_from_the_mean_of_the_term():
    problem = problem_of()
    fit, rows = fitted(problem)
    bias = fit.solve(with_query=True)
    limits = bias.query_term.lower.clone(), bias.query_term.upper.clone()
    bias.query_term.lower.fill_(-math.inf)
    bias.query_term.upper.fill_(math.inf)
    for head in range(H):
        term = term_of(bias, problem.query, head)[rows.counted[:, head]]
        assert term.mean().abs() > 0.3 * term.std()  # so that limits around 0 would differ
        for limit, sign in zip(limits, (-1, 1), strict=True):
            expected = term.mean() + sign * 5 * term.std(correction=0)
            assert limit[head].item() == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4])
def test_rows_of_padding_do_not_count(value):
    """Neither in the moments nor, as long as they are not finite, in the directions."""
    problem = problem_of()
    padding = (torch.arange(N) >= LENGTHS[:, None])[:, None, :, None]
    zeros, other = (
        problem._replace(query=problem.query.masked_fill(padding, v), key=problem.key.masked_fill(padding, v))
        for v in (0.0, value)
    )
    expected, found = BiasFit(zeros), BiasFit(other)
    if not math.isfinite(value):
        torch.testing.assert_close(found.features.projection, expected.features.projection)
    found.features = expected.features
    for fit, p in ((expected, zeros), (found, other)):
        fit.update(p.query, row_statistics(p))
    assert found.products.isfinite().all()
    torch.testing.assert_close(found.products, expected.products)
    torch.testing.assert_close(found.targets, expected.targets)


def test_moments_are_sums_over_rows_in_blocks(monkeypatch):
    problem = problem_of()
    whole, _ = fitted(problem)
    monkeypatch.setattr("sigattn.conversion.fit._ROWS", 7)
    blocks, _ = fitted(problem)
    torch.testing.assert_close(blocks.products, whole.products, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(blocks.targets, whole.targets, rtol=1e-4, atol=1e-3)
    assert whole.products[:, 0, 0].tolist() == [LENGTHS.sum()] * H


def test_directions_are_those_in_which_logits_vary_most():
    """Eigenvectors of the keys' covariance in the metric of the queries; what all keys share does not matter."""
    query, key = torch.randn(2, 1, 4000, 12), torch.randn(2, 1, 4000, 12)
    scale = torch.tensor([5.0] * 8 + [0.1] * 4)  # of the logits' parts
    problem = make_problem(Problem, query * 2, (key * scale) + 100, torch.randn(2, 1, 4000, 3))
    features = QueryFeatures(problem)
    assert features.projection.shape == (1, 12, 8)
    assert features.projection[0, 8:].norm() < 0.05 * features.projection.norm()
    z = query[0, 0] * 2 @ features.projection[0]
    torch.testing.assert_close(z.T @ z / len(z), torch.eye(8), rtol=0, atol=0.1)  # of mean square 1
    linear = features(query[0, 0] * 2, 0)[:, :12]
    torch.testing.assert_close(linear.square().mean(0), torch.ones(12), rtol=0.1, atol=0)
    assert features(query[0, 0], 0).shape == (4000, features.count) == (4000, 12 + 36)


def test_coefficients_give_the_quadratic_form():
    features = QueryFeatures(problem_of())
    solution, query = torch.randn(H, features.count, dtype=torch.float64), torch.randn(7, D)
    linear, directions, curvature = features.coefficients(solution)
    for head in range(H):
        expected = features(query, head).double() @ solution[head]
        found = query.double() @ linear[head]
        found = found + ((query.double() @ directions[head]).square() * curvature[head]).sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(H, D).double())


def test_grouped_heads_take_the_keys_of_their_group():
    query, key = torch.randn(1, 4, 500, 12), torch.randn(1, 2, 500, 12)
    key[:, 0, :, 8:] *= 0.01
    key[:, 1, :, :4] *= 0.01
    features = QueryFeatures(make_problem(Problem, query, key, torch.randn(1, 2, 500, 3)))
    for head, unused in enumerate((slice(8, 12), slice(8, 12), slice(0, 4), slice(0, 4))):
        assert features.projection[head, unused].norm() < 0.1 * features.projection[head].norm()


def call_of(problem, name="a"):
    return AttentionCall(name, problem, lambda: "softmax", lambda bias: "sigmoid")


class TestFitBiases:
    def test_a_call_is_answered_with_softmax_and_each_layer_has_its_fits(self):
        problems = {"a": problem_of(), "b": problem_of()}
        for kind, types in ((QuadraticBias, [QuadraticBias] * 2), (VisibleKeysLinearBias, [VisibleKeysLinearBias])):
            answers = []

            def run(attend, answers=answers):
                answers += [attend(call_of(p, name)) for name, p in problems.items()]

            fits = fit_biases(run, ["b", "a"], kind)
            assert answers == ["softmax"] * 2
            assert list(fits) == ["b", "a"]
            assert [type(bias) for bias in fits["a"]] == types
        plain, with_query = fit_biases(run, ["a"])["a"]
        assert not plain.query_term.linear.any()
        assert with_query.query_term.linear.any()

    def test_a_layer_that_is_not_reached_is_named(self):
        with pytest.raises(ConversionError, match="do not reach the attention of 'b', 'c': pass"):
            fit_biases(lambda attend: attend(call_of(problem_of())), ["a", "b", "c"])

    @pytest.mark.parametrize("sizes", [{"heads": 4}, {"query": 6}, {"value": 3}])
    def test_calls_of_other_sizes_are_refused(self, sizes):
        heads, dim, value = sizes.get("heads", H), sizes.get("query", D), sizes.get("value", 5)
        x = torch.randn(B, heads, N, dim)
        other = make_problem(Problem, x, x, torch.randn(B, heads, N, value))
        first, second = (H, D, 5), (heads, dim, value)
        message = (
            rf"'a' calls attention with \(heads, .*\) \({first[0]}, {first[1]}, 5\) and \({second[0]}, {second[1]}"
        )
        with pytest.raises(ConversionError, match=message):
            fit_biases(lambda attend: (attend(call_of(problem_of())), attend(call_of(other))), ["a"])

    def test_denominators_that_are_not_finite_are_refused_where_rows_count(self):
        lse, counted = torch.zeros(1, 1, 3), torch.tensor([[[True, True, False]]])
        lse[..., 2] = math.nan
        rows = RowStatistics(lse, torch.ones(1, 1, 3), counted)
        check_finite("a", rows)
        for value in (math.nan, math.inf):
            lse[..., 1] = value
            with pytest.raises(ConversionError, match="logits of 'a' are not finite"):
                check_finite("a", rows)
