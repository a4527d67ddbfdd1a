"""Derivatives of the registered ops: exported, by torch.func, or called directly."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sigattn import FLOP_FORMULAS, flash, sigmoid_attention
from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]


class Model(torch.nn.Module):
    """Dense and packed attention."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        x, starts = self.linear(x).unflatten(-1, (2, 4)), torch.tensor([0, 3, 10])
        packed = flash.flash_attn_varlen_func(*[x.flatten(0, 1)] * 3, starts, starts, 7, 7, causal=True)
        return sigmoid_attention(*[x.transpose(1, 2)] * 3, is_causal=True).sum() + packed.square().sum()


def test_an_exported_model_trains():
    model, x = Model(), torch.randn(2, 5, 8)
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    program = torch.export.export(model, (x,))
    for exported in (program.module(), program.run_decompositions().module()):
        exported.zero_grad()
        exported(x).backward()
        torch.testing.assert_close([p.grad for p in exported.parameters()], expected)


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
    tensors, rest = arguments("varlen_forward")[:3], arguments("varlen_forward")[3:]
    tensors = [t[:, :1, :1].double().requires_grad_() for t in tensors]
    call = torch.ops.sigattn.varlen_forward.default
    assert torch.autograd.gradgradcheck(lambda *tensors: call(*tensors, *rest)[0], tensors)


def test_packed_sequences_are_mapped():
    q, *rest = arguments("varlen_forward")
    many, call = torch.stack([q, q + 1, q - 1]), torch.ops.sigattn.varlen_forward.default
    gradient = torch.func.grad(lambda q: call(q, *rest)[0].square().sum())
    torch.testing.assert_close(torch.vmap(gradient)(many), torch.stack([gradient(one) for one in many]))


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


class Watched(torch.Tensor):
    """A tensor that keeps what is called with it."""

    called = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.called.append(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_modes_subclasses_and_profilers_see_the_op():
    q = torch.randn(1, 1, 12, 8, requires_grad=True)
    with torch.profiler.profile(acc_events=True) as profiler:
        torch.autograd.grad(sigmoid_attention(q, q, q).sum(), q)
    assert {"sigattn::dense_forward", "sigattn::dense_backward"} <= {event.key for event in profiler.key_averages()}
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as mode, torch.no_grad():
        sigmoid_attention(q, q, q)
    assert mode.get_total_flops() > 0
    with torch.no_grad():
        sigmoid_attention(q.as_subclass(Watched), q, q)
    assert torch.ops.sigattn.dense_forward.default in Watched.called
