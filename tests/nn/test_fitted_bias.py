"""Biases that depend on each query and its visible keys, in every caller, against formulas in float64."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn import convert
from sigattn.nn import (
    Alibi,
    Attention,
    AttentionBias,
    Documents,
    KVCache,
    RotaryEmbedding,
    VisibleKeysLinearBias,
    make_bias,
)

B, H, N, E = 2, 4, 9, 16


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


BIASES = {"linear": linear_bias, "query": QueryFeatureBias}


def formula(bias, q, k, v, seen, more=0.0, normalize=False):
    """σ(S + b) V written out: q (B, H, N, D), seen broadcastable to (B, H, N, M), b from its definition."""
    seen = seen.expand(len(q), q.shape[1], q.shape[2], k.shape[2])
    n = seen.sum(-1, keepdim=True).clamp(min=1).double().log()
    if isinstance(bias, QueryFeatureBias):
        b = q[..., :1] * 0.5 - 0.9 * n
    else:
        b = bias.constant.double().view(-1, 1, 1) + bias.slope.double().view(-1, 1, 1) * n
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5 + more + b).sigmoid().masked_fill(~seen, 0)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights) @ v


def of_layer(layer, x, seen, more=0.0, rotated=None):
    q, k, v = (layer._by_head(p(x)) for p in (layer.query, layer.key, layer.value))
    if rotated is not None:
        q, k = rotated(q), rotated(k)
    return layer.output(formula(layer.attention_bias, q, k, v, seen, more).transpose(1, 2).flatten(2))


def make_layer(kind, **options):
    options = {"num_kv_heads": 2, "qk_norm": "none", **options}
    return Attention(E, H, activation="sigmoid", attention_bias=BIASES[kind](), **options).double().eval()


ROW, COL = torch.arange(N)[:, None], torch.arange(N)
X = torch.randn(B, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", BIASES)
class TestAttention:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("window", [None, (2, 1)])
    @pytest.mark.parametrize("padded", [False, True])
    def test_masks(self, kind, causal, window, padded):
        layer = make_layer(kind, causal=causal, window=window, position=Alibi(H, "causal" if causal else "split"))
        lengths = torch.tensor([N, 6])
        seen = (COL <= ROW) if causal else torch.ones(N, N, dtype=torch.bool)
        left, right = window or (N, N)
        seen = seen & (left >= ROW - COL) & (right >= COL - ROW)
        seen = seen & (lengths.view(-1, 1, 1, 1) > COL) if padded else seen[None, None]
        slopes = layer.position().double()
        slopes = slopes.view(1, H, 1).expand(1, H, 2) if slopes.dim() == 1 else slopes
        before, after = (s[..., None, None] for s in slopes.unbind(-1))
        penalty = -torch.where(COL < ROW, before, after) * (ROW - COL).abs()
        expected = of_layer(layer, X, seen, penalty)
        out = layer(X, key_lengths=lengths if padded else None)
        rows = seen.expand(B, 1, N, N).any(-1)[:, 0]  # a window may lie beyond a sample's end
        torch.testing.assert_close(out[rows], expected[rows])

    @pytest.mark.parametrize("window", [None, (3, 0)])
    @pytest.mark.parametrize("left_padding", [None, (0, 4)])
    def test_cache_is_all_at_once(self, kind, window, left_padding):
        layer = make_layer(kind, window=window, position=RotaryEmbedding(E // H))
        padding = None if left_padding is None else torch.tensor(left_padding)
        with torch.no_grad():
            cache = KVCache(N, padding)
            out = torch.cat([layer(part, cache=cache) for part in X.split([5, 1, 2, 1], 1)], 1)
            for sample, first in enumerate(left_padding or (0, 0)):
                alone = layer(X[sample : sample + 1, first:])
                torch.testing.assert_close(out[sample : sample + 1, first:], alone)
                seen = COL[: N - first] <= ROW[: N - first]
                seen = seen & ((N if window is None else window[0]) >= ROW - COL)[: N - first, : N - first]
                expected = of_layer(layer, X[sample : sample + 1, first:], seen[None, None], rotated=layer.position)
                torch.testing.assert_close(alone, expected)

    def test_cross_attention(self, kind):
        layer = make_layer(kind, causal=False, kv_embed_dim=8)
        other = torch.randn(B, 5, 8, dtype=torch.float64)
        q, k, v = layer._by_head(layer.query(X)), layer._by_head(layer.key(other)), layer._by_head(layer.value(other))
        expected = formula(layer.attention_bias, q, k, v, torch.ones(1, 1, N, 5, dtype=torch.bool))
        torch.testing.assert_close(layer(X, other), layer.output(expected.transpose(1, 2).flatten(2)))

    @pytest.mark.parametrize("window", [None, (1, -1)])
    def test_documents(self, kind, window):
        layer = make_layer(kind, window=window)
        starts = torch.zeros(B, N, dtype=torch.bool)
        starts[:, 0] = starts[0, 4] = starts[0, 5] = starts[1, 7] = True
        out = layer(X, documents=Documents.from_starts(starts))
        for row, parts in enumerate(([slice(0, 4), slice(4, 5), slice(5, 9)], [slice(0, 7), slice(7, 9)])):
            for part in parts:
                torch.testing.assert_close(out[row : row + 1, part], layer(X[row : row + 1, part]))

    def test_statistics_of_the_same_bias(self, kind):
        layer = make_layer(kind)
        layer.record = "everything"
        layer(X)
        q, k, v = (layer._by_head(p(X)) for p in (layer.query, layer.key, layer.value))
        expected = formula(layer.attention_bias, q, k, v, (COL <= ROW)[None, None])
        torch.testing.assert_close(layer.statistics.output_norm, expected.flatten(2).norm(dim=-1).float())

    def test_each_part_of_a_shard(self, kind):
        """Under context parallelism a process has some of the queries; its bias is that of their own positions."""
        layer, whole = make_layer(kind), {}
        layer.sequence_shard = Shard(torch.tensor([0, 1, 7, 8]), whole)
        layer(X[:, [0, 1, 7, 8]])
        part = whole["bias"]
        layer.sequence_shard = Shard(torch.arange(N), whole)
        layer(X)
        torch.testing.assert_close(part.expand(B, -1, -1, -1), whole["bias"][:, :, [0, 1, 7, 8]].expand(B, -1, -1, -1))


class Shard:
    """One process's part of a sequence; keeps the bias that it is given."""

    length = N

    def __init__(self, positions, given):
        self.mine, self.given = positions, given

    def positions(self, device):
        return self.mine

    def attend(self, query, key, value, *, is_causal, window, bias, alibi_slopes, normalize):
        self.given["bias"] = bias
        return query


