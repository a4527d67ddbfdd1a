"""RoPE and attention layers against independent formulas."""

import math

import pytest
import torch

from sigattn.nn.attention import Attention
from sigattn.nn.bias import (
    AlibiKeysBias,
    AttentionBias,
    BatchLengthBias,
    ConstantBias,
    ContextLengthBias,
    LearnableBias,
    NoBias,
    SampleLengthBias,
    VisibleKeysBias,
)
from sigattn.nn.block import Block
from sigattn.nn.feedforward import MLP, SwiGLU
from sigattn.nn.position import Alibi, LearnableEmbedding, RotaryEmbedding, SinusoidalEmbedding, alibi_slopes
from sigattn.nn.residual_branch import DropPath
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
    layer = Attention(12, 3, activation=activation, attention_bias=bias, position=RotaryEmbedding(4)).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    projected = torch.cat([layer.query(x), layer.key(x), layer.value(x)], -1)
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in projected.chunk(3, -1))
    q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() for t in (q, k))
    q, k = layer.position(q), layer.position(k)
    if activation == "sigmoid":
        out = formula(q, k, v, causal=True, bias=-2.0)
    else:
        logits = (q @ k.mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
        out = logits.softmax(-1) @ v
    # float32 inside RoPE and the norms' parameters bound the agreement
    torch.testing.assert_close(layer(x), layer.output(out.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-6)
    layer.record = "norm"
    layer(x)
    torch.testing.assert_close(layer.output_frobenius_norm.double(), out.flatten(1).norm(dim=-1), rtol=1e-5, atol=1e-6)


def test_attention_does_not_look_ahead():
    block = Block(Attention(16, 2, activation="sigmoid", attention_bias=-1.0), SwiGLU(16, 32), 16)
    x = torch.randn(1, 9, 16)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(block(x)[:, :5], block(changed)[:, :5])
    assert not torch.allclose(block(x)[:, 5:], block(changed)[:, 5:])


def test_swiglu():
    layer = SwiGLU(5, 7)
    x = torch.randn(3, 5)
    gate, value = x @ layer.gate.weight.T, x @ layer.value.weight.T
    expected = (gate * torch.sigmoid(gate) * value) @ layer.output.weight.T
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "sigmoid", "attention_bias": None}, "needs a bias"),
        ({"activation": "softmax", "attention_bias": -1.0}, "is normalised and takes only"),
        ({"activation": "performer", "attention_bias": None, "length_power": 1.0}, "is normalised and takes only"),
        ({"activation": "performer", "attention_bias": None, "window": (3, 0)}, "has no explicit weights"),
        ({"activation": "performer", "attention_bias": None, "position": Alibi(2)}, "has no explicit weights"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        Attention(8, 2, **options)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (RotaryEmbedding(8), r"RotaryEmbedding\(4\), got RotaryEmbedding\(8"),
        (Alibi(4), r"Alibi\(2\), got Alibi\(num_heads=4"),
    ],
)
def test_positions_must_be_of_these_heads(position, message):
    with pytest.raises(ValueError, match=message):
        Attention(8, 2, activation="softmax", attention_bias=None, position=position)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="embed_dim=10, num_heads=4"):
        Attention(10, 4, activation="softmax", attention_bias=None)
    with pytest.raises(ValueError, match="heads=4, num_kv_heads=3"):
        Attention(8, 4, activation="softmax", attention_bias=None, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"AlibiKeysBias counts keys by ALiBi's weights and needs position=Alibi\(4\)"):
        Attention(8, 4, activation="sigmoid", attention_bias=AlibiKeysBias())


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("sides", [None, "causal", "split"])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_both_activations_see_the_same_keys_at_the_same_positions(activation, causal, kv_heads, sides, window):
    """Windows, padding, ALiBi and shared key heads, against the formulas written out."""
    alibi = None if sides is None else Alibi(4, sides)
    layer = Attention(
        16,
        4,
        activation=activation,
        attention_bias=-1.0 if activation == "sigmoid" else None,
        num_kv_heads=kv_heads,
        qk_norm="none",
        position=alibi,
        causal=causal,
        window=window,
    ).double()
    x, lengths = torch.randn(2, 6, 16, dtype=torch.float64), torch.tensor([6, 4])
    q = layer.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (t.unflatten(-1, (kv_heads, 4)).transpose(1, 2) for t in (layer.key(x), layer.value(x)))
    options = {"causal": causal, "window": window, "lengths": lengths}
    slopes = None if alibi is None else alibi().double()
    if activation == "sigmoid":
        out = formula(q, k, v, bias=-1.0, slopes=slopes, **options)
    else:  # e^s / Σ e^s, of the same logits and the same visible keys
        seen = formula(q, k, v, bias=50.0, weights=True, **options) > 0.5
        logits = torch.logit(
            formula(q / 50, k, v, bias=0.0, slopes=None if slopes is None else slopes / 50, weights=True)
        )
        out = (50 * logits).masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(4 // kv_heads, 1)
    torch.testing.assert_close(layer(x, key_lengths=lengths), layer.output(out.transpose(1, 2).flatten(2)))


def test_cross_attention():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=BatchLengthBias(), causal=False, kv_embed_dim=5)
    x, source = torch.randn(2, 3, 8), torch.randn(2, 7, 5)
    q = layer.query_norm(layer.query(x).unflatten(-1, (2, 4)).transpose(1, 2))
    k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (layer.key(source), layer.value(source)))
    out = formula(q, layer.key_norm(k), v, bias=-math.log(7)).float()
    torch.testing.assert_close(layer(x, source), layer.output(out.transpose(1, 2).flatten(2)))


