"""RoPE and attention layers against independent formulas."""

import pytest
import torch

from sigattn.nn.attention import Attention
from sigattn.nn.block import Block
from sigattn.nn.feedforward import SwiGLU
from sigattn.nn.position import RotaryEmbedding
from tests.ops.truth import formula


class TestRotaryEmbedding:
    def test_it_is_a_rotation_by_position_times_frequency(self):
        x = torch.randn(1, 1, 5, 6)
        turned = RotaryEmbedding(6, base=100.0)(x)
        as_complex = torch.complex(x[..., :3], x[..., 3:])
        angles = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(3) / 3)
        expected = as_complex * torch.polar(torch.ones(5, 3), angles)
        torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))

    def test_products_depend_on_the_distance_alone(self):
        rotary = RotaryEmbedding(8)
        q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
        at = [(rotary(q, i) * rotary(k, i + 3)).sum() for i in (0, 1, 50)]
        torch.testing.assert_close(at[1], at[0])
        torch.testing.assert_close(at[2], at[0], atol=1e-4, rtol=1e-4)
        assert not torch.isclose((rotary(q, 0) * rotary(k, 4)).sum(), at[0])

    def test_odd_head_dim(self):
        with pytest.raises(ValueError, match="even, got 7"):
            RotaryEmbedding(7)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_attention_is_the_formula_between_two_projections(activation):
    bias = -2.0 if activation == "sigmoid" else None
    layer = Attention(12, 3, activation=activation, bias=bias).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() for t in (q, k))
    q, k = layer.rotary(q), layer.rotary(k)
    if activation == "sigmoid":
        out = formula(q, k, v, causal=True, bias=-2.0)
    else:
        logits = (q @ k.mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
        out = logits.softmax(-1) @ v
    # float32 inside RoPE and the norms' parameters bound the agreement
    torch.testing.assert_close(layer(x), layer.output(out.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-6)
    layer.watch = True
    layer(x)
    torch.testing.assert_close(layer.output_norm.double(), out.flatten(1).norm(dim=-1).mean(), rtol=1e-5, atol=1e-6)


def test_attention_does_not_look_ahead():
    block = Block(16, 2, 32, activation="sigmoid", bias=-1.0)
    x = torch.randn(1, 9, 16)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(block(x)[:, :5], block(changed)[:, :5])
    assert not torch.allclose(block(x)[:, 5:], block(changed)[:, 5:])


def test_swiglu():
    layer = SwiGLU(5, 7)
    x = torch.randn(3, 5)
    gate, value = (x @ layer.gate_and_value.weight.T).chunk(2, -1)
    expected = (gate * torch.sigmoid(gate) * value) @ layer.output.weight.T
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("activation", "bias"), [("sigmoid", None), ("softmax", -1.0)])
def test_a_bias_belongs_to_the_sigmoid(activation, bias):
    with pytest.raises(ValueError, match="a sigmoid needs a bias"):
        Attention(8, 2, activation=activation, bias=bias)


def test_width_is_a_multiple_of_heads():
    with pytest.raises(ValueError, match="width=10, heads=4"):
        Attention(10, 4, activation="softmax", bias=None)
