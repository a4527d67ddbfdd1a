"""Memory: weights that are saved for the backward pass, how PyTorch may use the recorded call, and shapes of products.

oneDNN compiles a bfloat16 product for each shape, and keeps the last 1024, up to a megabyte each.
"""

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.flash import flash_attn_func
from sigattn.ops.attention import DENSE
from sigattn.ops.blocked import tiles
from sigattn.ops.problem import Problem
from tests.ops import cases
from tests.ops.cases import HAS_LLVM

BOTH = pytest.mark.parametrize("backend", ["blocked", *(["llvm"] if HAS_LLVM else [])])
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])


def operands(n=200, d=32, **sizes):
    return [t.requires_grad_() for t in cases.operands(n, n, d=d, **sizes)]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_saved_weights_take_at_most_four_times_the_memory_of_the_inputs(backend, dtype, key_heads):
    are_saved = []
    for n in (40, 256, 392, 800):
        leaves = operands(n, key_heads=key_heads, dtype=dtype, batch=1)
        for options in ({}, {"is_causal": True, "dropout_p": 0.5, "alibi_slopes": SLOPES}):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                sigmoid_attention(*leaves, enable_gqa=True, backend=backend, **options)
            others = {t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in {x.data_ptr() for x in leaves}}
            assert sum(others.values()) <= 4 * sum(t.nbytes for t in leaves) + 1000
        are_saved.append(DENSE.backends[backend].saved_weights(Problem(*leaves)) is not None)
    assert are_saved[0]
    assert not are_saved[-1]


@BOTH
def test_batched_gradients(backend):
    leaves = operands()
    out = sigmoid_attention(*leaves, backend=backend, alibi_slopes=SLOPES)
    grads = torch.randn(3, *out.shape)
    found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        expected = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        torch.testing.assert_close(tuple(t[i] for t in found), expected)


@BOTH
def test_a_backward_pass_inside_autocast_does_not_follow_it(backend):
    for n, options in ((20, {}), (200, {"alibi_slopes": SLOPES, "softcap": 3.0 if backend == "blocked" else 0.0})):
        leaves = operands(n)
        out = sigmoid_attention(*leaves, backend=backend, **options).sum()
        expected = torch.autograd.grad(out, leaves, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(out, leaves)
        torch.testing.assert_close(found, expected)


@BOTH
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("n", [6, 200])
def test_the_output_can_be_changed_in_place(backend, n, key_heads):
    """As in ``out += residual``; autograd refuses that for views."""
    leaves = operands(n, key_heads=key_heads, batch=1)
    for inputs in (leaves, [t[0] for t in leaves]):
        gradients = []
        for change in (torch.add, torch.Tensor.add_):
            out = sigmoid_attention(*inputs, enable_gqa=True, backend=backend)
            gradients.append(torch.autograd.grad(change(out, 0.5).square().sum(), leaves))
        assert all(map(torch.equal, *gradients))
    rows = [t.transpose(1, 2) for t in leaves]
    torch.autograd.grad(flash_attn_func(*rows, backend=backend).add_(1).square().sum(), leaves)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # PyTorch's, of restoring its own flags
@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 120), (torch.float32, 1000)])
def test_onednn_is_switched_between_forward_and_backward(dtype, n):
    leaves = operands(n, 128, heads=2, dtype=dtype, batch=1)
    bias = torch.full((2, 1, 1), -5.0)
    truth = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(sigmoid_attention(*truth, bias=bias.double(), backend="reference").sum(), truth)
    for first in (False, True):
        with torch.backends.mkldnn.flags(enabled=first):
            out = sigmoid_attention(*leaves, bias=bias, backend="blocked")
        with torch.backends.mkldnn.flags(enabled=not first):
            gradients = torch.autograd.grad(out.sum(), leaves)
        for found, true in zip(gradients, expected, strict=True):
            assert (found - true).norm() < 16 * torch.finfo(dtype).eps * true.norm()


@BOTH
def test_inputs_changed_in_place_are_found(backend):
    q, k, v = operands()
    scaled = q * 1
    out = sigmoid_attention(scaled, k, v, backend=backend)
    with torch.no_grad():
        scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


LENGTHS = range(500, 1500, 50)
# most shapes for these 20 lengths, and the option; without padding each length has shapes of its own
OPTIONS = {
    "plain": (90, lambda n: {}),
    "key_lengths": (90, lambda n: {"key_lengths": torch.tensor([n // 2 + 1])}),
    "bool mask": (90, lambda n: {"attn_mask": torch.ones(n, n, dtype=torch.bool)}),
    "causal": (360, lambda n: {"is_causal": True}),
    "window": (130, lambda n: {"window": (n // 9, 0)}),
}


@pytest.fixture
def shapes(monkeypatch):
    """Record the layouts of the factors of all bfloat16 products, which are not computed."""
    recorded = set()

    def record(a, b, out):
        if a.dtype is torch.bfloat16:
            recorded.add((a.shape, a.stride(), b.shape, b.stride()))
        return a.new_zeros(a.shape[0], a.shape[1], b.shape[2]) if out is None else out.zero_()

    monkeypatch.setattr(tiles, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out=None: record(a, b, out))
    monkeypatch.setattr(torch, "baddbmm", lambda _, a, b, out=None, **__: record(a, b, out))
    return recorded


@pytest.mark.parametrize(("most", "option"), OPTIONS.values(), ids=OPTIONS)
def test_products_of_many_lengths_have_few_shapes(most, option, shapes):
    for n in LENGTHS:
        query, key, value = torch.randn(3, 1, 2, n, 8, dtype=torch.bfloat16).requires_grad_().unbind()
        sigmoid_attention(query, key, value, backend="blocked", **option(n)).sum().backward()
    assert 0 < len(shapes) <= most