def test_causal_by_default_in_self_attention_only():
    options = {"activation": "sigmoid", "attention_bias": -1.0}
    x, source = torch.randn(2, 3, 8), torch.randn(2, 7, 8)
    assert Attention(8, 2, **options).causal
    assert not Attention(8, 2, **options, kv_embed_dim=8).causal
    with pytest.raises(ValueError, match="with kv_input choose causal"):
        Attention(8, 2, **options)(x, source)
    assert Attention(8, 2, **options, causal=True)(x, source).shape == x.shape


@pytest.mark.parametrize(
    ("x", "source", "message"),
    [
        (torch.zeros(2, 3, 9), torch.zeros(2, 3, 5), r"x must be \(batch, length, 8\), got \(2, 3, 9\)"),
        (torch.zeros(3, 8), None, r"x must be .*, got \(3, 8\)"),
        (torch.zeros(2, 3, 8), None, r"kv_input must be \(batch, length, 5\), got \(2, 3, 8\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_inputs_of_another_shape(x, source, message):
    layer = Attention(8, 2, activation="sigmoid", attention_bias=-1.0, kv_embed_dim=5)
    with pytest.raises(ValueError, match=message):
        layer(x, source)


def test_dropout_only_while_training():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=-1.0, dropout=0.5)
    x = torch.randn(1, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


class TestBias:
    OPTIONS = {"device": torch.device("cpu")}  # noqa: RUF012

    def test_values(self):
        lengths = torch.tensor([7, 0])
        assert NoBias()(5, 7, **self.OPTIONS) == 0
        assert ConstantBias(-3.0)(5, 7, **self.OPTIONS) == -3
        assert ContextLengthBias(64)(5, 7, **self.OPTIONS) == -math.log(64)
        assert BatchLengthBias()(5, 7, **self.OPTIONS) == -math.log(7)
        assert BatchLengthBias()(5, 0, **self.OPTIONS) == 0
        by_sample = SampleLengthBias()(5, 7, key_lengths=lengths, **self.OPTIONS)
        torch.testing.assert_close(by_sample.flatten(), torch.tensor([-math.log(7), 0.0]))
        visible = torch.tensor([5.0, 6.0, 7.0])
        torch.testing.assert_close(VisibleKeysBias()(3, 9, visible=visible, **self.OPTIONS), -visible.log())

    def test_sample_lengths_are_needed(self):
        with pytest.raises(ValueError, match="pass key_lengths"):
            SampleLengthBias()(5, 7, **self.OPTIONS)

    @pytest.mark.parametrize("heads", [None, 2])
    def test_a_learnable_bias_learns(self, heads):
        layer = Attention(8, 2, activation="sigmoid", attention_bias=LearnableBias(-1.0, heads))
        layer(torch.randn(1, 5, 8)).sum().backward()
        assert layer.attention_bias.value.grad.abs().min() > 0
        assert layer.attention_bias.value.grad.shape == ((1,) if heads is None else (2, 1, 1))

    def test_the_base_is_no_bias(self):
        with pytest.raises(TypeError, match="is abstract"):
            AttentionBias()(5, 7, **self.OPTIONS)


class TestPositions:
    def test_alibi_slopes_are_the_paper_s(self):
        assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
        twelve = alibi_slopes(12).tolist()  # the eight of 8 heads, then every other one of 16
        assert twelve[:8] == [2.0**-i for i in range(1, 9)]
        assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
        with pytest.raises(ValueError, match="heads must be at least 1"):
            alibi_slopes(0)

    def test_split_sides(self):
        before, after = Alibi(4, "split", steepness=4.0)().unbind(-1)
        assert (after[0, ::2] == 4 * before[0, ::2]).all()
        assert (before[0, 1::2] == 4 * after[0, 1::2]).all()
        for sides, heads in (("both", 2), ("split", 1)):
            with pytest.raises(ValueError, match="Alibi"):
                Alibi(heads, sides)

    def test_sinusoidal(self):
        x = torch.zeros(1, 3, 4)
        expected = [
            [math.sin(p / 10**k) if c == 0 else math.cos(p / 10**k) for k in (0, 1) for c in (0, 1)] for p in (2, 3, 4)
        ]
        torch.testing.assert_close(SinusoidalEmbedding(4, base=100.0)(x, 2)[0], torch.tensor(expected))
        with pytest.raises(ValueError, match="even"):
            SinusoidalEmbedding(3)

    def test_learnable(self):
        layer = LearnableEmbedding(5, 4)
        torch.testing.assert_close(layer(torch.zeros(2, 3, 4), 2), layer.weight[2:].expand(2, 3, 4))
        with pytest.raises(ValueError, match="5 positions, and the input ends at 6"):
            layer(torch.zeros(1, 4, 4), 2)


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
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            DropPath(1.0)


def test_mlp():
    layer = MLP(5, 7)
    x = torch.randn(3, 5)
    hidden = x @ layer.input.weight.T + layer.input.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(layer(x), hidden @ layer.output.weight.T + layer.output.bias)
