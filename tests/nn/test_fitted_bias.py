"""``VisibleKeysLinearBias`` in converted layers, against the formula in float64."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn import convert
from tests.nn.test_attention import B, E, H, N, QueryFeatureBias, X, linear_bias

NORMALIZE = pytest.mark.parametrize("normalize", [True, False])
ROW, COL = torch.arange(N)[:, None], torch.arange(N)


def formula(bias, q, k, v, seen, normalize=False):
    """σ(S + b) V written out: q (B, H, N, D), seen broadcastable to (B, H, N, M), b from its definition."""
    seen = seen.expand(len(q), q.shape[1], q.shape[2], k.shape[2])
    n = seen.sum(-1, keepdim=True).clamp(min=1).double().log()
    b = bias.constant.double().view(-1, 1, 1) + bias.slope.double().view(-1, 1, 1) * n
    weights = (q @ k.mT / q.shape[-1] ** 0.5 + b).sigmoid().masked_fill(~seen, 0)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights) @ v


class Attend(nn.Module):
    """Self-attention by PyTorch's function, with whatever that takes."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)

    def forward(self, x, queries=N, **options):
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q[:, :, :queries], k, v, **options)


VISIBLE = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(2)) > 0.4
CALLS = {
    "plain": ({}, COL[None, None, None] >= 0),
    "causal": ({"is_causal": True}, (COL <= ROW)[None, None]),
    "bool": ({"attn_mask": VISIBLE}, VISIBLE),
    "2-D": ({"attn_mask": VISIBLE[0, 0]}, VISIBLE[:1]),
    "added": ({"attn_mask": torch.zeros(VISIBLE.shape).double().masked_fill(~VISIBLE, -math.inf)}, VISIBLE),
    "keys": ({"attn_mask": VISIBLE[:, :, :1]}, VISIBLE[:, :, :1]),
    "fewer queries": ({"queries": 4}, COL[None, None, None] >= 0),
    "fewer queries, causal": ({"queries": 4, "is_causal": True}, (ROW[:4] >= COL)[None, None]),
}


@NORMALIZE
@pytest.mark.parametrize("call", CALLS)
def test_layers_that_call_pytorchs_function(normalize, call):
    layer, (options, seen) = Attend().double(), CALLS[call]
    convert(layer, bias=linear_bias(), normalize=normalize)
    q, k, v = layer.heads(X)
    expected = formula(layer.sigmoid_bias, q[:, :, : options.get("queries", N)], k, v, seen, normalize)
    torch.testing.assert_close(layer(X, **options), expected)


def test_what_is_refused():
    class Single(Attend):
        def forward(self, x):
            return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))

    layer = Single().double()
    convert(layer, bias=linear_bias())
    with pytest.raises(ValueError, match=r"needs plain queries of shape \(B, H, N, D\), got \(2, 9, 16\)"):
        layer(X)
    with pytest.raises(ValueError, match="QueryFeatureBias needs lengths, ALiBi or the query, which '' does not give"):
        convert(Attend(), bias=QueryFeatureBias())


@NORMALIZE
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both", "added"])
def test_multihead_attention(normalize, masks):
    layer = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64).eval()
    before = copy.deepcopy(layer)
    convert(layer, bias=linear_bias(), normalize=normalize)
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
        heads = formula(layer.sigmoid_bias, q, k, v, seen, normalize)
        torch.testing.assert_close(out, before.out_proj(heads.transpose(1, 2).flatten(2)))


@NORMALIZE
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
