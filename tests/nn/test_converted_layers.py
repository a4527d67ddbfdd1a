"""Converted layers against their formula in float64: every mask and option, with every kind of bias."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigattn import convert
from sigattn.nn import VisibleKeysBias
from tests.conversion.layers import Attend
from tests.nn.test_attention import B, E, H, N, X, linear_bias

ROW, COL = torch.arange(N)[:, None], torch.arange(N)
BIASES = {"default": lambda: None, "number": lambda: -1.0, "visible": VisibleKeysBias, "fitted": linear_bias}


def weights_by_formula(q, k, seen, added, bias, normalize):
    """σ(S + b), with b by its definition: the default counts the keys that any query of a sample sees."""
    seen = seen.expand(len(q), H, q.shape[2], k.shape[2])
    b = bias
    if bias is None:
        b = -seen.flatten(1, 2).any(1).sum(-1).double().log().view(-1, 1, 1, 1) - 6 * normalize
    elif not isinstance(bias, float):
        n = seen.sum(-1, keepdim=True).clamp(min=1).double().log()
        is_fitted = not isinstance(bias, VisibleKeysBias)
        b = bias.constant.view(-1, 1, 1) + bias.slope.view(-1, 1, 1) * n if is_fitted else -n - 6 * normalize
    weights = (q @ k.mT / q.shape[-1] ** 0.5 + added + b).sigmoid().masked_fill(~seen, 0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) if normalize else weights


def added(seen, value):
    return torch.zeros(seen.shape).double().masked_fill(~seen, value)


g = torch.Generator().manual_seed(2)
EVERY = torch.ones(1, 1, N, N, dtype=torch.bool)
VISIBLE = torch.rand(B, 1, N, N, generator=g) > 0.4
OF_HEADS = torch.rand(B, H, N, N, generator=g) > 0.8
KEYS = (torch.tensor([N, 5])[:, None] > COL)[:, None, None]  # (B, 1, 1, N): padding is hidden
POSITIONS = torch.linspace(-70, 70, H * N * N).view(1, H, N, N).double()
CALLS = {  # the options of a call, the keys that its queries see, and what is added to the logits
    "plain": ({}, EVERY),
    "causal": ({"is_causal": True}, COL <= ROW),
    "fewer queries": ({}, EVERY[:, :, :4]),
    "fewer queries, causal": ({"is_causal": True}, ROW[:4] >= COL),
    "bool": ({"attn_mask": VISIBLE}, VISIBLE),
    "2-D": ({"attn_mask": VISIBLE[0, 0]}, VISIBLE[:1]),
    "heads": ({"attn_mask": OF_HEADS}, OF_HEADS),
    "keys": ({"attn_mask": KEYS}, KEYS.expand(B, 1, N, N)),
    "keys, square": ({"attn_mask": KEYS & KEYS.mT}, KEYS & KEYS.mT),  # rows of padding see nothing
    **{str(v): ({"attn_mask": added(KEYS, v)}, KEYS.expand(B, 1, N, N)) for v in (-math.inf, torch.finfo().min, -1e4)},
    "added": ({"attn_mask": added(VISIBLE, -math.inf)}, VISIBLE),
    "a position bias hides nothing": ({"attn_mask": POSITIONS}, EVERY, POSITIONS),
}


@pytest.mark.parametrize(("name", "normalize"), list(itertools.product(BIASES, (True, False))))
def test_layers_that_call_pytorchs_function(name, normalize):
    layer = Attend().double()
    convert(layer, bias=BIASES[name](), normalize=normalize)
    q, k, v = layer.heads(X, X)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    bias = layer.sigmoid_bias if name in ("visible", "fitted") else BIASES[name]()
    for call, (options, seen, *more) in CALLS.items():
        queries = seen.shape[-2]
        weights = weights_by_formula(q[:, :, :queries], k, seen, *(more or [0.0]), bias, normalize)
        expected = (weights @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(layer(X[:, :queries], X, **options), expected, msg=lambda m, c=call: f"{c}: {m}")


OPTIONS = [{}, {"bias": False}, {"kdim": 6, "vdim": 3}, {"add_bias_kv": True}, {"add_zero_attn": True},
           {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True}]  # fmt: skip
HIDDEN, LATER = ~KEYS[:, 0, 0], COL > ROW
SOME = torch.rand(B * H, N, N, generator=g) > 0.6
OF_QUERIES = torch.randn(B * H, N, N, generator=g).double()
MASKS = {
    "none": ({}, EVERY),
    "padding": ({"key_padding_mask": HIDDEN}, KEYS),
    "added padding": ({"key_padding_mask": added(~HIDDEN, torch.finfo().min)}, KEYS),
    "causal": ({"attn_mask": LATER}, ~LATER),
    "added causal": ({"attn_mask": added(~LATER, -math.inf)}, ~LATER),
    "causal, said": ({"attn_mask": LATER, "is_causal": True}, ~LATER),
    "both": ({"attn_mask": LATER, "key_padding_mask": HIDDEN}, ~LATER & KEYS),
    "heads": ({"attn_mask": SOME}, ~SOME.view(B, H, N, N)),
    "added, heads": (
        {"attn_mask": OF_QUERIES, "key_padding_mask": added(~HIDDEN, -math.inf)}, KEYS, OF_QUERIES.view(B, H, N, N)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name", "normalize"),
    [
        *((options, *bias) for options in OPTIONS for bias in (("default", True), ("number", False))),
        *((options, *bias) for options in OPTIONS[::5] for bias in (("default", False), ("fitted", True))),
    ],
    ids=str,
)
def test_multihead_attention(options, name, normalize):
    """Every query sees the learned key and the key of zeros, which only counts where weights are divided by their sum.

    Also of a single sample, if the mask is the same for all.
    """
    layer = nn.MultiheadAttention(E, H, dtype=torch.float64, **options).eval()
    convert(layer, bias=BIASES[name](), normalize=normalize)
    inputs = [torch.randn(B, N, options.get(size, E)).double() for size in ("", "kdim", "vdim")]
    ws = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    ws = ws if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
    bs = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, ws, bs, strict=True))
    if layer.bias_k is not None:
        k, v = (torch.cat([t, b.expand(B, 1, -1)], 1) for t, b in ((k, layer.bias_k), (v, layer.bias_v)))
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
    if layer.add_zero_attn and normalize:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    own = (0, k.shape[2] - N)
    bias = layer.sigmoid_bias if name == "fitted" else BIASES[name]()
    arranged = inputs if layer.batch_first else [t.transpose(0, 1) for t in inputs]
    for masks, (arguments, seen, *more) in MASKS.items():
        seen = F.pad(seen.expand(*seen.shape[:-1], N), own, value=True)
        weights = weights_by_formula(q, k, seen, F.pad(more[0], own) if more else 0.0, bias, normalize)
        expected = layer.out_proj((weights @ v).transpose(1, 2).flatten(2))

        def same(ours, theirs, what=masks):
            torch.testing.assert_close(ours, theirs, msg=lambda m: f"{what}: {m}")

        for returned, settings in ((weights, {"average_attn_weights": False}), (weights.mean(1), {})):
            out, average = layer(*arranged, **arguments, **settings)
            same(average, returned)
            same(out if layer.batch_first else out.transpose(0, 1), expected)
        out, none = layer(*arranged, **arguments, need_weights=False)
        assert none is None
        same(out if layer.batch_first else out.transpose(0, 1), expected)
        if masks in ("none", "causal"):
            same(layer(*(t[0] for t in inputs), **arguments)[0], expected[0])


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_what_is_refused():
    class Single(Attend):
        def forward(self, x):
            return F.scaled_dot_product_attention(self.q(x), self.kv(x), self.kv(x))

    layer = Single().double()
    convert(layer, bias=linear_bias())
    with pytest.raises(ValueError, match="biases of 4 heads, and the query has 1: convert"):
        layer(X)

    class HalfOfTheHeads(Attend):  # as tensor parallelism leaves to each process
        def heads(self, x, y):
            return tuple(t[:, : t.shape[1] // 2] for t in super().heads(x, y))

    layer = HalfOfTheHeads().double()
    convert(layer, bias=linear_bias())
    with pytest.raises(ValueError, match=r"biases of 4 heads, and the query has 2: .* if tensor parallelism"):
        layer(X)
    layer = nn.MultiheadAttention(E, H)
    convert(layer)
    with pytest.raises(ValueError, match="pass attn_mask"):  # as PyTorch
        layer(*X.float().expand(3, -1, -1, -1).unbind(), is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(n, E) for n in (5, 3)])  # PyTorch's fused layer takes them
    with pytest.raises(ValueError, match="no nested tensors: pad them, and pass key_padding_mask"):
        layer(nested, nested, nested)
