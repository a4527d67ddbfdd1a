"""Biases that count each visible key by ALiBi's weight, against sums written out in float64."""

import math

import pytest
import torch

from sigattn.nn import (
    Alibi,
    AlibiKeysBias,
    AlibiQuadraticBias,
    Attention,
    MaskSpec,
    QuadraticBias,
    make_bias,
)
from sigattn.nn.visible_keys import evaluate_bias
from sigattn.ops.problem import two_sided_slopes

B, H, N, E = 2, 4, 11, 16
ROW, COL = torch.arange(N)[:, None], torch.arange(N)


def penalties(layer):
    """Slope times distance, (H, N, N), of the keys before a query and after it."""
    before, after = two_sided_slopes(layer.position())[0].double().unbind(-1)
    return torch.where(COL <= ROW, before[:, None, None] * (ROW - COL), after[:, None, None] * (COL - ROW))


def written_out(layer, x, seen):
    """σ(S - penalty - log Σ e^-penalty) V over the seen keys, (B, N, E) in float64, from the layer's projections."""
    heads = [layer._by_head(p(x)).double() for p in (layer.query, layer.key, layer.value)]
    q, k, v = (layer.query_norm(heads[0].float()).double(), layer.key_norm(heads[1].float()).double(), heads[2])
    penalty = penalties(layer)
    b = -(torch.exp(-penalty) * seen).sum(-1, keepdim=True).log()
    weights = (q @ k.mT / math.sqrt(E // H) - penalty + b).sigmoid() * seen
    return torch.nn.functional.linear((weights @ v).transpose(1, 2).flatten(2), layer.output.weight.double())


@pytest.mark.parametrize("sides", ["causal", "symmetric", "split"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (0, 0), (3, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_layer_is_the_formula(sides, causal, window, padded):
    torch.manual_seed(0)
    layer = Attention(
        E,
        H,
        activation="sigmoid",
        attention_bias=AlibiKeysBias(),
        position=Alibi(H, sides),
        causal=causal,
        window=window,
    )
    lengths = torch.tensor([N, 6]) if padded else None
    limits = torch.tensor([N, 6 if padded else N])[:, None]
    seen = (COL <= ROW) if causal else torch.ones(N, N, dtype=torch.bool)
    left, right = window or (N, N)
    seen = seen & (left >= ROW - COL) & (right >= COL - ROW)
    seen = seen & (limits[:, :, None, None] > COL)
    x = torch.randn(B, N, E)
    used = limits > COL
    ours, truth = layer(x, key_lengths=lengths), written_out(layer, x, seen)
    torch.testing.assert_close(ours[used], truth[used].float(), rtol=1e-5, atol=1e-6)


def test_weights_of_each_head_sum_to_about_one():
    """A query and keys of 0 give weights that sum to 1, less the sigmoid's saturation, as with softmax."""
    layer = Attention(E, 8, activation="sigmoid", attention_bias=AlibiKeysBias(), position=Alibi(8))
    spec = MaskSpec(True, None, None, alibi_slopes=layer.position(), bias=0.0, dropout=0.0)
    b = layer.evaluate_bias(layer.attention_bias, torch.zeros(1, 8, 2048, 2), 2048, spec)
    distance = torch.arange(2048).double()
    odds = torch.exp(b[0, :, -1].double() - layer.position().double()[:, None] * distance)
    torch.testing.assert_close(odds.sum(-1), torch.ones(8).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("learn", ["head", "quadratic"])
def test_learned_forms_start_there_and_learn(learn):
    bias = make_bias("log_alibi", learn=learn, num_heads=H, head_dim=E // H)
    assert isinstance(bias, QuadraticBias) == (learn == "quadratic")
    torch.manual_seed(0)
    layer = Attention(E, H, activation="sigmoid", attention_bias=bias, position=Alibi(H))
    start = make_bias("log_alibi", num_heads=H)
    reference = Attention(E, H, activation="sigmoid", attention_bias=start, position=Alibi(H))
    reference.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(B, N, E)
    torch.testing.assert_close(layer(x), reference(x))
    layer(x).square().sum().backward()
    assert bias.constant.grad.abs().min() > 0
    assert bias.slope.grad.abs().min() > 0


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"AlibiQuadraticBias counts keys by ALiBi's weights and needs position=Alibi"):
        Attention(E, H, activation="sigmoid", attention_bias=AlibiQuadraticBias(H, 4, 4))
    with pytest.raises(ValueError, match="pass visible"):
        AlibiKeysBias()(3, 3, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="got 'log_alibi' with learn='layer'"):
        make_bias("log_alibi", learn="layer", num_heads=H)
    with pytest.raises(TypeError, match=r"sigattn.nn.Attention with Alibi only"):
        evaluate_bias(AlibiKeysBias(), torch.randn(B, H, N, 4), torch.randn(B, H, N, 4), is_causal=True)
