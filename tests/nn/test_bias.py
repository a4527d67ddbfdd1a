"""Biases by themselves: names in configurations, what they start from and learn."""

import math

import pytest
import torch

from sigattn import nn

H = 4


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


@pytest.mark.parametrize("rule", ["log_visible", "log_context"])
@pytest.mark.parametrize("normalize", [False, True])
def test_learned_forms_start_as_their_rule_and_learn(rule, normalize):
    bias = nn.make_bias(rule, learn="head", max_seq_len=64, num_heads=H, normalize=normalize)
    layer, reference = (
        nn.Attention(16, H, activation="sigmoid", attention_bias=b, position=nn.Alibi(H), normalize=normalize)
        for b in (bias, nn.make_bias(rule, max_seq_len=64, num_heads=H))
    )
    reference.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(layer(x), reference(x))
    layer(x).square().sum().backward()
    assert min(p.grad.abs().min() for p in bias.parameters()) > 0
