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


def formula(bias, query, visible):
    """c + a log(visible) + w·q + Σ λ (u·q)², head by head in float64."""
    out = []
    for h in range(H):
        q, w = query[:, h].double(), bias.query_term.linear.double().view(H, D)[h]
        u, curvature = (
            bias.query_term.directions.double().view(H, D, D)[h],
            bias.query_term.curvature.double().view(H, D),
        )
        term = q @ w + sum(curvature[h, r] * (q @ u[:, r]) ** 2 for r in range(D))
        term = term.clamp(bias.query_term.lower[h].double(), bias.query_term.upper[h].double())
        out.append(bias.constant[h].double() + bias.slope[h].double() * visible.double().log() + term)
    return torch.stack(out, 1).unsqueeze(-1)


def test_the_formula_and_its_limits():
    bias, query = random_bias(), torch.randn(2, H, 7, D)
    visible = torch.arange(1.0, 8.0)
    given = {"visible": visible.view(1, 1, 7, 1), "query": query}
    torch.testing.assert_close(bias(7, 7, **given).double(), formula(bias, query, visible), rtol=1e-5, atol=1e-5)
    free = bias(7, 7, **given)
    bias.query_term.lower.fill_(-0.1)
    bias.query_term.upper.fill_(0.2)
    torch.testing.assert_close(bias(7, 7, **given).double(), formula(bias, query, visible), rtol=1e-5, atol=1e-5)
    assert not torch.equal(bias(7, 7, **given), free)
    bias.query_term.reset_parameters()
    assert torch.equal(bias.query_term(query), torch.zeros(2, H, 7, 1))
    with pytest.raises(ValueError, match="pass query"):
        bias(7, 7, visible=given["visible"])


def test_in_half_precision():
    """A converted model may be loaded in bfloat16: coefficients are rounded, the arithmetic is float32."""
    bias, query = random_bias().bfloat16(), torch.randn(2, H, 7, D).bfloat16()
    visible = torch.arange(1.0, 8.0)
    found = bias(7, 7, visible=visible.view(1, 1, 7, 1), query=query)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), formula(bias, query, visible), rtol=1e-5, atol=1e-5)


def written_out(query, linear, directions, curvature, lower, upper):
    y = query @ directions.view(H, D, D)
    term = query @ linear.view(H, D, 1) + (curvature.view(H, 1, D) * y.square()).sum(-1, keepdim=True)
    return term.clamp(lower.view(H, 1, 1), upper.view(H, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["heads first", "heads inside"])
def test_gradients(dtype, layout, unchecked):
    """The backward pass against autograd's of the formula in float64, with rows beyond both limits."""
    torch.compiler.reset()
    torch.manual_seed(0)
    term = random_bias().query_term.to(dtype)
    term.lower.fill_(-0.25)
    term.upper.fill_(0.5)
    query = (torch.randn(2, H, 7, D) if layout == "heads first" else torch.randn(2, 7, H, D).transpose(1, 2)).to(dtype)
    inputs = [query.requires_grad_(), *term.parameters()]
    limits, weights = (term.lower, term.upper), torch.randn(2, H, 7, 1)

    def gradients(y, inputs):
        return torch.autograd.grad((y.double() * weights).sum(), inputs)

    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truth = written_out(*doubles, *(t.double() for t in limits))
    assert truth.eq(-0.25).any()
    assert truth.eq(0.5).any()
    true, plain = gradients(truth, doubles), gradients(written_out(*inputs, *limits), inputs)
    for found in term(query), torch.compile(term, fullgraph=True, backend="aot_eager")(query):
        assert found.dtype is torch.promote_types(dtype, torch.float32)
        for got, expected, p in zip(gradients(found, inputs), true, plain, strict=True):
            assert got.dtype is dtype
            rounding = 8 * torch.finfo(dtype).eps * expected.abs().max()
            assert (got - expected).abs().max() <= 2 * (p - expected).abs().max() + rounding


def test_transforms():
    term = random_bias().query_term.double()
    x = torch.randn(4, 2, H, 7, D, dtype=torch.float64)
    parameters = dict(term.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(term, parameters, (x,)).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        written = written_out(sample, *term.parameters(), term.lower, term.upper)
        expected = torch.autograd.grad(written.square().sum(), term.parameters())
        torch.testing.assert_close(tuple(mapped[name][i] for name in parameters), expected)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_trace_can_be_saved(tmp_path):
    term, x = random_bias().query_term, torch.randn(2, H, 7, D)
    torch.jit.save(torch.jit.trace(term, x), str(tmp_path / "term.pt"))
    x = torch.randn(3, H, 7, D)
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "term.pt"))(x), term(x))


@pytest.mark.parametrize("kv_heads", [4, 2])
def scale_formula(bias, output):
    """exp(g + β log‖o‖ + w · o/‖o‖), head by head in float64."""
    output = output.double()
    norm = output.norm(dim=-1)
    scales = []
    for h, w in enumerate(bias.row_scale.direction.double().view(H, D)):
        direction = output[:, h] / norm[:, h, :, None]
        scales.append(
            bias.row_scale.gain[h].double() + bias.row_scale.power[h].double() * norm[:, h].log() + direction @ w
        )
    return torch.stack(scales, 1).clamp(-5, 5).exp().unsqueeze(-1)


