"""Biases by themselves: their values, names in configurations, and what they start from and learn."""

import math

import pytest
import torch

from sigattn.nn import (
    Alibi,
    Attention,
    BatchLengthBias,
    ConstantBias,
    ContextLengthBias,
    QuadraticBias,
    QueryBias,
    SampleLengthBias,
    VisibleKeysBias,
    VisibleKeysLinearBias,
    make_bias,
)

CPU = {"device": torch.device("cpu")}
H, E = 4, 16


def test_values():
    for bias, expected in ((ConstantBias(-3.0), -3), (ContextLengthBias(64), -math.log(64))):
        assert bias(5, 7, **CPU) == expected
    assert [BatchLengthBias()(5, keys, **CPU) for keys in (7, 0)] == [-math.log(7), 0]
    by_sample = SampleLengthBias()(5, 7, key_lengths=torch.tensor([7, 0]), **CPU)
    torch.testing.assert_close(by_sample.flatten(), torch.tensor([-math.log(7), 0.0]))
    visible = torch.tensor([5.0, 6.0, 7.0])
    torch.testing.assert_close(VisibleKeysBias()(3, 9, visible=visible, **CPU), -visible.log())


@pytest.mark.parametrize(
    ("rule", "learn", "kind"),
    [
        ("log_visible", "head", VisibleKeysLinearBias),
        ("log_alibi", "head", VisibleKeysLinearBias),
        ("log_alibi", "quadratic", QuadraticBias),
    ],
)
def test_learned_forms_start_as_their_rule_and_learn(rule, learn, kind):
    bias = make_bias(rule, learn=learn, num_heads=H, head_dim=E // H)
    assert isinstance(bias, kind)
    layer = Attention(E, H, activation="sigmoid", attention_bias=bias, position=Alibi(H))
    start = make_bias(rule, num_heads=H)
    reference = Attention(E, H, activation="sigmoid", attention_bias=start, position=Alibi(H))
    reference.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 9, E)
    torch.testing.assert_close(layer(x), reference(x))
    layer(x).square().sum().backward()
    assert bias.constant.grad.abs().min() > 0
    assert bias.slope.grad.abs().min() > 0


def test_rules_of_configurations():
    assert make_bias("log_context", max_seq_len=64, num_heads=2).value == -math.log(64)
    for rule, kind in (
        ("log_visible", VisibleKeysBias),
        ("log_sample", SampleLengthBias),
        ("log_batch", BatchLengthBias),
    ):
        assert type(make_bias(rule, num_heads=2)) is kind
    assert make_bias(-10.0, learn="head", num_heads=2).value.shape == (2, 1, 1)
    query = make_bias(-5.0, learn="query", num_heads=2)
    assert (type(query), query.initial) == (QueryBias, -5)
