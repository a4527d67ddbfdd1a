"""Every option of Attention against formulas written out in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from sigattn.nn.attention import Attention
from sigattn.nn.bias import AlibiKeysBias, QueryBias, SampleLengthBias, VisibleKeysBias
from sigattn.nn.bias_rules import make_bias
from sigattn.nn.functional import ELEMENTWISE
from sigattn.nn.kv_cache import KVCache
from sigattn.nn.performer import CHUNK, PerformerFeatures
from sigattn.nn.position import Alibi, RotaryEmbedding
from sigattn.ops.statistics import attention_statistics

ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda s: s.softmax(-1),
    "relu": torch.relu,
    "relu2": lambda s: torch.relu(s) ** 2,
    "gelu": lambda s: s * 0.5 * (1 + torch.erf(s / 2**0.5)),
    "tanh": torch.tanh,
    "identity": lambda s: s,
}


def heads_of(layer, x):
    """Q, K and V before norms."""
    q = layer.query(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    k, v = (t.unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2) for t in (layer.key(x), layer.value(x)))
    return q, k, v


def finish(layer, out):
    return layer.output(out.transpose(1, 2).flatten(2))


def test_the_formulas_cover_every_activation():
    assert set(ACTIVATIONS) == {*ELEMENTWISE, "softmax"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_activations(activation, causal):
    bias = {"sigmoid": -1.0, "softmax": None}.get(activation, 0.25)
    layer = Attention(
        8, 2, activation=activation, attention_bias=bias, qk_norm="none", causal=causal, use_bias=True
    ).double()
    x, lengths = torch.randn(2, 6, 8, dtype=torch.float64), torch.tensor([6, 4])
    q, k, v = heads_of(layer, x)
    logits = q @ k.mT / 2 + (bias or 0)
    seen = (torch.arange(6) < lengths.view(-1, 1, 1, 1)) & (torch.ones(6, 6).tril().bool() | (not causal))
    hidden = -torch.inf if activation == "softmax" else 0
    weights = ACTIVATIONS[activation](logits.masked_fill(~seen, hidden)).masked_fill(~seen, 0)
    torch.testing.assert_close(layer(x, key_lengths=lengths), finish(layer, weights @ v))


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_temperature(activation):
    """σ(e^t S + b), App. "LayerScale Free Sigmoid Attention"; t learns."""
    bias = -10.0 if activation == "sigmoid" else None
    layer = Attention(
        8, 2, activation=activation, attention_bias=bias, temperature=1.5, qk_norm="layer", causal=False
    ).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = heads_of(layer, x)
    logits = math.exp(1.5) * layer.query_norm(q) @ layer.key_norm(k).mT / 2 + (bias or 0)
    torch.testing.assert_close(layer(x), finish(layer, ACTIVATIONS[activation](logits) @ v))
    layer(x).square().sum().backward()
    assert layer.temperature.grad.abs() > 0
    assert "initial_temperature=1.5" in layer.extra_repr()


def test_a_large_temperature_does_not_overflow_in_float16():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=-10.0, temperature=10.0, causal=False).half()
    assert layer(torch.randn(1, 5, 8, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, (2, 5)), (False, (-1, 1))])
def test_length_power_divides_by_the_keys_each_query_sees(power, causal, window):
    """n^(-α), for causal attention row by row (App. G.1), and with each sample's own n."""
    layer = Attention(
        8, 2, activation="sigmoid", attention_bias=0.0, length_power=power, causal=causal, window=window
    ).double()
    plain = Attention(8, 2, activation="sigmoid", attention_bias=0.0, causal=causal, window=window).double()
    plain.load_state_dict(layer.state_dict())
    plain.output = layer.output = torch.nn.Identity()
    x, lengths = torch.randn(2, 6, 8, dtype=torch.float64), torch.tensor([6, 3])
    i, j = torch.arange(6)[:, None], torch.arange(6)
    left, right = (6 if window is None or side == -1 else side for side in window or (6, 6))
    seen = (j < lengths.view(-1, 1, 1)) & ((j <= i) | (not causal)) & (i - j <= left) & (j - i <= right)
    n = seen.sum(-1, keepdim=True).clamp(min=1)
    out, expected = layer(x, key_lengths=lengths), plain(x, key_lengths=lengths) * n**-power
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)  # n^-α is computed in float32
    assert layer(x[:, :0]).shape == (2, 0, 8)


def test_a_bias_in_q_is_added_after_the_norm():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=QueryBias(-5.0), causal=False).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = heads_of(layer, x)
    logits = (layer.query_norm(q) - 5) @ layer.key_norm(k).mT / 2
    torch.testing.assert_close(layer(x), finish(layer, logits.sigmoid() @ v))
    layer(x).square().sum().backward()
    assert layer.attention_bias.value.grad.abs() > 0


def test_a_bias_in_q_with_rope_is_warned_of():
    with pytest.warns(UserWarning, match="unstable with RoPE"):
        Attention(8, 2, activation="sigmoid", attention_bias=QueryBias(), position=RotaryEmbedding(4))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_output_norm_stands_before_the_projection(kind):
    layer = Attention(8, 2, activation="sigmoid", attention_bias=0.0, output_norm=kind)
    assert not list(layer.output_norm.parameters())
    plain = Attention(8, 2, activation="sigmoid", attention_bias=0.0)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 5, 8)
    plain.output = torch.nn.Identity()
    out = plain(x)
    normed = F.rms_norm(out, (8,), eps=1e-5) if kind == "rms" else F.layer_norm(out, (8,), eps=1e-6)
    torch.testing.assert_close(layer(x), layer.output(normed))


