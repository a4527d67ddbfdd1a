"""``Attention`` over all of its options: the formula in float64 at once, and the same output in pieces."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from sigattn.nn import (
    Alibi,
    AlibiKeysBias,
    Attention,
    AttentionBias,
    BatchLengthBias,
    Documents,
    KVCache,
    LearnableBias,
    QueryBias,
    RotaryEmbedding,
    SampleLengthBias,
    VisibleKeysBias,
    VisibleKeysLinearBias,
)
from sigattn.nn.functional import ELEMENTWISE
from tests.ops.cases import fuzz

B, H, N, E, SOURCE = 2, 4, 9, 16, 8
D = E // H
X = torch.randn(B, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(B, 5, SOURCE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda s: s.softmax(-1),
    "relu": torch.relu,
    "relu2": lambda s: torch.relu(s) ** 2,
    "gelu": lambda s: s * 0.5 * (1 + torch.erf(s / 2**0.5)),
    "tanh": torch.tanh,
    "identity": lambda s: s,
}
POSITIONS = {
    "none": lambda: None,
    "rope": lambda: RotaryEmbedding(D),
    "alibi": lambda: Alibi(H),
    "split": lambda: Alibi(H, "split"),
}


class QueryFeatureBias(AttentionBias):
    """Stand-in for a fitted predictor: a feature of the query, and the visible keys."""

    needs_visible = True
    needs_query = True

    def forward(self, num_queries, num_keys, *, visible=None, query=None, **_):
        assert visible.dim() == query.dim() == 4
        return query[..., :1] * 0.5 - 0.9 * visible.to(query.dtype).log()


def linear_bias():
    bias = VisibleKeysLinearBias(H)
    bias.constant.data.copy_(torch.linspace(-1, 1, H))
    bias.slope.data.copy_(torch.linspace(-1.2, -0.6, H))
    return bias


# By name, with b by its definition: q (B, H, N, D), the logarithm of the visible keys, of the sum of ALiBi's weights of
# these keys, the number of keys and their lengths.
BIASES = {
    "number": (lambda: -1.5, lambda bias, **_: -1.5),
    "heads": (lambda: LearnableBias(-1.0, H), lambda bias, **_: bias.value),
    "query": (lambda: QueryBias(-5.0), lambda bias, **_: 0.0),  # it is added to Q
    "batch": (BatchLengthBias, lambda bias, keys, **_: -math.log(keys)),
    "sample": (SampleLengthBias, lambda bias, lengths, **_: -lengths.double().log().view(B, 1, 1, 1)),
    "visible": (VisibleKeysBias, lambda bias, log_seen, **_: -log_seen),
    "ALiBi's keys": (AlibiKeysBias, lambda bias, log_alibi, **_: -log_alibi),
    "linear": (
        linear_bias,
        lambda bias, log_seen, **_: bias.constant.view(H, 1, 1) + bias.slope.view(H, 1, 1) * log_seen,
    ),
    "feature": (QueryFeatureBias, lambda bias, q, log_seen, **_: q[..., :1] * 0.5 - 0.9 * log_seen),
}
RULES = ("batch", "sample", "visible", "ALiBi's keys")  # 6 less if the weights of a row are divided by their sum
ONLY_WITH = {"query": ("none",), "ALiBi's keys": ("alibi", "split")}  # positions
# those of "batch" and "sample" differ in a cache or in a document from those of the sequence alone
ALONE = tuple(b for b in BIASES if b not in ("batch", "sample"))


@st.composite
def options(draw, causal=None, biases=tuple(BIASES)):
    """Draw any valid options of a layer, with names of the bias and the position."""
    activation = draw(st.sampled_from(["sigmoid"] * 3 + list(ACTIVATIONS)))
    position = draw(st.sampled_from(list(POSITIONS)))
    allowed = [b for b in biases if position in ONLY_WITH.get(b, POSITIONS)]
    is_softmax, side = activation == "softmax", st.integers(-1, 4)
    return {
        "activation": activation,
        "position": position,
        "attention_bias": None if is_softmax else draw(st.sampled_from(allowed)),
        "causal": draw(st.booleans()) if causal is None else causal,
        "num_kv_heads": draw(st.sampled_from([H, 2, 1])),
        "window": draw(st.none() | st.tuples(side, side)),
        "qk_norm": draw(st.sampled_from(["rms", "layer", "none"])),
        "temperature": draw(st.sampled_from([None, 1.5])),
        "length_power": 0.0 if is_softmax else draw(st.sampled_from([0.0, 0.0, 0.5])),
        "output_norm": draw(st.sampled_from(["none", "rms", "layer"])),
        "normalize": activation == "sigmoid" and draw(st.booleans()),
        "use_bias": draw(st.booleans()),
        "kv_embed_dim": SOURCE if causal is None and draw(st.booleans()) else None,
    }


def make(attention_bias, position="none", **options):
    """Return a layer in float64; the name of its bias is an attribute."""
    torch.manual_seed(0)
    bias = None if attention_bias is None else BIASES[attention_bias][0]()
    layer = Attention(E, H, attention_bias=bias, position=POSITIONS[position](), dropout=0.5, **options)
    layer.bias_name = attention_bias
    return layer.double().eval()


def norm(module, t, weight=None):
    """Return a norm of the last dimension by PyTorch's function."""
    size = t.shape[-1:]
    if isinstance(module, torch.nn.RMSNorm):
        return F.rms_norm(t, size, weight, eps=1e-5)
    return F.layer_norm(t, size, weight, eps=1e-6) if isinstance(module, torch.nn.LayerNorm) else t