def test_the_scale():
    bias, output = random_bias(1.0), torch.randn(2, H, 7, D)
    torch.testing.assert_close(bias.output_scale(output).double(), scale_formula(bias, output), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        bias.scaled(output.bfloat16()).float(), output * scale_formula(bias, output).float(), rtol=0.03, atol=0.01
    )
    zero = torch.zeros(1, H, 1, D, requires_grad=True)  # a row without visible keys
    bias.scaled(zero).sum().backward()
    assert bias.scaled(zero).eq(0).all()
    assert zero.grad.isfinite().all()


def scaled_and_factor(output, gain, power, direction):
    norm = output.norm(dim=-1, keepdim=True) + EPS
    exponent = gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log()
    factor = (exponent + (output / norm * direction.view(len(gain), 1, -1)).sum(-1, keepdim=True)).clamp(-5, 5).exp()
    return output * factor, factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["heads first", "heads inside"])
def test_gradients_of_the_scale(dtype, layout, unchecked):
    """The backward pass against autograd's of the formula in float64, with a limited row and one of zeros."""
    torch.compiler.reset()
    torch.manual_seed(0)
    scale = random_bias(1.0).row_scale.to(dtype)
    with torch.no_grad():
        scale.power[0] = 0.5
    output = torch.randn(2, H, 7, D) if layout == "heads first" else torch.randn(2, 7, H, D).transpose(1, 2)
    output[0, 0, :2] *= torch.tensor([1e9, 0.0])[:, None]
    output = output.to(dtype).requires_grad_()
    inputs = [output, *scale.parameters()]
    weights = torch.randn(2, H, 7, D), torch.randn(2, H, 7, 1)
    weights[0][0, 0, 0], weights[1][0, 0, 0] = 1e-9, 1e-9

    def gradients(f, inputs):
        return torch.autograd.grad(sum((y.double() * w).sum() for y, w in zip(f, weights, strict=True)), inputs)

    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truth = scaled_and_factor(*doubles)
    assert abs(float(truth[1].detach().log()[0, 0, 0])) == pytest.approx(5)
    scaled, factor = scale(output)
    assert (scaled.dtype, factor.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    true, plain = gradients(truth, doubles), gradients(scaled_and_factor(*inputs), inputs)
    compiled = torch.compile(scale, fullgraph=True, backend="aot_eager")(output)
    for found in (scaled, factor), compiled:
        for got, expected, p in zip(gradients(found, inputs), true, plain, strict=True):
            assert got.dtype is dtype
            rounding = 8 * torch.finfo(dtype).eps * expected.abs().max()
            assert (got - expected).abs().max() <= 2 * (p - expected).nan_to_num().abs().max() + rounding


def test_transforms_and_second_derivatives():
    scale = random_bias(1.0).row_scale.double()
    x = torch.randn(4, 2, H, 7, D, dtype=torch.float64)
    parameters = dict(scale.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(scale, parameters, (x,))[0].square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(
            scaled_and_factor(sample, *scale.parameters())[0].square().sum(), scale.parameters()
        )
        torch.testing.assert_close(tuple(mapped[name][i] for name in parameters), expected)
    second = []
    for total in (loss(parameters, x[0]), scaled_and_factor(x[0], *scale.parameters())[0].square().sum()):
        (first,) = torch.autograd.grad(total, scale.gain, create_graph=True)
        second.append(torch.autograd.grad(first.sum(), list(scale.parameters())))
    torch.testing.assert_close(*second)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_trace_of_the_scale_can_be_saved(tmp_path):
    scale, x = random_bias(1.0).row_scale, torch.randn(2, H, 7, D)
    torch.jit.save(torch.jit.trace(scale, x), str(tmp_path / "scale.pt"))
    again = torch.jit.load(str(tmp_path / "scale.pt"))
    x = torch.randn(3, H, 7, D)
    torch.testing.assert_close(again(x), scale(x))


def test_weights_of_multihead_attention_give_its_output():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(H * D, H, batch_first=True)
    replace(layer)
    layer.sigmoid_bias = random_bias(1.0)
    x = torch.randn(2, 7, H * D)
    out, weights = layer(x, x, x, average_attn_weights=False)
    value = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[2]
    heads = weights @ value.unflatten(-1, (H, D)).transpose(1, 2)
    torch.testing.assert_close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))


def test_autocast():
    """Bias and scale are computed in float32 under autocast, too."""
    bias = random_bias()
    query, output = torch.randn(2, 1, H, 5, D).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        given = bias.query_term(query), *bias.row_scale(output)
    for value, expected in zip(given, (bias.query_term(query), *bias.row_scale(output)), strict=True):
        assert torch.equal(value, expected)