def test_tensor_parallelism_refuses_parameters_of_heads():
    with pytest.raises(ValueError, match="learned bias for each head"):
        make_layer("linear").shard_heads(0, 2)


class Attend(nn.Module):
    """Self-attention by PyTorch's function, with whatever that takes."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)

    def forward(self, x, **options):
        return F.scaled_dot_product_attention(*self.heads(x), **options)


VISIBLE = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(2)) > 0.4
CALLS = {
    "plain": ({}, torch.ones(1, 1, N, N, dtype=torch.bool)),
    "causal": ({"is_causal": True}, (COL <= ROW)[None, None]),
    "bool": ({"attn_mask": VISIBLE}, VISIBLE),
    "2-D": ({"attn_mask": VISIBLE[0, 0]}, VISIBLE[:1]),
    "added": ({"attn_mask": torch.zeros(VISIBLE.shape).double().masked_fill(~VISIBLE, -math.inf)}, VISIBLE),
    "keys": ({"attn_mask": VISIBLE[:, :, :1]}, VISIBLE[:, :, :1]),
}


@pytest.mark.parametrize(("kind", "normalize"), [("linear", True), ("linear", False), ("query", False)])
@pytest.mark.parametrize("call", CALLS)
def test_layers_that_call_pytorchs_function(kind, normalize, call):
    layer, (options, seen) = Attend().double(), CALLS[call]
    convert(layer, bias=BIASES[kind](), normalize=normalize)
    expected = formula(layer.sigmoid_bias, *layer.heads(X), seen, normalize=normalize)
    torch.testing.assert_close(layer(X, **options), expected)


def test_more_keys_than_queries():
    class Cross(Attend):
        def forward(self, x, **options):
            q, k, v = self.heads(x)
            return F.scaled_dot_product_attention(q[:, :, :4], k, v, **options)

    layer = Cross().double()
    convert(layer, bias=linear_bias())
    q, k, v = layer.heads(X)
    for options, seen in (({}, COL[None] >= 0), ({"is_causal": True}, ROW[:4] >= COL)):
        expected = formula(layer.sigmoid_bias, q[:, :, :4], k, v, seen[None, None], normalize=True)
        torch.testing.assert_close(layer(X, **options), expected)


def test_queries_without_heads_are_refused():
    class Single(Attend):
        def forward(self, x):
            return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))

    layer = Single().double()
    convert(layer, bias=linear_bias())
    with pytest.raises(ValueError, match=r"needs plain queries of shape \(B, H, N, D\), got \(2, 9, 16\)"):
        layer(X)


@pytest.mark.parametrize(("kind", "normalize"), [("linear", True), ("linear", False), ("query", False)])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both", "added"])
def test_multihead_attention(kind, normalize, masks):
    layer = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64).eval()
    before = copy.deepcopy(layer)
    convert(layer, bias=BIASES[kind](), normalize=normalize)
    q, k, v = F.linear(X, before.in_proj_weight, before.in_proj_bias).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    hidden = torch.tensor([N, 5])[:, None] <= COL
    seen, options = torch.ones(1, 1, N, N, dtype=torch.bool), {}
    if masks in ("padding", "both"):
        seen, options = seen & ~hidden[:, None, None], {"key_padding_mask": hidden}
    if masks in ("causal", "both", "added"):
        seen = seen & (COL <= ROW)
        mask = COL > ROW
        options["attn_mask"] = mask if masks != "added" else torch.zeros(N, N).double().masked_fill(mask, -math.inf)
    for causal in {False, masks == "causal"}:
        out, _ = layer(X, X, X, need_weights=False, is_causal=causal, **options)
        heads = formula(layer.sigmoid_bias, q, k, v, seen, normalize=normalize)
        torch.testing.assert_close(out, before.out_proj(heads.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_key_of_zeros_counts_in_the_sum(normalize, padded):
    layer = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, add_zero_attn=True).eval()
    convert(layer, bias=-1.0, normalize=normalize)
    weight, hidden = layer.in_proj_weight, (torch.tensor([N, 5])[:, None] <= COL) & padded
    q, k, v = F.linear(X, weight, layer.in_proj_bias).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    k, v, hidden = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), F.pad(hidden, (0, 1))
    weights = (q @ k.mT / 2 - 1).sigmoid().masked_fill(hidden[:, None, None], 0)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    out, returned = layer(X, X, X, key_padding_mask=hidden[:, :N] if padded else None, average_attn_weights=False)
    torch.testing.assert_close(out, layer.out_proj((weights @ v).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(returned, weights if normalize else weights[..., :N])


def test_it_starts_as_the_visible_keys_and_learns():
    bias = make_bias("log_visible", learn="head", num_heads=H)
    layer = Attention(E, H, activation="sigmoid", attention_bias=bias)
    reference = Attention(E, H, activation="sigmoid", attention_bias=make_bias("log_visible", num_heads=H))
    reference.load_state_dict(layer.state_dict(), strict=False)
    x = X.float()
    torch.testing.assert_close(layer(x), reference(x))
    layer(x).sum().backward()
    assert bias.constant.grad.abs().min() > 0
    assert bias.slope.grad.abs().min() > 0
    with pytest.raises(ValueError, match="pass visible"):
        bias(3, 3, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="log_visible"):
        make_bias("log_visible", learn="layer", num_heads=H)


def test_gradients_through_the_operator():
    layer = make_layer("linear")
    seen = (COL <= ROW)[None, None]
    ours = torch.autograd.grad(layer(X).square().sum(), list(layer.attention_bias.parameters()))
    theirs = torch.autograd.grad(of_layer(layer, X, seen).square().sum(), list(layer.attention_bias.parameters()))
    torch.testing.assert_close(ours, theirs)
