"""Learned scale of an output's rows and learned term of the queries, against their formulas in float64."""

import pytest
import torch

from sigattn.nn.fitted_bias import QueryTerm, RowScale

HEADS, WIDTH = 3, 32


def random(*shape, scale=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def row_scale():
    module = RowScale(HEADS, WIDTH)
    module.gain.data = random(HEADS, scale=0.3, seed=1)
    module.power.data = torch.tensor([-0.9, 0.0, 0.7])
    module.direction.data = random(HEADS * WIDTH, scale=0.5, seed=2)
    return module


def row_scale_formula(rows, gain, power, direction):
    """Return scaled rows and their factors."""
    norm = torch.where(rows.eq(0).all(-1, True), 0, rows.square().sum(-1, True).clamp(min=1e-30).sqrt()) + 1e-6
    cosine = torch.einsum("bhnd,hd->bhn", rows, direction.view(HEADS, -1))[..., None] / norm
    factor = (gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log() + cosine).clamp(-5, 5).exp()
    return rows * factor, factor


def query_term():
    module = QueryTerm(HEADS, WIDTH)
    module.linear.data = random(HEADS * WIDTH, scale=0.1, seed=1)
    module.directions.data = random(HEADS * WIDTH * 8, scale=0.2, seed=2)
    module.curvature.data = random(HEADS * 8, seed=3)
    module.lower.copy_(torch.tensor([-0.5, -1e30, -2.0]))
    module.upper.copy_(torch.tensor([0.7, 1e30, -1.0]))
    return module


def query_term_formula(query, linear, directions, curvature, lower, upper):
    """Return w·q + Σ_r λ_r (u_r·q)², limited."""
    projections = torch.einsum("bhnd,hdr->bhnr", query, directions.view(HEADS, WIDTH, -1))
    term = torch.einsum("bhnd,hd->bhn", query, linear.view(HEADS, WIDTH))
    term = term + torch.einsum("bhnr,hr->bhn", projections.square(), curvature.view(HEADS, -1))
    return (term[..., None].clamp(lower.view(-1, 1, 1), upper.view(-1, 1, 1)),)


FUNCTIONS = {"RowScale": (row_scale, row_scale_formula), "QueryTerm": (query_term, query_term_formula)}


def rows_with_limits(dtype):
    """Return rows of which one is 0, and one in each head has a limited scale."""
    rows = random(2, HEADS, 40, WIDTH)
    rows[0, :, 20] = 0
    rows[-1, :, -1] *= 1e4
    return rows.to(dtype)


def results_and_gradients(function, rows, others):
    """Return the results, and the gradients of a random sum of them."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (rows, *others)]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    weights = [random(*r.shape, seed=7 + k).bfloat16() for k, r in enumerate(results)]  # exact in every dtype
    total = sum((r.double() * w).sum() for r, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(total, leaves[:4])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_as_precise_as_the_formula_in_float32(name, dtype, autocast):
    make, formula = FUNCTIONS[name]
    module, rows = make(), rows_with_limits(dtype)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def call(rows, *others):
        with torch.autocast("cpu", enabled=autocast):
            return torch.func.functional_call(module, dict(zip(tensors, others, strict=True)), rows)

    exact = results_and_gradients(formula, rows.double(), [t.double() for t in tensors.values()])
    plain = results_and_gradients(formula, rows.float(), tensors.values())
    plain = [p.to(dtype) if p.shape == rows.shape else p for p in plain]
    for result, same, truth in zip(results_and_gradients(call, rows, tensors.values()), plain, exact, strict=True):
        assert result.dtype is same.dtype
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (result, same))
        assert error <= 2 * allowed + 1e-6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_other_heads_or_widths_are_refused(name):
    module, rows = FUNCTIONS[name][0](), rows_with_limits(torch.float32)
    for other in (rows[:, :2], rows[:, :1], rows[..., :16], rows[..., :1], rows[0], rows[None]):
        with pytest.raises(ValueError, match=r"must be \(batch, 3, length, 32\), as the parameters"):
            module(other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_stays_in_its_row(name):
    module, rows = FUNCTIONS[name][0](), rows_with_limits(torch.float32)
    rows[0, 1, 3, 4] = torch.nan
    result = module(rows)
    for t in result if isinstance(result, tuple) else (result,):
        is_nan = t.isnan().any(-1)
        assert is_nan[0, 1, 3]
        assert is_nan.sum() == 1
