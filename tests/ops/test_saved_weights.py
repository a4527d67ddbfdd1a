"""Attention of short sequences that saves its weights: when, their memory, and its derivatives."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sigattn import sigmoid_attention
from sigattn.flash import flash_attn_func
from sigattn.ops import llvm
from sigattn.ops.cpu import saved_weights
from tests.ops.cases import HAS_LLVM


@pytest.fixture(autouse=True)
def default(request, monkeypatch):
    """Make "blocked" the default backend, or the one of the parameter."""
    monkeypatch.setattr(llvm, "_MEASURED", getattr(request, "param", "blocked") == "llvm")


BOTH = pytest.mark.parametrize("default", ["blocked", *(["llvm"] if HAS_LLVM else [])], indirect=True)
GENERAL = {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}  # not a plain call
SAVED = ("_SavedBackward", "_SavedSelfAttentionBackward", "ViewBackward0")  # the last: autograd's own, of few weights


def operands(n=200, d=32, heads=4, key_heads=4, dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    shapes = (batch, heads, n, d), (batch, key_heads, n, d), (batch, key_heads, n, d)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def saves_weights(out):
    return type(out.grad_fn).__name__ in SAVED


OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bias": {"bias": torch.tensor([-1.0, -2.0, -3.0, 0.0]).view(4, 1, 1)},
    "mask": {"attn_mask": torch.rand(200, 200) > 0.3},
    "additive mask": {"attn_mask": torch.randn(200, 200)},
    "ALiBi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "lengths": {"key_lengths": torch.tensor([120, 200])},
    "softcap": {"softcap": 3.0},
    "window": {"window": (20, 3)},
    "offset": {"query_offset": 5, "is_causal": True},
    "everything": {
        "attn_mask": torch.rand(200, 200) > 0.3,
        "bias": torch.full((4, 1, 1), -2.0),
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "key_lengths": torch.tensor([120, 200]),
        "softcap": 3.0,
        "window": (50, 30),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_gradients_equal_those_of_the_op(options, key_heads):
    q, k, v = operands(key_heads=key_heads)
    options = {name: o.clone() if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    leaves = [q, k, v]
    for option in options.values():
        if isinstance(option, torch.Tensor) and option.is_floating_point():
            leaves.append(option.requires_grad_())
    out = sigmoid_attention(q, k, v, enable_gqa=True, **options)
    assert saves_weights(out)
    expected = sigmoid_attention(q, k, v, enable_gqa=True, backend="blocked", **options)
    assert not saves_weights(expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))
    assert all(map(torch.equal, found, torch.autograd.grad(out, leaves, grad)))  # once more, from the same weights


@pytest.mark.parametrize("n", [40, 200])
def test_dropout(n):
    q, k, v = operands(n)
    gradients = []
    for backend in (None, "blocked"):
        torch.manual_seed(1)
        out = sigmoid_attention(q, k, v, dropout_p=0.4, backend=backend)
        first = torch.autograd.grad(out, [q, k, v], torch.ones_like(out), retain_graph=True)
        again = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
        assert all(map(torch.equal, first, again))
        gradients.append((out, *first))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_memory_is_bounded(dtype, key_heads):
    """The weights take at most MOST times the memory of the inputs, and the next longer sequence saves none."""
    saved = []
    for n in (8, 40, 80, 136, 192, 256, 320, 384, 392, 500, 800):
        q, k, v = operands(n, key_heads=key_heads, dtype=dtype, batch=1)
        out = sigmoid_attention(q, k, v, torch.ones(n, n, dtype=torch.bool), enable_gqa=True)
        saved.append(saves_weights(out))
        if saved[-1]:
            weights = sum(t.nbytes for t in out.grad_fn.saved_tensors[10:] if t is not None)
            assert 0 < weights <= saved_weights.MOST * (q.nbytes + k.nbytes + v.nbytes)
    assert saved[0]
    assert saved == sorted(saved, reverse=True)
    assert not saved[-1]


def hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@BOTH
@pytest.mark.parametrize("context", [hooks, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("options", [{}, GENERAL])
def test_nothing_is_saved_where_saved_tensors_are_intercepted(context, options):
    q, k, v = operands()
    assert saves_weights(sigmoid_attention(q, k, v, **options))
    with context():
        assert not saves_weights(sigmoid_attention(q, k, v, **options))


@BOTH
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("n", [30, 150])
def test_under_checkpoint(use_reentrant, n):
    leaves = operands(n)

    def call(q, k, v):
        return sigmoid_attention(q, k, v, is_causal=True) * 2

    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    checkpoint(call, *leaves, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(tuple(t.grad for t in leaves), expected)


@BOTH
@pytest.mark.parametrize("options", [{}, GENERAL], ids=["plain", "general"])
class TestHigherDerivatives:
    def test_a_second_derivative_raises(self, options):
        leaves = operands()
        out = sigmoid_attention(*leaves, **options)
        grad = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match='no second derivative; pass backend="reference"'):
            torch.autograd.grad(grad[0].sum(), leaves)

    def test_batched_gradients(self, options):
        leaves = operands()
        out = sigmoid_attention(*leaves, **options)
        grads = torch.randn(3, *out.shape)
        found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
        for i, grad in enumerate(grads):
            expected = torch.autograd.grad(out, leaves, grad, retain_graph=True)
            torch.testing.assert_close(tuple(t[i] for t in found), expected)

    def test_functional_transforms(self, options):
        q, k, v = (t.detach() for t in operands())

        def loss(q):
            return sigmoid_attention(q, k, v, **options).square().sum()

        q.requires_grad_()
        (expected,) = torch.autograd.grad(loss(q), q)
        torch.testing.assert_close(torch.func.grad(loss)(q.detach()), expected)


def test_few_weights_have_a_second_derivative():
    leaves = operands(6, 4, dtype=torch.float32)
    found, expected = (
        torch.autograd.grad(
            torch.autograd.grad(
                sigmoid_attention(*leaves, is_causal=True, backend=backend).square().sum(), leaves, create_graph=True
            )[0].sum(),
            leaves,
        )
        for backend in (None, "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "general"])
@pytest.mark.parametrize("n", [20, 200])
def test_backward_inside_autocast(options, n):
    leaves = operands(n)
    expected = torch.autograd.grad(sigmoid_attention(*leaves, **options).sum(), leaves)
    out = sigmoid_attention(*leaves, **options).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out, leaves)
    assert {t.dtype for t in found} == {torch.float32}
    if n > 100 or options:  # autograd's own nodes follow autocast, as those of any formula
        torch.testing.assert_close(found, expected)


@BOTH
@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}])
@pytest.mark.parametrize("options", [{}, GENERAL], ids=["plain", "general"])
def test_frozen_inputs(frozen, options):
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(operands())]
    trained = [t for t in leaves if t.requires_grad]
    found, expected = (
        torch.autograd.grad(sigmoid_attention(*leaves, backend=backend, **options).square().sum(), trained)
        for backend in (None, "blocked")
    )
    torch.testing.assert_close(found, expected)


IN_PLACE = {
    "plain": ({}, 4, 4),
    "causal": ({"is_causal": True}, 4, 4),
    "shared heads": ({}, 4, 2),
    "window": ({"window": (20, 3)}, 4, 4),
    "bias": ({"bias": torch.tensor([-1.0, -2.0, -3.0, 0.0]).view(4, 1, 1)}, 4, 4),
    "blocked": ({"backend": "blocked"}, 4, 4),
    "one head, blocked": ({"backend": "blocked"}, 1, 1),
    "three dimensions": ({}, 4, 4),
}


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [6, 100, 200])
def test_the_output_can_be_changed_in_place(what, dtype, n):
    """As in ``out += residual``; autograd refuses that for views."""
    options, heads, key_heads = IN_PLACE[what]
    leaves = operands(n, heads=heads, key_heads=key_heads, dtype=dtype, batch=1)
    inputs = [t[0] for t in leaves] if what == "three dimensions" else leaves
    residual = torch.randn(inputs[0].shape, dtype=dtype)
    gradients = []
    for change in (torch.add, torch.Tensor.add_):
        out = sigmoid_attention(*inputs, enable_gqa=True, **options)
        gradients.append(torch.autograd.grad(change(out, residual).square().sum(), leaves))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("heads", [1, 2])
def test_the_output_of_flash_attn_func_can_be_changed_in_place(heads):
    q = torch.randn(1, 100, heads, 8, dtype=torch.float64, requires_grad=True)
    out = flash_attn_func(q, q, q, causal=True)
    out += 1
    expected = sigmoid_attention(*(q.transpose(1, 2),) * 3, is_causal=True, bias=0.0, backend="reference") + 1
    found = (torch.autograd.grad(o.square().sum(), q)[0] for o in (out, expected))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 120), (torch.bfloat16, 380), (torch.float32, 1000)])
def test_onednn_is_switched_between_forward_and_backward(dtype, n, monkeypatch):
    leaves = operands(n, 128, 2, 2, dtype=dtype, batch=1)
    bias = torch.full((2, 1, 1), -5.0)
    truth = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(sigmoid_attention(*truth, bias=bias.double(), backend="reference").sum(), truth)
    for enabled in (False, True):
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda enabled=enabled: enabled)
        out = sigmoid_attention(*leaves, bias=bias)
        assert saves_weights(out)
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda enabled=enabled: not enabled)
        gradients = torch.autograd.grad(out.sum(), leaves)
        for found, true in zip(gradients, expected, strict=True):
            assert (found - true).norm() < 16 * torch.finfo(dtype).eps * true.norm()


def test_inputs_changed_in_place_are_found():
    q, k, v = operands()
    scaled = q * 1
    out = sigmoid_attention(scaled, k, v)
    with torch.no_grad():
        scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
