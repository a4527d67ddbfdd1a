"""Performer's random features: an estimate of softmax."""

import math

import pytest
import torch
from torch.nn import functional as F

from sigattn.nn.attention import Attention
from sigattn.nn.performer import CHUNK, PerformerFeatures


def test_it_approaches_softmax():
    """The estimate is unbiased: its error falls as the root of the number of features."""
    q, k, v = (torch.randn(1, 2, 30, 8) * scale for scale in (0.4, 0.4, 1))
    truth = F.scaled_dot_product_attention(q, k, v)
    errors = [
        torch.stack([(PerformerFeatures(8, m)(q, k, v, causal=False) - truth).norm() for _ in range(8)]).mean()
        for m in (16, 256, 4096)
    ]
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.6 * errors[1]
    assert errors[2] < 0.1 * truth.norm()


def test_no_direction_is_preferred():
    torch.manual_seed(0)
    w, x = PerformerFeatures(2, 1000).directions, 0.5 * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    estimate = (2 * x @ w.T - x.square().sum(-1, keepdim=True)).exp().mean(-1)  # of e^(x·x)
    torch.testing.assert_close(estimate, torch.full((4,), math.exp(0.25)), rtol=0.2, atol=0)


def test_directions_are_orthogonal():
    w = PerformerFeatures(8, 16).directions
    for block in w.split(8):
        directions = F.normalize(block, dim=-1)
        torch.testing.assert_close(directions @ directions.T, torch.eye(8), atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [5, CHUNK + 3])
@pytest.mark.parametrize("spread", [1, 12], ids=["alike", "far apart"])
def test_causal_is_the_weights_cut_off(length, spread):
    torch.manual_seed(0)
    layer = PerformerFeatures(4, 12)
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64) for _ in range(3))
    k[:, :, :3] *= spread  # φ of the first keys is as small as e^(-300)

    def phi(x):
        x = x * 4**-0.25
        return (x @ layer.directions.double().T - x.square().sum(-1, keepdim=True) / 2).exp()

    weights = (phi(q) @ phi(k).mT).tril()
    expected = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(layer(q, k, v, causal=True), expected)
    narrow = layer(q.float(), k.float(), v.float(), causal=True)
    torch.testing.assert_close(narrow.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(narrow[:, :, 0].double(), v[:, :, 0])  # one visible key


def test_padding_shared_heads_and_large_inputs():
    layer = PerformerFeatures(4, 12)
    q, k, v = torch.randn(2, 4, 6, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
    lengths = torch.tensor([6, 4])
    out = layer(q, k, v, causal=False, key_lengths=lengths)
    alone = layer(q[1:, 2:3], k[1:, 1:, :4], v[1:, 1:, :4], causal=False)
    torch.testing.assert_close(out[1:, 2:3], alone)
    k[1, :, 4:], v[1, :, 4:] = 1e4, torch.nan
    torch.testing.assert_close(layer(q, k, v, causal=False, key_lengths=lengths), out)
    assert layer(100 * q, 100 * k, v.nan_to_num(), causal=False).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_as_a_layer(causal):
    layer = Attention(8, 2, activation="performer", attention_bias=None, causal=causal)
    layer(torch.randn(2, 5, 8)).sum().backward()
    assert layer.query.weight.grad.abs().sum() > 0
    assert layer(torch.randn(0, 5, 8)).shape == (0, 5, 8)
    assert layer.state_dict()["performer.directions"].shape == (7, 4)  # ⌈4 log 5⌉
