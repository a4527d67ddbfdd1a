"""Weights that are saved for the backward pass: their memory, and the derivatives that are computed from them."""

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.flash import flash_attn_func
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem, make_problem
from tests.ops.cases import HAS_LLVM

BOTH = pytest.mark.parametrize("backend", ["blocked", *(["llvm"] if HAS_LLVM else [])])
GENERAL = {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}


def operands(n=200, d=32, heads=4, key_heads=4, dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    shapes = (batch, heads, n, d), (batch, key_heads, n, d), (batch, key_heads, n, d)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


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


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_gradients_of_saved_weights_equal_those_of_weights_computed_again(backend, options, key_heads, dtype):
    q, k, v = (t.detach() for t in operands(key_heads=key_heads, dtype=dtype))
    problem = make_problem(Problem, q, k, v, **{"query_offset": 0, **options})
    if DENSE.backends[backend].unavailable(problem) is not None:
        pytest.skip("not supported")
    with torch._C._AutoDispatchBelowAutograd():
        out, weights, _ = DENSE.forward_op(*problem, backend, True)
    assert weights.numel() == 0 if DENSE.backends[backend].saved_weights(problem) is None else weights.numel()
    again, nothing, _ = DENSE.forward_op(*problem, backend, False)
    assert not nothing.numel()
    torch.testing.assert_close(out, again)
    needs_mask = problem.attn_mask is not None and problem.attn_mask.is_floating_point() and backend == "blocked"
    needs = [True, True, True, problem.bias is not None and problem.bias.dim() > 0, needs_mask, False]
    grad = torch.randn_like(out)
    saved, *others = (
        DENSE.backward_op(grad, nothing, w, nothing, *problem, backend, needs) for w in (weights, weights, nothing)
    )
    assert all(map(torch.equal, saved, others[0]))  # once more, from the same weights
    tolerance = {} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(saved, others[1], **tolerance)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_saved_weights_take_at_most_four_times_the_memory_of_the_inputs(backend, dtype, key_heads):
    saved = []
    for n in (8, 40, 80, 136, 192, 256, 320, 384, 392, 500, 800):
        q, k, v = operands(n, key_heads=key_heads, dtype=dtype, batch=1)
        if DENSE.backends[backend].unavailable(Problem(q, k, v)) is not None:
            pytest.skip("not supported")
        described = DENSE.backends[backend].saved_weights(Problem(q, k, v))
        saved.append(described is not None)
        if described is not None:
            shape, kind = described
            assert torch.Size(shape).numel() * kind.itemsize <= 4 * (q.nbytes + k.nbytes + v.nbytes)
    assert saved[1]
    assert not saved[-1]


@BOTH
@pytest.mark.parametrize("options", [{}, GENERAL], ids=["plain", "general"])
def test_batched_gradients(backend, options):
    leaves = operands()
    out = sigmoid_attention(*leaves, backend=backend, **options)
    grads = torch.randn(3, *out.shape)
    found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        expected = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        torch.testing.assert_close(tuple(t[i] for t in found), expected)


@BOTH
@pytest.mark.parametrize("options", [{}, GENERAL], ids=["plain", "general"])
@pytest.mark.parametrize("n", [20, 200])
def test_a_backward_pass_inside_autocast_does_not_follow_it(backend, options, n):
    leaves = operands(n)
    expected = torch.autograd.grad(sigmoid_attention(*leaves, backend=backend, **options).sum(), leaves)
    out = sigmoid_attention(*leaves, backend=backend, **options).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out, leaves)
    torch.testing.assert_close(found, expected)


@BOTH
@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}])
def test_frozen_inputs(backend, frozen):
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(operands())]
    trained = [t for t in leaves if t.requires_grad]
    found, expected = (
        torch.autograd.grad(sigmoid_attention(*leaves, backend=b, **GENERAL).square().sum(), trained)
        for b in (backend, "reference")
    )
    torch.testing.assert_close(found, expected)


IN_PLACE = {
    "plain": ({}, 4, 4),
    "causal": ({"is_causal": True}, 4, 4),
    "shared heads": ({}, 4, 2),
    "window": ({"window": (20, 3)}, 4, 4),
    "bias": ({"bias": torch.tensor([-1.0, -2.0, -3.0, 0.0]).view(4, 1, 1)}, 4, 4),
    "blocked": ({"backend": "blocked"}, 4, 4),
    **({"llvm": ({"backend": "llvm"}, 4, 4)} if HAS_LLVM else {}),
    "one head, blocked": ({"backend": "blocked"}, 1, 1),
    "three dimensions": ({}, 4, 4),
}


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [6, 200])
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
    expected = sigmoid_attention(*(q.transpose(1, 2),) * 3, is_causal=True, backend="reference") + 1
    found = (torch.autograd.grad(o.square().sum(), q)[0] for o in (out, expected))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # PyTorch's, of restoring its own flags
@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 120), (torch.bfloat16, 380), (torch.float32, 1000)])
def test_onednn_is_switched_between_forward_and_backward(dtype, n):
    leaves = operands(n, 128, 2, 2, dtype=dtype, batch=1)
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
