"""Refinement of a conversion: the gradient of the error of a layer's output in float64, and what it must not change."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn.conversion import convert, refinement
from sigattn.conversion.refinement import squared_error
from sigattn.nn import SigmoidMultiheadAttention
from sigattn.nn.fitted_bias import QuadraticBias
from sigattn.nn.observer import AttentionCall
from sigattn.ops.problem import Problem
from tests.conversion.test_convert import loss, model_and_batches
from tests.conversion.test_families import Attend, X

RATE = refinement._LEARNING_RATE


def test_errors_are_lower():
    model, batches = model_and_batches()
    plain, refined = (copy.deepcopy(model) for _ in range(2))
    before = convert(plain, batches, loss=loss, refine_steps=0)
    after = convert(refined, batches, loss=loss)
    for one, other in zip(before.layers, after.layers, strict=True):
        assert other.error < 0.97 * one.error


def test_a_step_follows_the_gradient():
    """The first step of Adam is the rate times the gradient's sign; by central differences of the float64 formula."""
    torch.manual_seed(0)
    model = Attend()
    model.q.weight.data *= 4
    plain, stepped = copy.deepcopy(model), copy.deepcopy(model)
    convert(plain, list(X[:2]), refine_steps=0)
    convert(stepped, list(X[:2]), refine_steps=1)
    q, k, v = (t.detach().double() for t in model.heads(X[0], X[0]))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    exact = F.scaled_dot_product_attention(q, k, v)
    visible = torch.full((7, 1), 7)

    def error(bias):
        b = bias(7, 7, visible=visible, query=q)
        out = bias.scaled((q @ k.mT / 2 + b).sigmoid() @ v)
        return ((out - exact).square().sum() / exact.square().sum()).item()

    start, moved = plain.sigmoid_bias, stepped.sigmoid_bias
    probe = copy.deepcopy(start).double()
    for p, before, after in zip(probe.parameters(), start.parameters(), moved.parameters(), strict=True):
        if not before.any():
            assert torch.equal(before, after)
            continue
        for i in range(min(4, p.numel())):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    p.view(-1)[i] += sign * 1e-5
                    values.append(error(probe))
                    p.view(-1)[i] -= sign * 1e-5
            slope = (values[0] - values[1]) / 2e-5
            if abs(slope) > 1e-5:
                step = (after.view(-1)[i] - before.view(-1)[i]).item()
                assert step == pytest.approx(-RATE if slope > 0 else RATE, rel=0.05)


def test_a_layer_that_gets_worse_keeps_the_fit(monkeypatch):
    model, batches = model_and_batches()
    plain, refined = (copy.deepcopy(model) for _ in range(2))
    convert(plain, batches, loss=loss, refine_steps=0)
    monkeypatch.setattr(refinement, "_LEARNING_RATE", 1e3)
    convert(refined, batches, loss=loss, refine_steps=2)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), refined.parameters(), strict=True))


@pytest.mark.usefixtures("without_query_term")
def test_terms_that_are_not_used_stay_zero():
    model, batches = model_and_batches()
    convert(model, batches, loss=loss, refine_steps=4)
    for block in model.blocks:
        term = block.attention.attention_bias.query_term
        assert not term.linear.any()
        assert not term.curvature.any()


def test_the_model_s_own_parameters_are_untouched():
    """Also where the layer's result is that of its output projection, through which the gradient passes."""
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    convert(model, [(x, x, x) for x in X], refine_steps=4)
    assert type(model) is SigmoidMultiheadAttention
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)


def test_rows_of_padding_do_not_count():
    """Not even if they are NaN."""
    exact, found = torch.randn(2, 2, 3, 5, 4).unbind()
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    for t in (exact, found):
        t.masked_fill_(padding[:, None, :, None], torch.nan)
    query = torch.randn(2, 3, 5, 4)
    problem = Problem(query, query, query, key_lengths=torch.tensor([5, 3]))
    call = AttentionCall("layer", problem, lambda: exact, lambda bias: (found, "weights"))
    missed, square = squared_error(call, QuadraticBias(3, 4, 4), exact)
    rows = [t.double().transpose(1, 2)[~padding] for t in (exact, found)]
    assert missed.item() == pytest.approx((rows[1] - rows[0]).square().sum().item())
    assert square.item() == pytest.approx(rows[0].square().sum().item())


def test_a_negative_number_of_steps():
    with pytest.raises(ValueError, match="convert: refine_steps must not be negative, got -1"):
        convert(Attend(), list(X), refine_steps=-1)
