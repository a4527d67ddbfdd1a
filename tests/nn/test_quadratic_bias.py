"""``QuadraticBias``: its term in the query and its scale of the output, against their formulas in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn.nn import QuadraticBias
from sigattn.nn.fitted_bias import EPS
from tests.conversion.replacing import replace

H, D = 4, 6


def random_bias(size=0.3):
    bias = QuadraticBias(H, D, D)
    with torch.no_grad():
        for p in bias.parameters():
            p.normal_(std=size)
    return bias


def term_formula(query, linear, directions, curvature, lower, upper):
    """w·q + Σ λ (u·q)², limited."""
    y = query @ directions.view(H, D, D)
    term = query @ linear.view(H, D, 1) + (curvature.view(H, 1, D) * y.square()).sum(-1, keepdim=True)
    return term.clamp(lower.view(H, 1, 1), upper.view(H, 1, 1))


def scale_formula(output, gain, power, direction):
    """o exp(g + β log‖o‖ + w · o/‖o‖), limited, and the factor."""
    norm = output.norm(dim=-1, keepdim=True) + EPS
    exponent = gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log()
    factor = (exponent + (output / norm * direction.view(H, 1, -1)).sum(-1, keepdim=True)).clamp(-5, 5).exp()
    return output * factor, factor


def limited_term():
    term = random_bias().query_term
    term.lower.fill_(-0.25)
    term.upper.fill_(0.5)
    return term, term_formula, torch.randn(2, 7, H, D).transpose(1, 2)


def scale():
    rows = torch.randn(2, H, 7, D)
    rows[0, 0, :2] *= torch.tensor([1e4, 0.0])[:, None]  # a limited row, and one without visible keys
    module = random_bias(1.0).row_scale
    with torch.no_grad():
        module.power[0] = 0.9
    return module, scale_formula, rows


@pytest.mark.parametrize("make", [limited_term, scale])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_as_precise_as_the_formula_in_float32(make, dtype, autocast):
    module, formula, rows = make()
    module, rows = module.to(dtype), rows.to(dtype)
    tensors = [rows, *module.parameters(), *module.buffers()]

    def results_and_gradients(function, wide):
        leaves = [t.detach().to(wide) for t in tensors]
        leaves[:4] = [t.requires_grad_() for t in leaves[:4]]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        total = sum((r.double() * torch.randn(r.shape)).sum() for r in results)
        return [*results, *torch.autograd.grad(total, leaves[:4])]

    def call(rows, *others):
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        with torch.autocast("cpu", enabled=autocast):
            return torch.func.functional_call(module, dict(zip(names, others, strict=True)), rows)

    ours, exact = results_and_gradients(call, dtype), results_and_gradients(formula, torch.float64)
    plain = results_and_gradients(formula, torch.promote_types(dtype, torch.float32))
    for result, same, truth in zip(ours, plain, exact, strict=True):
        if result.shape[-1] == 1:  # terms and factors are not rounded
            assert result.dtype is torch.promote_types(dtype, torch.float32)
        else:
            assert result.dtype is dtype
            same = same.to(dtype)
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (result, same))
        assert error <= 2 * allowed + 1e-6


def test_the_bias_is_linear_in_log_visible_and_adds_the_term_of_the_query():
    bias, query, visible = random_bias(), torch.randn(2, H, 7, D), torch.arange(1.0, 8.0).view(1, 1, 7, 1)
    expected = bias.constant.view(H, 1, 1) + bias.slope.view(H, 1, 1) * visible.log() + bias.query_term(query)
    torch.testing.assert_close(bias(7, 7, visible=visible, query=query), expected)
    bias.query_term.reset_parameters()
    assert torch.equal(bias.query_term(query), torch.zeros(2, H, 7, 1))
    with pytest.raises(ValueError, match="pass query"):
        bias(7, 7, visible=visible)


def test_a_row_without_visible_keys_has_a_finite_gradient():
    zero = torch.zeros(1, H, 1, D, requires_grad=True)
    out = random_bias(1.0).scaled(zero)
    out.sum().backward()
    assert out.eq(0).all()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("make", [limited_term, scale])
def test_rows_of_other_heads_or_widths_are_refused_and_a_nan_stays_in_its_row(make):
    module, _, rows = make()
    for other in (rows[:, :2], rows[:, :1], rows[..., :5], rows[..., :1], rows[0], rows[None]):
        with pytest.raises(ValueError, match=r"must be \(batch, 4, length, 6\), as the parameters"):
            module(other)
    rows[0, 1, 3, 4] = torch.nan
    result = module(rows)
    for t in result if isinstance(result, tuple) else (result,):
        assert t.isnan().any(-1).nonzero().tolist() == [[0, 1, 3]]


def test_weights_of_multihead_attention_give_its_output():
    layer = nn.MultiheadAttention(H * D, H, batch_first=True)
    replace(layer)
    layer.sigmoid_bias = random_bias(1.0)
    x = torch.randn(2, 7, H * D)
    out, weights = layer(x, x, x, average_attn_weights=False)
    value = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[2]
    heads = weights @ value.unflatten(-1, (H, D)).transpose(1, 2)
    torch.testing.assert_close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))
