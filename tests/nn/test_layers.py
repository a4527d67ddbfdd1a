"""Positions, feed-forward layers and blocks against independent formulas."""

import math

import pytest
import torch

from sigattn.nn.attention import Attention
from sigattn.nn.block import Block
from sigattn.nn.feedforward import MLP, SwiGLU
from sigattn.nn.position import Alibi, LearnableEmbedding, RotaryEmbedding, SinusoidalEmbedding, alibi_slopes
from sigattn.nn.residual_branch import DropPath


class TestRotaryEmbedding:
    def test_it_is_a_rotation_by_position_times_frequency(self):
        x = torch.randn(1, 1, 5, 6)
        turned = RotaryEmbedding(6, base=100.0)(x)
        as_complex = torch.complex(x[..., :3], x[..., 3:])
        angles = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(3) / 3)
        expected = as_complex * torch.polar(torch.ones(5, 3), angles)
        torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


def test_swiglu():
    layer = SwiGLU(5, 7)
    x = torch.randn(3, 5)
    gate, value = x @ layer.gate.weight.T, x @ layer.value.weight.T
    expected = (gate * torch.sigmoid(gate) * value) @ layer.output.weight.T
    torch.testing.assert_close(layer(x), expected)


class TestPositions:
    def test_alibi_slopes_are_the_paper_s(self):
        assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
        twelve = alibi_slopes(12).tolist()  # the eight of 8 heads, then every other one of 16
        assert twelve[:8] == [2.0**-i for i in range(1, 9)]
        assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])

    def test_split_sides(self):
        before, after = Alibi(4, "split", steepness=4.0)().unbind(-1)
        assert (after[0, ::2] == 4 * before[0, ::2]).all()
        assert (before[0, 1::2] == 4 * after[0, 1::2]).all()

    def test_sinusoidal(self):
        x = torch.zeros(1, 3, 4)
        expected = [
            [math.sin(p / 10**k) if c == 0 else math.cos(p / 10**k) for k in (0, 1) for c in (0, 1)] for p in (2, 3, 4)
        ]
        torch.testing.assert_close(SinusoidalEmbedding(4, base=100.0)(x, 2)[0], torch.tensor(expected))

    def test_learnable(self):
        layer = LearnableEmbedding(5, 4)
        torch.testing.assert_close(layer(torch.zeros(2, 3, 4), 2), layer.weight[2:].expand(2, 3, 4))


class TestBlock:
    @pytest.mark.parametrize("structure", ["pre", "hybrid", "post"])
    def test_structures_are_what_the_paper_says(self, structure):
        attention = Attention(8, 2, activation="softmax", attention_bias=None)
        block = Block(attention, SwiGLU(8, 16), 8, norm_placement=structure, init_values=0.5)
        x = torch.randn(2, 5, 8)

        def plain(t):
            return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()

        if structure == "post":
            y = plain(x + 0.5 * attention(x))
            expected = plain(y + 0.5 * block.feed_forward(y))
        else:
            last = plain if structure == "hybrid" else lambda t: t
            y = x + 0.5 * last(attention(plain(x)))
            expected = y + 0.5 * last(block.feed_forward(plain(y)))
        torch.testing.assert_close(block(x), expected)

    def test_hybrid_norms_have_no_parameters(self):
        def count(**options):
            block = Block(Attention(8, 2, activation="softmax", attention_bias=None), SwiGLU(8, 16), 8, **options)
            return sum(p.numel() for p in block.parameters())

        assert count(norm_placement="hybrid") == count()

    def test_post_norm_with_a_sigmoid_is_warned_of(self):
        with pytest.warns(UserWarning, match="App. ASR"):
            Block(Attention(8, 2, activation="sigmoid", attention_bias=0.0), SwiGLU(8, 16), 8, norm_placement="post")

    def test_stochastic_depth(self):
        layer = DropPath(0.25)
        out = layer(torch.ones(4000, 2, 3))
        dropped = (out == 0).all((1, 2))
        assert 0.2 < dropped.double().mean() < 0.3
        assert (out[~dropped] == 1 / 0.75).all()
        layer.eval()
        assert (layer(torch.ones(5, 2)) == 1).all()


def test_mlp():
    layer = MLP(5, 7)
    x = torch.randn(3, 5)
    hidden = x @ layer.input.weight.T + layer.input.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(layer(x), hidden @ layer.output.weight.T + layer.output.bias)
