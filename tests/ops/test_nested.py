"""Nested tensors of the jagged layout: each sequence independently, with the query's offsets and gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sigattn import sigmoid_attention

from .cases import COMPILER_NOISE, device_of
from .truth import formula, formula_options

LENGTHS, OTHERS = (3, 7, 1), (4, 2, 6)
SLOPES = torch.tensor([0.5, 0.1, 0.2, 0.3])
NUMBERS = {"bias": -1.0, "scale": 0.3, "softcap": 0.5, "normalize": True}


def nest(lengths, heads, width, device="cpu"):
    """Return a nested leaf (B, ragged, H, D), and its transpose, the argument of attention."""
    g = torch.Generator().manual_seed(heads * width + len(lengths) + lengths[0])
    values = torch.randn(sum(lengths), heads, width, generator=g).to(device).requires_grad_()
    offsets = torch.tensor([0, *np.cumsum(lengths)], device=device)
    return values, torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def truth(values, lengths, of_keys, **options):
    parts = [t.detach().double().cpu().requires_grad_() for t in values]
    split = [t.split(n) for t, n in zip(parts, (lengths, of_keys, of_keys), strict=True)]
    outs = []
    for i, sequence in enumerate(zip(*split, strict=True)):
        own = {k: v[i] if isinstance(v, torch.Tensor) and v.dim() == 4 else v for k, v in options.items()}
        outs.append(formula(*(t.transpose(0, 1)[None] for t in sequence), **own)[0].transpose(0, 1))
    return torch.cat(outs), parts


CALLS = {
    "cross": {"of_keys": OTHERS},
    "numbers": {"of_keys": OTHERS, **NUMBERS},
    "causal gqa": {"is_causal": True, "enable_gqa": True},
    "window": {"window": (2, 1)},
    "alibi": {"alibi_slopes": SLOPES},
    "bias of each": {"bias": torch.tensor([-1.0, -2.0, 0.5]).view(3, 1, 1, 1)},
    "bias of heads": {"bias": torch.tensor([-1.0, -2.0, 0.5, 0.0]).view(4, 1, 1)},
}


@pytest.mark.parametrize(("backend", "call"), [*(("blocked", call) for call in CALLS), ("triton", "causal gqa")])
def test_each_sequence_is_as_if_alone(backend, call):
    """Output and gradients are those of the formula, the layout is the query's; each operand has its own offsets."""
    ours = dict(CALLS[call])
    of_keys, heads, device = ours.pop("of_keys", LENGTHS), 2 if "enable_gqa" in ours else 4, device_of(backend)
    (q_values, q), (k_values, k) = nest(LENGTHS, 4, 16, device), nest(of_keys, heads, 16, device)
    v_values, v = nest(of_keys, heads, 8, device)
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in ours.items()}
    out = sigmoid_attention(q, k, v, backend=backend, **options)
    assert (out.layout, out.shape) == (torch.jagged, (*q.shape[:3], 8))
    assert out.offsets() is q.offsets()
    values = out.transpose(1, 2).values()
    expected, leaves = truth((q_values, k_values, v_values), LENGTHS, of_keys, **formula_options(ours))
    grad = torch.randn_like(expected)
    mine = (values, *torch.autograd.grad(values, (q_values, k_values, v_values), grad.float().to(device)))
    for a, b in zip(mine, (expected, *torch.autograd.grad(expected, leaves, grad)), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_what_pytorch_accepts_besides():
    """Lists of tensors; autocast and dropout."""
    given = [torch.randn(n, 4, 8, requires_grad=True) for n in LENGTHS]
    nested = torch.nested.as_nested_tensor(given, layout=torch.jagged)
    q = nested.transpose(1, 2)
    out = sigmoid_attention(q, q, q, is_causal=True)
    assert out.shape == F.scaled_dot_product_attention(q, q, q).shape
    for x, one in zip(given, out.unbind(), strict=True):
        x = x.transpose(0, 1)[None]
        torch.testing.assert_close(one, sigmoid_attention(x, x, x, is_causal=True)[0])
    out.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in given)
    with torch.autocast("cpu", torch.bfloat16):
        assert sigmoid_attention(q, q, q).dtype is torch.bfloat16
    dropped, whole = (sigmoid_attention(q, q, q, dropout_p=p, bias=4.0).values() for p in (0.5, 0.0))
    assert not torch.equal(dropped, whole)


@pytest.mark.filterwarnings(*COMPILER_NOISE)
@pytest.mark.parametrize("kept", [True, False], ids=["length known", "length unknown"])
def test_compiled(unchecked, kept):
    values, offsets = torch.randn(11, 4, 8, requires_grad=True), torch.tensor([0, 3, 10, 11])
    longest = {"min_seqlen": 1, "max_seqlen": 7} if kept else {}

    def attend(values, offsets):
        q = torch.nested.nested_tensor_from_jagged(values, offsets, **longest).transpose(1, 2)
        return sigmoid_attention(q, q, q, is_causal=True).transpose(1, 2).values()

    ours = torch.compile(attend, fullgraph=True, backend="aot_eager")(values, offsets)
    want = attend(values, offsets)
    torch.testing.assert_close(ours, want)
    grad = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(out, values, grad) for out in (ours, want)))