def formula(layer, x, source, lengths):
    """Return the output of the heads before the power of the length, their visible keys, and the layer's output."""
    q, k, v = (
        project(t).unflatten(-1, (-1, D)).transpose(1, 2)
        for project, t in ((layer.query, x), (layer.key, source), (layer.value, source))
    )
    q, k = (norm(m, t, getattr(m, "weight", None)) for m, t in ((layer.query_norm, q), (layer.key_norm, k)))
    if layer.bias_name == "query":
        q = q + layer.attention_bias.value
    if isinstance(layer.position, RotaryEmbedding):
        q, k = layer.position(q), layer.position(k)
    n, m = q.shape[2], k.shape[2]
    i, j = torch.arange(n)[:, None], torch.arange(m)
    seen = torch.ones(B, 1, n, m, dtype=torch.bool)
    if layer.causal:
        seen = seen & (j <= i)
    for side, distance in zip(layer.window or (-1, -1), (i - j, j - i), strict=True):
        seen = seen & ((side == -1) | (distance <= side))
    if lengths is not None:
        seen = seen & (j < lengths.view(B, 1, 1, 1))
    penalty = torch.zeros(1, H, n, m, dtype=torch.float64)
    if isinstance(layer.position, Alibi):
        slopes = layer.position().double()
        before, after = (slopes[None], slopes[None]) if slopes.dim() == 1 else slopes.unbind(-1)
        penalty = torch.where(j < i, before[..., None, None], after[..., None, None]) * (i - j).abs()
    if layer.temperature is not None:
        q = q * math.exp(1.5)
    b = 0.0
    if layer.bias_name is not None:
        log_seen = seen.sum(-1, keepdim=True).clamp(min=1).double().log()
        log_alibi = (torch.exp(-penalty) * seen).sum(-1, keepdim=True).clamp(min=1e-30).log()
        facts = {"q": q, "log_seen": log_seen, "log_alibi": log_alibi, "keys": m, "lengths": lengths}
        if layer.bias_name == "feature" and layer.temperature is not None:
            facts["q"] = q / math.exp(1.5 / 2)  # half of the temperature is applied to the keys
        b = BIASES[layer.bias_name][1](layer.attention_bias, **facts)
        b = b - 6.0 if layer.normalize and layer.bias_name in RULES else b
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    logits = q @ k.mT / D**0.5 - penalty + b
    weights = ACTIVATIONS[layer.activation](
        logits.masked_fill(~seen, -torch.inf) if layer.activation == "softmax" else logits
    )
    weights = weights.masked_fill(~seen, 0)
    weights = weights / weights.sum(-1, keepdim=True) if layer.normalize else weights
    heads = weights @ v
    scaled = heads * seen.sum(-1, keepdim=True).clamp(min=1) ** -layer.length_power
    return heads, seen, scaled, layer.output(norm(layer.output_norm, scaled.transpose(1, 2).flatten(2)))


def test_the_formulas_cover_every_activation():
    assert set(ACTIVATIONS) == {*ELEMENTWISE, "softmax"}


def close(a, b):
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)  # positions and visible keys are float32


