"""Biases by themselves: names in configurations, what they start from and learn, and the quadratic one's formulas."""

import math

import pytest
import torch

from sigattn import nn
from sigattn.nn.fitted_bias import EPS

H, D = 4, 6


def test_values():
    cpu = {"device": torch.device("cpu")}
    assert [bias(5, 7, **cpu) for bias in (nn.ConstantBias(-3.0), nn.ContextLengthBias(64))] == [-3, -math.log(64)]
    assert nn.BatchLengthBias()(5, 0, **cpu) == 0
    assert nn.SampleLengthBias()(5, 7, key_lengths=torch.tensor([1, 0]), **cpu).tolist() == [[[[0]]], [[[0]]]]


@pytest.mark.parametrize(
    ("rule", "learn", "kind", "value"),
    [
        (-10.0, "no", nn.ConstantBias, -10),
        (-10.0, "layer", nn.LearnableBias, [-10]),
        (-10.0, "head", nn.LearnableBias, [-10] * H),
        (-5.0, "query", nn.QueryBias, [-5]),
        ("log_context", "no", nn.ContextLengthBias, -math.log(64)),
        ("log_visible", "no", nn.VisibleKeysBias, None),
        ("log_sample", "no", nn.SampleLengthBias, None),
        ("log_batch", "no", nn.BatchLengthBias, None),
        ("log_alibi", "no", nn.AlibiKeysBias, None),
    ],
)
def test_rules_of_configurations(rule, learn, kind, value):
    bias = nn.make_bias(rule, learn=learn, max_seq_len=64, num_heads=H)
    assert type(bias) is kind
    own = getattr(bias, "value", None)
    assert (own.flatten().tolist() if isinstance(own, torch.Tensor) else own) == value


@pytest.mark.parametrize(
    ("rule", "learn", "kind"),
    [
        ("log_visible", "head", nn.VisibleKeysLinearBias),
        ("log_alibi", "head", nn.VisibleKeysLinearBias),
        ("log_alibi", "quadratic", nn.QuadraticBias),
    ],
)
def test_learned_forms_start_as_their_rule_and_learn(rule, learn, kind):
    bias = nn.make_bias(rule, learn=learn, num_heads=H, head_dim=4)
    assert isinstance(bias, kind)
    layer, reference = (
        nn.Attention(16, H, activation="sigmoid", attention_bias=b, position=nn.Alibi(H))
        for b in (bias, nn.make_bias(rule, num_heads=H))
    )
    reference.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(layer(x), reference(x))
    layer(x).square().sum().backward()
    assert bias.constant.grad.abs().min() > 0
    assert bias.slope.grad.abs().min() > 0


def random_bias(size=0.3):
    bias = nn.QuadraticBias(H, D, D)
    with torch.no_grad():
        for p in bias.parameters():
            p.normal_(std=size)
    return bias


def term_formula(query, linear, directions, curvature):
    """w·q + Σ λ (u·q)²."""
    y = query @ directions.view(H, D, D)
    return query @ linear.view(H, D, 1) + (curvature.view(H, 1, D) * y.square()).sum(-1, keepdim=True)


def scale_formula(output, gain, power, direction):
    """exp(g + β log‖o‖ + w · o/‖o‖), limited."""
    norm = output.norm(dim=-1, keepdim=True) + EPS
    exponent = gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log()
    return (exponent + (output / norm * direction.view(H, 1, -1)).sum(-1, keepdim=True)).clamp(-5, 5).exp()


def term():
    return random_bias().query_term, term_formula, torch.randn(2, 7, H, D).transpose(1, 2)


def scale():
    rows = torch.randn(2, H, 7, D)
    rows[0, 0, :2] *= torch.tensor([1e4, 0.0])[:, None]  # a limited row, and one without visible keys
    module = random_bias(1.0).row_scale
    with torch.no_grad():
        module.power[0] = 0.9
    return module, scale_formula, rows


@pytest.mark.parametrize("make", [term, scale])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_as_precise_as_the_formula_in_float32(make, dtype, autocast):
    module, formula, rows = make()
    module, rows = module.to(dtype), rows.to(dtype)
    names = [name for name, _ in module.named_parameters()]

    def result_and_gradients(function, wide):
        leaves = [t.detach().to(wide).requires_grad_() for t in (rows, *module.parameters())]
        result = function(*leaves)
        torch.manual_seed(1)
        return [result, *torch.autograd.grad((result.double() * torch.randn(result.shape)).sum(), leaves)]

    def call(rows, *parameters):
        with torch.autocast("cpu", enabled=autocast):
            return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), rows)

    ours, exact = result_and_gradients(call, dtype), result_and_gradients(formula, torch.float64)
    plain = result_and_gradients(formula, torch.promote_types(dtype, torch.float32))
    assert ours[0].dtype is plain[0].dtype  # not rounded
    for result, same, truth in zip(ours, plain, exact, strict=True):
        error, allowed = ((t.double() - truth).norm() / truth.norm() for t in (result, same.to(result.dtype)))
        assert error <= 2 * allowed + 1e-6


def test_the_quadratic_bias_is_linear_in_log_visible_and_adds_the_term_of_the_query():
    bias, query, visible = random_bias(), torch.randn(2, H, 7, D), torch.arange(1.0, 8.0).view(1, 1, 7, 1)
    expected = bias.constant.view(H, 1, 1) + bias.slope.view(H, 1, 1) * visible.log() + bias.query_term(query)
    torch.testing.assert_close(bias(7, 7, visible=visible, query=query), expected)
    bias.query_term.reset_parameters()
    assert torch.equal(bias.query_term(query), torch.zeros(2, H, 7, 1))


def test_scaled_rows_keep_their_dtype_and_those_without_visible_keys_have_a_finite_gradient():
    bias, rows = random_bias(1.0), torch.randn(2, H, 5, D, dtype=torch.bfloat16)
    rows[0, 0, 0] = 0
    rows.requires_grad_()
    out = bias.scaled(rows)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, (rows.float() * bias.row_scale(rows)).bfloat16())
    out.sum().backward()
    assert out[0, 0, 0].eq(0).all()
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("make", [term, scale])
def test_rows_of_other_heads_or_widths_are_refused_and_a_nan_stays_in_its_row(make):
    module, _, rows = make()
    for other in (rows[:, :2], rows[:, :1], rows[..., :5], rows[..., :1], rows[0], rows[None]):
        with pytest.raises(ValueError, match=r"must be \(batch, 4, length, 6\), as the parameters"):
            module(other)
    rows[0, 1, 3, 4] = torch.nan
    assert module(rows).isnan().any(-1).nonzero().tolist() == [[0, 1, 3]]
