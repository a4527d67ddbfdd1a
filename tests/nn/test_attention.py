"""``Attention`` over all of its options: the formula in float64 at once, and the same output in pieces."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

from sigattn import nn
from sigattn.nn.functional import ELEMENTWISE
from tests.ops.cases import numbers

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
    "rope": lambda: nn.RotaryEmbedding(D),
    "alibi": lambda: nn.Alibi(H),
    "split": lambda: nn.Alibi(H, "split"),
}


def linear_bias():
    bias = nn.VisibleKeysLinearBias(H)
    bias.constant.data.copy_(torch.linspace(-1, 1, H))
    bias.slope.data.copy_(torch.linspace(-1.2, -0.6, H))
    return bias


# By name, with b by its definition: q (B, H, N, D), the logarithm of the visible keys, of the sum of ALiBi's weights of
# these keys, the number of keys and their lengths.
BIASES = {
    "number": (lambda: -1.5, lambda bias, **_: -1.5),
    "heads": (lambda: nn.LearnableBias(-1.0, H), lambda bias, **_: bias.value),
    "query": (lambda: nn.QueryBias(-5.0), lambda bias, **_: 0.0),  # it is added to Q
    "context": (lambda: nn.ContextLengthBias(9), lambda bias, **_: -math.log(9)),
    "batch": (nn.BatchLengthBias, lambda bias, keys, **_: -math.log(keys)),
    "sample": (nn.SampleLengthBias, lambda bias, lengths, **_: -lengths.double().log().view(B, 1, 1, 1)),
    "visible": (nn.VisibleKeysBias, lambda bias, log_seen, **_: -log_seen),
    "ALiBi's keys": (nn.AlibiKeysBias, lambda bias, log_alibi, **_: -log_alibi),
    "linear": (
        linear_bias,
        lambda bias, log_seen, **_: bias.constant.view(H, 1, 1) + bias.slope.view(H, 1, 1) * log_seen,
    ),
}
RULES = ("context", "batch", "sample", "visible", "ALiBi's keys")  # 6 less with normalize
ONLY_WITH = {"query": ("none",), "ALiBi's keys": ("alibi", "split")}  # positions
# those of "batch" and "sample" differ in a cache or in a document from those of the sequence alone
ALONE = tuple(b for b in BIASES if b not in ("batch", "sample"))


def random_layer(number, causal=None, biases=tuple(BIASES)):
    """Return a layer in float64 with options drawn independently; the name of its bias is an attribute."""
    r = random.Random(number)
    activation = r.choice(["sigmoid"] * 3 + list(ACTIVATIONS))
    position, is_softmax = r.choice(list(POSITIONS)), activation == "softmax"
    name = None if is_softmax else r.choice([b for b in biases if position in ONLY_WITH.get(b, POSITIONS)])
    torch.manual_seed(0)
    layer = nn.Attention(
        E,
        H,
        activation=activation,
        attention_bias=None if name is None else BIASES[name][0](),
        position=POSITIONS[position](),
        causal=r.choice([True, False]) if causal is None else causal,
        num_kv_heads=r.choice([H, 2, 1]),
        window=r.choice([None, (r.randint(-1, 4), r.randint(-1, 4))]),
        qk_norm=r.choice(["rms", "layer", "none"]),
        temperature=r.choice([None, 1.5]),
        length_power=0.0 if is_softmax else r.choice([0.0, 0.5]),
        output_norm=r.choice(["none", "rms", "layer"]),
        normalize=activation == "sigmoid" and r.choice([True, False]),
        use_bias=r.choice([True, False]),
        kv_embed_dim=SOURCE if causal is None and r.choice([True, False]) else None,
        dropout=0.5,
    )
    layer.bias_name = name
    return layer.double().eval()


def norm(module, t, weight=None):
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
    if isinstance(layer.position, nn.RotaryEmbedding):
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
    if isinstance(layer.position, nn.Alibi):
        slopes = layer.position().double()
        before, after = (slopes[None], slopes[None]) if slopes.dim() == 1 else slopes.unbind(-1)
        penalty = torch.where(j < i, before[..., None, None], after[..., None, None]) * (i - j).abs()
    t = torch.zeros(1) if layer.temperature is None else layer.temperature
    b = 0.0
    if layer.bias_name is not None:
        log_seen = seen.sum(-1, keepdim=True).clamp(min=1).double().log()
        log_alibi = (torch.exp(-penalty) * seen).sum(-1, keepdim=True).clamp(min=1e-30).log()
        # half of the temperature is applied to the queries, half to the keys
        b = BIASES[layer.bias_name][1](
            layer.attention_bias, q=q * (t / 2).exp(), log_seen=log_seen, log_alibi=log_alibi, keys=m, lengths=lengths
        )
        b = b - 6.0 if layer.normalize and layer.bias_name in RULES else b
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    logits = t.exp() * q @ k.mT / D**0.5 - penalty + b
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


def close(a, b, **options):
    """Compare with the tolerance of float32, in which positions and visible keys are."""
    torch.testing.assert_close(a.double(), b, **{"rtol": 1e-5, "atol": 1e-6, **options})


@pytest.mark.parametrize("number", numbers(80))
def test_outputs_gradients_and_statistics_are_those_of_the_formula(number):
    layer = random_layer(number)
    source = X if layer.kv_embed_dim == E else Y
    keys = source.shape[1]
    lengths = torch.tensor([keys, keys - 3]) if number % 2 or layer.bias_name == "sample" else None
    heads, seen, scaled, expected = formula(layer, X, source, lengths)
    layer.record = "everything"
    out = layer(X, None if source is X else source, key_lengths=lengths)
    rows = seen.any(-1)[:, 0]  # a window may lie beyond a sample's end
    close(out[rows], expected[rows])
    if rows.all():
        close(layer.output_frobenius_norm, scaled.flatten(1).norm(dim=1))
        close(layer.statistics.output_norm, heads.flatten(2).norm(dim=-1))
        ours, theirs = (torch.autograd.grad(o.square().sum(), list(layer.parameters())) for o in (out, expected))
        for (name, _), a, b in zip(layer.named_parameters(), ours, theirs, strict=True):
            close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("number", numbers(30))
@torch.no_grad()
def test_tokens_with_a_cache_give_the_output_of_the_whole_sequence(number):
    layer, left_padding = random_layer(number, True, ALONE), [None, (0, 4), (5, 0)][number % 3]
    cache = nn.KVCache(N, None if left_padding is None else torch.tensor(left_padding))
    out = torch.cat([layer(part, cache=cache) for part in X.split([4, 1, 3, 1], 1)], 1)
    for sample, first in enumerate(left_padding or (0, 0)):
        close(out[sample : sample + 1, first:], layer(X[sample : sample + 1, first:]))


@pytest.mark.parametrize("number", numbers(30))
def test_documents_give_the_output_of_each_alone(number):
    layer = random_layer(number, True, ALONE)
    starts = torch.zeros(B, N, dtype=torch.bool)
    starts[:, 0] = starts[0, 4] = starts[0, 5] = starts[1, 7] = True
    out = layer(X, documents=nn.Documents.from_starts(starts))
    for row, parts in enumerate(([slice(0, 4), slice(4, 5), slice(5, 9)], [slice(0, 7), slice(7, 9)])):
        for part in parts:
            close(out[row : row + 1, part], layer(X[row : row + 1, part]))


def sigmoid_layer(attention_bias=-1.0, **options):
    return nn.Attention(8, 2, activation="sigmoid", attention_bias=attention_bias, **options)


def test_dropout_only_while_training():
    layer, x = sigmoid_layer(dropout=0.5), torch.randn(1, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_a_large_temperature_does_not_overflow_in_float16():
    layer = sigmoid_layer(-10.0, temperature=10.0, causal=False).half()
    assert layer(torch.randn(1, 5, 8, dtype=torch.float16)).isfinite().all()


def test_no_query_gives_no_output():
    assert sigmoid_layer(length_power=0.5)(torch.randn(2, 0, 8)).shape == (2, 0, 8)


def test_causal_by_default_in_self_attention_only():
    x, source = torch.randn(2, 3, 8), torch.randn(2, 7, 8)
    assert sigmoid_layer().causal
    assert not sigmoid_layer(kv_embed_dim=8).causal
    with pytest.raises(ValueError, match="with kv_input choose causal"):
        sigmoid_layer()(x, source)
    assert sigmoid_layer(causal=True)(x, source).shape == x.shape


def test_a_bias_in_q_with_rope_is_warned_of():
    with pytest.warns(UserWarning, match="unstable with RoPE"):
        sigmoid_layer(nn.QueryBias(), position=nn.RotaryEmbedding(4))