@fuzz(60)
@given(options=options(), padded=st.booleans())
def test_output_and_statistics_are_those_of_the_formula(options, padded):
    layer = make(**options)
    source = X if layer.kv_embed_dim == E else Y
    keys = source.shape[1]
    lengths = torch.tensor([keys, keys - 3]) if padded or layer.bias_name == "sample" else None
    heads, seen, scaled, expected = formula(layer, X, source, lengths)
    layer.record = "everything"
    out = layer(X, None if source is X else source, key_lengths=lengths)
    rows = seen.any(-1)[:, 0]  # a window may lie beyond a sample's end
    close(out[rows], expected[rows])
    if rows.all():
        torch.testing.assert_close(
            layer.output_frobenius_norm.double(), scaled.flatten(1).norm(dim=1), rtol=1e-5, atol=0
        )
        found = layer.statistics.output_norm.double()
        torch.testing.assert_close(found, heads.flatten(2).norm(dim=-1), rtol=1e-5, atol=1e-6)


@fuzz(30)
@given(options=options(causal=True, biases=ALONE), left_padding=st.sampled_from([None, (0, 4), (5, 0)]))
@torch.no_grad()
def test_tokens_with_a_cache_give_the_output_of_the_whole_sequence(options, left_padding):
    layer = make(**options)
    cache = KVCache(N, None if left_padding is None else torch.tensor(left_padding))
    out = torch.cat([layer(part, cache=cache) for part in X.split([4, 1, 3, 1], 1)], 1)
    for sample, first in enumerate(left_padding or (0, 0)):
        close(out[sample : sample + 1, first:], layer(X[sample : sample + 1, first:]))


@fuzz(30)
@given(options=options(causal=True, biases=ALONE))
def test_documents_give_the_output_of_each_alone(options):
    layer = make(**options)
    starts = torch.zeros(B, N, dtype=torch.bool)
    starts[:, 0] = starts[0, 4] = starts[0, 5] = starts[1, 7] = True
    out = layer(X, documents=Documents.from_starts(starts))
    for row, parts in enumerate(([slice(0, 4), slice(4, 5), slice(5, 9)], [slice(0, 7), slice(7, 9)])):
        for part in parts:
            close(out[row : row + 1, part], layer(X[row : row + 1, part]))


@pytest.mark.parametrize("bias", ["heads", "query", "linear"])
def test_bias_and_temperature_have_the_gradients_of_the_formula(bias):
    layer = make(bias, activation="sigmoid", temperature=1.5, qk_norm="layer")
    parameters = [layer.temperature, *layer.attention_bias.parameters()]
    ours = torch.autograd.grad(layer(X).square().sum(), parameters)
    expected = formula(layer, X, X, None)[3]
    ours_without = [g for g, p in zip(ours, parameters, strict=True) if p is not layer.temperature]
    theirs = torch.autograd.grad(expected.square().sum(), parameters[1:])
    torch.testing.assert_close(ours_without, list(theirs))
    assert ours[0].abs() > 0


def test_dropout_only_while_training():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=-1.0, dropout=0.5)
    x = torch.randn(1, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_a_large_temperature_does_not_overflow_in_float16():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=-10.0, temperature=10.0, causal=False).half()
    assert layer(torch.randn(1, 5, 8, dtype=torch.float16)).isfinite().all()


def test_no_query_gives_no_output():
    layer = Attention(8, 2, activation="sigmoid", attention_bias=0.0, length_power=0.5)
    assert layer(torch.randn(2, 0, 8)).shape == (2, 0, 8)


def test_what_a_cache_refuses():
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
        refusing = Attention(8, 2, activation="sigmoid", attention_bias=0.0, causal=False)
        with pytest.raises(ValueError, match="a cache needs causal=True"):
            refusing(x, cache=KVCache(4))


def test_causal_by_default_in_self_attention_only():
    options = {"activation": "sigmoid", "attention_bias": -1.0}
    x, source = torch.randn(2, 3, 8), torch.randn(2, 7, 8)
    assert Attention(8, 2, **options).causal
    assert not Attention(8, 2, **options, kv_embed_dim=8).causal
    with pytest.raises(ValueError, match="with kv_input choose causal"):
        Attention(8, 2, **options)(x, source)
    assert Attention(8, 2, **options, causal=True)(x, source).shape == x.shape


def test_a_bias_in_q_with_rope_is_warned_of():
    with pytest.warns(UserWarning, match="unstable with RoPE"):
        Attention(8, 2, activation="sigmoid", attention_bias=QueryBias(), position=RotaryEmbedding(4))
