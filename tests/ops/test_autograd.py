"""Derivatives of the registered ops: exported, by torch.func, or called directly."""

import pytest
import torch

from sigattn import flash, sigmoid_attention
from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


def dense(x):
    y = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return sigmoid_attention(y, y, y, is_causal=True)


def packed(x):
    y = x.flatten(0, 1).unflatten(-1, (2, 4))
    starts = torch.tensor([0, 3, 10])
    return flash.flash_attn_varlen_func(y, y, y, starts, starts, 7, 7, causal=True)


class Model(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.linear, self.attend = torch.nn.Linear(8, 8), attend

    def forward(self, x):
        return self.attend(self.linear(x))


@pytest.mark.parametrize("attend", [dense, packed])
def test_an_exported_model_trains(attend):
    model, x = Model(attend), torch.randn(2, 5, 8)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    program = torch.export.export(model, (x,))
    for exported in (program.module(), program.run_decompositions().module()):
        exported.zero_grad()
        exported(x).square().sum().backward()
        for p, e in zip(exported.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, e)


def arguments(op):
    """Return arguments of a registered op, of which the first requires grad."""
    torch.manual_seed(0)
    options = {"right": 0, "softcap": 2.5}
    if op == "dense_forward":
        return [*Problem(*torch.randn(3, 1, 2, 5, 4).unbind(), **options), "blocked", False]
    if op == "varlen_forward":
        starts, tensors = torch.tensor([0, 2, 5]), torch.randn(3, 5, 2, 4).unbind()
        return [*VarlenProblem(*tensors, None, None, None, starts, starts, None, 3, 3, **options), "blocked", False]
    q, k, v = torch.randn(1, 1, 2, 4), *torch.randn(2, 1, 8, 2, 4).unbind()
    bias = torch.tensor(-1.0, dtype=torch.float64)
    return [*KVCacheProblem(q, k, v, torch.tensor([5]), bias, **options), "blocked", False]


@pytest.mark.parametrize("op", ["dense_forward", "varlen_forward", "kvcache_forward"])
def test_forward_mode_through_the_op_itself_raises(op):
    args = arguments(op)
    call = getattr(torch.ops.sigattn, op).default
    with pytest.raises(RuntimeError, match='forward-mode derivatives need backend="reference"'):
        torch.func.jvp(lambda q: call(q, *args[1:]), (args[0],), (args[0],))
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(args[0], args[0])
        with pytest.raises(RuntimeError, match='forward-mode derivatives need backend="reference"'):
            call(dual, *args[1:])


@pytest.mark.parametrize("op", ["dense_forward", "varlen_forward"])
def test_levels_of_torch_func_each_record(op):
    """Derivative by torch.func of a function that closes over a tensor that requires grad."""
    q, k, *rest = arguments(op)
    k.requires_grad_()

    def call(q):
        return getattr(torch.ops.sigattn, op).default(q, k, *rest)[0].square().sum()

    (expected,) = torch.autograd.grad(call(q), k)
    loss, pullback = torch.func.vjp(call, q)
    torch.testing.assert_close(torch.autograd.grad(loss, k, retain_graph=True)[0], expected)
    (gradient,) = pullback(torch.ones(()))
    q.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(call(q), q)[0])
    expected = torch.autograd.grad(torch.autograd.grad(call(q), q, create_graph=True)[0].sum(), k)
    torch.testing.assert_close(torch.autograd.grad(gradient.sum(), k), expected)


def test_second_derivatives_of_packed_sequences_are_those_of_finite_differences():
    args = arguments("varlen_forward")
    tensors, rest = args[:3], args[3:]
    tensors = [t[:, :1, :2].double().requires_grad_() for t in tensors]

    def call(*tensors):
        return torch.ops.sigattn.varlen_forward.default(*tensors, *rest)[0]

    assert torch.autograd.gradgradcheck(call, tensors)


def test_packed_sequences_are_mapped():
    q, *rest = arguments("varlen_forward")
    many = torch.stack([q, q + 1, q - 1])

    def gradient(q):
        call = torch.ops.sigattn.varlen_forward.default
        return torch.func.grad(lambda q: call(q, *rest)[0].square().sum())(q)

    expected = torch.stack([gradient(one) for one in many])
    torch.testing.assert_close(torch.vmap(gradient)(many), expected)


def test_a_cache_has_no_gradient_and_says_so():
    q, *rest = arguments("kvcache_forward")
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="sigmoid_kvcache_attention has no gradient"):
        torch.ops.sigattn.kvcache_forward.default(q, *rest)
    cache, new = torch.zeros(1, 8, 2, 4), torch.randn(1, 1, 2, 4, requires_grad=True)
    start = torch.tensor([5])
    with pytest.raises(RuntimeError, match="cache has no gradient"):
        torch.ops.sigattn.append_to_cache.default(cache, cache.clone(), new, new, start, None)
    assert not cache.any()
    with torch.no_grad():
        torch.ops.sigattn.append_to_cache.default(cache, cache.clone(), new, new, start, None)
    assert torch.equal(cache[:, 5:6], new.detach())


def test_a_profiler_sees_both_ops():
    q = torch.randn(1, 1, 12, 8, requires_grad=True)
    with torch.profiler.profile(acc_events=True) as profiler:
        torch.autograd.grad(sigmoid_attention(q, q, q).sum(), q)
    assert {"sigattn::dense_forward", "sigattn::dense_backward"} <= {event.key for event in profiler.key_averages()}