class TestPerformer:
    def test_it_approaches_softmax(self):
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

    def test_no_direction_is_preferred(self):
        torch.manual_seed(0)
        w, x = PerformerFeatures(2, 1000).directions, 0.5 * torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
        estimate = (2 * x @ w.T - x.square().sum(-1, keepdim=True)).exp().mean(-1)  # of e^(x·x)
        torch.testing.assert_close(estimate, torch.full((4,), math.exp(0.25)), rtol=0.2, atol=0)

    def test_directions_are_orthogonal(self):
        w = PerformerFeatures(8, 16).directions
        for block in w.split(8):
            directions = F.normalize(block, dim=-1)
            torch.testing.assert_close(directions @ directions.T, torch.eye(8), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("length", [5, CHUNK + 3])
    @pytest.mark.parametrize("spread", [1, 12], ids=["alike", "far apart"])
    def test_causal_is_the_weights_cut_off(self, length, spread):
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

    def test_padding_shared_heads_and_large_inputs(self):
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
    def test_as_a_layer(self, causal):
        layer = Attention(8, 2, activation="performer", attention_bias=None, causal=causal)
        layer(torch.randn(2, 5, 8)).sum().backward()
        assert layer.query.weight.grad.abs().sum() > 0
        assert layer(torch.randn(0, 5, 8)).shape == (0, 5, 8)
        assert layer.state_dict()["performer.directions"].shape == (7, 4)  # ⌈4 log 5⌉
        with pytest.raises(ValueError, match="an activation other than"):
            layer(torch.randn(1, 2, 8), cache=KVCache(4))


class TestCache:
    @pytest.mark.parametrize("activation", ["sigmoid", "softmax", "relu"])
    @pytest.mark.parametrize("position", [None, "rope", "alibi"])
    @pytest.mark.parametrize("window", [None, (2, -1)])
    def test_token_by_token_is_all_at_once(self, activation, position, window):
        encoding = {None: None, "rope": RotaryEmbedding(4), "alibi": Alibi(4)}[position]
        bias = VisibleKeysBias() if activation == "sigmoid" else None
        bias = AlibiKeysBias() if bias is not None and position == "alibi" else bias
        options = {"num_kv_heads": 2, "window": window, "length_power": 0.5 if activation == "relu" else 0.0}
        layer = Attention(16, 4, activation=activation, attention_bias=bias, position=encoding, **options).eval()
        x = torch.randn(2, 9, 16)
        with torch.no_grad():
            whole, cache = layer(x), KVCache(9)
            parts = [layer(part, cache=cache) for part in x.split([4, 1, 3, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=1e-5)

    def test_what_it_refuses(self):
        layer, x = Attention(8, 2, activation="sigmoid", attention_bias=0.0), torch.randn(1, 3, 8)
        with pytest.raises(RuntimeError, match="no gradient"):
            layer(x, cache=KVCache(4))
        with torch.no_grad():
            cache = KVCache(4)
            layer(x, cache=cache)
            with pytest.raises(ValueError, match="the cache has 4 positions and holds 3: 3 more do not fit"):
                layer(x, cache=cache)
            with pytest.raises(ValueError, match="a batch of 1, got a batch of 2"):
                layer(torch.randn(2, 1, 8), cache=cache)
            with pytest.raises(ValueError, match="causal=False"):
                Attention(8, 2, activation="sigmoid", attention_bias=0.0, causal=False)(x, cache=KVCache(4))


def test_recording_everything():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=-1.0, position=Alibi(2), dropout=0.5).eval()
    x = torch.randn(2, 5, 8)
    layer.record = "everything"
    layer(x)
    q, k, v = heads_of(layer, x)
    expected = attention_statistics(
        layer.query_norm(q), layer.key_norm(k), v, is_causal=True, bias=-1.0, alibi_slopes=layer.position()
    )
    for name, value in layer.statistics._asdict().items():
        torch.testing.assert_close(value, getattr(expected, name), equal_nan=True)
    torch.testing.assert_close(layer.output_frobenius_norm, expected.output_norm.square().sum(1).sqrt())


def test_make_bias():
    assert make_bias("log_context", max_seq_len=64, num_heads=2).value == -math.log(64)
    assert isinstance(make_bias("log_visible", num_heads=2), VisibleKeysBias)
    assert isinstance(make_bias("log_sample", num_heads=2), SampleLengthBias)
    assert not make_bias("log_batch", num_heads=2).cache_safe
    assert make_bias(-10.0, learn="head", num_heads=2).value.shape == (2, 1, 1)
    assert make_bias(-5.0, learn="query", num_heads=2).initial == -5
    for rule, learn, message in (
        ("log_context", "no", "longest sequence"),
        ("log_batch", "layer", "needs attention_bias to be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            make_bias(rule, learn=learn, num_heads=2)
