"""Performer's random features: an estimate of softmax."""

import math

import pytest
import torch
from torch.nn import functional as F

from sigattn.nn.attention import Attention
from sigattn.nn.performer import PerformerFeatures


def test_it_approaches_softmax():
    """The estimate is unbiased: its error falls as the root of the number of features."""
    q, k, v = (torch.randn(1, 2, 30, 8) * scale for scale in (0.4, 0.4, 1))
    truth = F.scaled_dot_product_attention(q, k, v)
    errors = [
        torch.stack([(PerformerFeatures(8, m)(q, k, v) - truth).norm() for _ in range(8)]).mean() for m in (16, 256)
    ]
    assert errors[1] < 0.4 * errors[0]
    assert errors[1] < 0.3 * truth.norm()


def test_no_direction_is_preferred_and_those_of_a_block_are_orthogonal():
    w, x = PerformerFeatures(2, 1000).directions, 0.5 * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    estimate = (2 * x @ w.T - x.square().sum(-1, keepdim=True)).exp().mean(-1)  # of e^(x·x)
    torch.testing.assert_close(estimate, torch.full((4,), math.exp(0.25)), rtol=0.2, atol=0)
    for block in PerformerFeatures(8, 16).directions.split(8):
        directions = F.normalize(block, dim=-1)
        torch.testing.assert_close(directions @ directions.T, torch.eye(8), atol=1e-5, rtol=0)


def test_padding_shared_heads_and_large_inputs():
    layer = PerformerFeatures(4, 12)
    q, k, v = torch.randn(2, 4, 6, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
    lengths = torch.tensor([6, 4])
    out = layer(q, k, v, lengths)
    torch.testing.assert_close(out[1:, 2:3], layer(q[1:, 2:3], k[1:, 1:, :4], v[1:, 1:, :4]))
    k[1, :, 4:], v[1, :, 4:] = 1e4, torch.nan
    torch.testing.assert_close(layer(q, k, v, lengths), out)
    assert layer(100 * q, 100 * k, v.nan_to_num()).isfinite().all()
    assert layer(q, k, v, torch.tensor([0, 4]))[0].eq(0).all()


def test_as_a_layer():
    layer = Attention(8, 2, activation="performer", attention_bias=None, causal=False)
    layer(torch.randn(2, 5, 8)).sum().backward()
    assert layer.query.weight.grad.abs().sum() > 0
    assert layer(torch.randn(0, 5, 8)).shape == (0, 5, 8)
    assert layer.state_dict()["performer.directions"].shape == (7, 4)  # ⌈4 log 5⌉
    with pytest.raises(ValueError, match="needs causal=False"):
        Attention(8, 2, activation="performer", attention_bias=None)
