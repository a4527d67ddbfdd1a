"""Output scale of converted layers: the formula in float64, the fit on exact data, and its choice on held-out rows."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn.conversion.fit import MARGIN
from sigattn.conversion.output_scale import OutputScaleFit
from sigattn.conversion.row_statistics import row_outputs
from sigattn.nn import QuadraticBias
from sigattn.nn.fitted_bias import EPS
from sigattn.ops.problem import Problem, make_problem
from tests.conversion.replacing import replace

H, D = 3, 5


def random_bias():
    bias = QuadraticBias(H, D, D)
    with torch.no_grad():
        for p in bias.row_scale.parameters():
            p.normal_()
    return bias


def formula(bias, output):
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


def test_the_formula():
    bias, output = random_bias(), torch.randn(2, H, 7, D)
    torch.testing.assert_close(bias.output_scale(output).double(), formula(bias, output), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        bias.scaled(output.bfloat16()).float(), output * formula(bias, output).float(), rtol=0.03, atol=0.01
    )
    zero = torch.zeros(1, H, 1, D, requires_grad=True)  # a row without visible keys
    bias.scaled(zero).sum().backward()
    assert bias.scaled(zero).eq(0).all()
    assert zero.grad.isfinite().all()


def written_out(output, gain, power, direction):
    norm = output.norm(dim=-1, keepdim=True) + EPS
    exponent = gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log()
    factor = (exponent + (output / norm * direction.view(len(gain), 1, -1)).sum(-1, keepdim=True)).clamp(-5, 5).exp()
    return output * factor, factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["heads first", "heads inside"])
def test_gradients(dtype, layout, unchecked):
    """The backward pass against autograd's of the formula in float64, with a limited row and one of zeros."""
    torch.compiler.reset()
    torch.manual_seed(0)
    scale = random_bias().row_scale.to(dtype)
    output = torch.randn(2, H, 7, D) if layout == "heads first" else torch.randn(2, 7, H, D).transpose(1, 2)
    output[0, 0, :2] *= torch.tensor([1e9, 0.0])[:, None]
    output = output.to(dtype).requires_grad_()
    inputs = [output, *scale.parameters()]
    weights = torch.randn(2, H, 7, D), torch.randn(2, H, 7, 1)
    weights[0][0, 0, 0], weights[1][0, 0, 0] = 1e-9, 1e-9

    def gradients(f, inputs):
        return torch.autograd.grad(sum((y.double() * w).sum() for y, w in zip(f, weights, strict=True)), inputs)

    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truth = written_out(*doubles)
    assert abs(float(truth[1].detach().log()[0, 0, 0])) == pytest.approx(5)
    scaled, factor = scale(output)
    assert (scaled.dtype, factor.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    true, plain = gradients(truth, doubles), gradients(written_out(*inputs), inputs)
    compiled = torch.compile(scale, fullgraph=True, backend="aot_eager")(output)
    for found in (scaled, factor), compiled:
        for got, expected, p in zip(gradients(found, inputs), true, plain, strict=True):
            assert got.dtype is dtype
            rounding = 4 * torch.finfo(dtype).eps * expected.abs().max()
            assert (got - expected).abs().max() <= 2 * (p - expected).nan_to_num().abs().max() + rounding


def test_transforms_and_second_derivatives():
    scale = random_bias().row_scale.double()
    x = torch.randn(4, 2, H, 7, D, dtype=torch.float64)
    parameters = dict(scale.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(scale, parameters, (x,))[0].square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(written_out(sample, *scale.parameters())[0].square().sum(), scale.parameters())
        torch.testing.assert_close(tuple(mapped[name][i] for name in parameters), expected)
    second = []
    for total in (loss(parameters, x[0]), written_out(x[0], *scale.parameters())[0].square().sum()):
        (first,) = torch.autograd.grad(total, scale.gain, create_graph=True)
        second.append(torch.autograd.grad(first.sum(), list(scale.parameters())))
    torch.testing.assert_close(*second)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_trace_can_be_saved(tmp_path):
    scale, x = random_bias().row_scale, torch.randn(2, H, 7, D)
    torch.jit.save(torch.jit.trace(scale, x), str(tmp_path / "scale.pt"))
    again = torch.jit.load(str(tmp_path / "scale.pt"))
    x = torch.randn(3, H, 7, D)
    torch.testing.assert_close(again(x), scale(x))


def test_a_scale_that_is_exactly_of_this_form_is_recovered():
    torch.manual_seed(0)
    truth = random_bias()
    for p in truth.row_scale.parameters():
        p.data *= 0.5
    fit = OutputScaleFit(H, D)
    output = torch.randn(4, 20, H, 50, D, dtype=torch.float64)
    for part in output[:3]:
        counted = torch.ones(20, H, 50, dtype=torch.bool)
        softmax = part * formula(truth, part) * math.exp(MARGIN)
        softmax[:, :, 40:], counted[:, :, 40:] = 1e6, False  # rows of padding
        fit.update(part, softmax, counted)
    with torch.no_grad():
        found = fit.solve(QuadraticBias(H, D, D), D + 2)
    ratio = found.output_scale(output[3]).double() / formula(truth, output[3]) / math.exp(MARGIN)
    assert ratio.log().abs().mean() < 0.015  # ridge 1e-3, and targets limited to a factor of 10
    with torch.no_grad():
        assert fit.solve(truth, 0).output_scale(output[3]).eq(torch.tensor(MARGIN).double().exp()).all()


def test_directions_that_values_do_not_take():
    """A feature of the values that is rounding gets no coefficient that training could turn into a large scale."""
    torch.manual_seed(0)
    output = torch.randn(4, H, 50, D) * torch.tensor([1] * (D - 1) + [1e-7])
    fit, counted = OutputScaleFit(H, D), torch.ones(4, H, 50, dtype=torch.bool)
    fit.update(output, output * (torch.randn(4, H, 50, 1) + MARGIN).exp(), counted)
    with torch.no_grad():
        bias = fit.solve(QuadraticBias(H, D, D), D + 2)
        ratio = bias.output_scale(output + 0.01) / bias.output_scale(output)
    assert ratio.log().abs().max() < 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_in_blocks_of_rows(causal, monkeypatch):
    monkeypatch.setattr("sigattn.ops.reference._BLOCK_BYTES", 4000)
    q, k, v = torch.randn(2, 4, 9, D), torch.randn(2, 2, 9, D), torch.randn(2, 2, 9, D + 1)
    biases = torch.randn(2, 2, 4, 9).unbind()
    problem = make_problem(Problem, q, k, v, is_causal=causal)
    outputs, softmax = row_outputs(problem, biases)
    torch.testing.assert_close(softmax, F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))
    for output, b in zip(outputs, biases, strict=True):
        logits = q.double() @ k.double().repeat_interleave(2, 1).mT / D**0.5 + b.double().unsqueeze(-1)
        weights = logits.sigmoid().tril() if causal else logits.sigmoid()
        torch.testing.assert_close(output.double(), weights @ v.double().repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


def test_weights_of_multihead_attention_give_its_output():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(H * D, H, batch_first=True)
    replace(layer)
    layer.sigmoid_bias = random_bias()
    x = torch.randn(2, 7, H * D)
    out, weights = layer(x, x, x, average_attn_weights=False)
    value = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[2]
    heads = weights @ value.unflatten(-1, (H, D)).transpose(1, 2)
    torch.testing.assert_close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))
