"""Launch cache: repeated calls are not prepared again, and use nothing of the first call's tensors.

The tests in ``compiled/test_calls.py`` have packed sequences as well.
"""

import functools
import gc
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton")

from torch.utils.flop_counter import FlopCounterMode

from sigattn import sigmoid_attention, sigmoid_kvcache_attention
from sigattn.ops import call_cache
from sigattn.ops.gradients import Result
from sigattn.ops.problem import Problem
from sigattn.ops.triton import kernel_args, launch, launch_cache, tuning
from tests.ops import test_correctness
from tests.ops.cases import device_of, nan_filled_memory, numbers, random_case

DEVICE = device_of("triton")


@pytest.fixture(params=[False, True] if torch.cuda.is_available() else [False])
def prepared(monkeypatch, request):
    """Count the problems that were prepared without the cache; on a GPU also with direct launches."""
    monkeypatch.setattr(tuning, "DIRECT_LAUNCH", request.param)
    monkeypatch.setattr(launch_cache, "_NEW", launch_cache._CALLED)  # every call is taken for the second one
    count = []
    for module, name in ((kernel_args, "prepare"), (launch, "decode_arguments")):
        prepare = getattr(module, name)
        monkeypatch.setattr(module, name, lambda problem, prepare=prepare: count.append(1) or prepare(problem))
    return count


def tensors(seed, shape=(1, 1, 20, 16), n=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for _ in range(n)]


def both_passes(q, k, v, backend, **options):
    torch.manual_seed(0)
    out = sigmoid_attention(q, k, v, backend=backend, **options)
    leaves = [x for x in (q, k, v, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


def check(q, k, v, **options):
    results = [both_passes(q, k, v, backend, **options) for backend in ("triton", "reference")]
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-4)


class Kernel:
    """A kernel that writes nothing, or what ``run`` writes."""

    __name__, arg_names = "kernel", ("query", "out")

    def __init__(self, run=lambda **_: None):
        self.run = run

    def __getitem__(self, grid):
        return self.run


@pytest.fixture
def no_op_kernels(monkeypatch):
    for name in ("fwd_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"):
        monkeypatch.setattr(launch, name, Kernel())


@pytest.mark.usefixtures("no_op_kernels")
def test_the_first_call_with_a_key_is_not_stored_and_the_cache_is_bounded(prepared, monkeypatch):
    monkeypatch.setattr(launch_cache, "_NEW", None)
    for seed, count in enumerate([2, 4, 4]):
        both_passes(*tensors(seed), "triton")
        assert len(prepared) == count
    monkeypatch.setattr(call_cache, "_MAX_ENTRIES", 3)
    for n in range(1, 5):
        both_passes(*tensors(0, (1, 1, n, 16)), "triton")
    assert len(call_cache._values) <= 3


@pytest.mark.usefixtures("no_op_kernels")
def test_calls_that_differ_are_prepared_anew(prepared, monkeypatch):
    """In numbers, shapes, layouts, dtypes, gradients that are needed, the alignment of an address, or the tables."""
    leaves = q, k, v = tensors(9)
    grad, mask, in_force = torch.ones(1, 1, 20, 16), torch.ones(20, 20, dtype=torch.bool), tuning.kernel_config

    def misaligned(t):
        return torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape).requires_grad_(t.requires_grad)

    def like(function):
        return [function(t.detach()).requires_grad_() for t in leaves]

    calls = [(leaves, options) for options in (
        {}, {"is_causal": True}, {"window": (3, 2)}, {"scale": 0.5}, {"softcap": 0.5}, {"softcap": 2.0}, {"bias": -1.0},
        {"bias": -2.0}, {"attn_mask": mask}, {"attn_mask": misaligned(mask)},
    )]  # fmt: skip
    calls += [(tensors(1, shape), {}) for shape in ((1, 2, 21, 16), (2, 1, 20, 16))]
    calls += [((q, *tensors(8, (1, 1, 33, 16), 2)), {})]
    calls += [((tensors(9, (1, 2, 20, 16))[0], k, v), {"enable_gqa": True})]  # one key head
    calls += [(like(lambda t: t.transpose(1, 3).contiguous().transpose(1, 3)), {}), (like(torch.Tensor.bfloat16), {})]
    calls += [([misaligned(t) if i == j else t for j, t in enumerate(leaves)], {}) for i in range(3)]

    def prepares(operands, options, grad=None):
        before, out = len(prepared), sigmoid_attention(*operands, backend="triton", **options)
        inputs = [t for t in operands if t.requires_grad]
        torch.autograd.grad(out, inputs, torch.ones_like(out) if grad is None else grad)
        return len(prepared) - before

    for expected in (2, 0):  # passes, the second time by others' tensors
        assert [prepares(*call) for call in calls] == [expected] * len(calls)
    for operands, gradient in (((q, k.detach(), v), grad), (leaves, misaligned(grad))):
        assert [prepares(operands, {}, gradient) for _ in range(2)] == [1, 0]  # the backward pass
    monkeypatch.setattr(tuning, "kernel_config", lambda *given: in_force(*given)._replace(warps=8))
    assert prepares(leaves, {}) == 2


@pytest.mark.parametrize("number", [n for n in numbers(8) if 0 not in random_case(1000 + n, interpreted=True).shape])
def test_any_call_is_cached(prepared, number):
    """The second call, with other tensors, runs what was recorded of the first; new memory is NaN."""
    case = random_case(1000 + number, interpreted=True)
    for case.seed in (1, 2):
        with nan_filled_memory(number % 2 == 1):
            test_correctness.check(case, "triton")
    assert len(prepared) == 2


def test_dropout_draws_a_new_seed_in_each_cached_call(prepared):
    q, k, v = (t.detach() for t in tensors(0))
    first, second = (sigmoid_attention(q, k, v, dropout_p=0.5, backend="triton") for _ in range(2))
    assert not torch.equal(first, second)
    check(*tensors(1), dropout_p=0.5)
    assert len(prepared) == 2


@pytest.mark.parametrize(("options", "paged"), [({"normalize": True}, False), ({"num_splits": 1}, True), ({}, False)])
def test_decoding_is_cached_whatever_the_lengths(prepared, options, paged):
    """The sum over the parts of the keys is stored with the kernel."""
    for seed, lengths in enumerate([(4, 100), (128, 7)]):
        generator = torch.Generator().manual_seed(seed)
        q, keys, values = (torch.randn(2, n, 2, 16, generator=generator).to(DEVICE) for n in (1, 128, 128))
        table = None
        if paged:
            keys, values = (t.view(8, 32, 2, 16) for t in (keys, values))
            table = torch.randperm(8, generator=generator).view(2, 4).to(DEVICE)
        options |= {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=DEVICE), "block_table": table}
        call = functools.partial(sigmoid_kvcache_attention, q, keys, values, bias=-3.0, **options)
        torch.testing.assert_close(call(backend="triton"), call(backend="reference"), rtol=2e-4, atol=2e-4)
    assert len(prepared) == 1


HIDDEN = torch.ones(1, device=DEVICE)


@pytest.mark.parametrize(
    "function",
    [
        lambda p: p.query * float(p.query.sum()),  # a value that another call may not have
        lambda p: p.query if (p.query > 0).any() else p.query + 1,
        lambda p: p.query + HIDDEN,  # a tensor of unknown origin
    ],
    ids=["number", "branch", "unknown tensor"],
)
def test_a_pass_that_depends_on_other_things_is_not_stored(prepared, function):
    recordings = {}
    for seed in range(3):
        problem = Problem(*(t.detach() for t in tensors(seed)))
        assert torch.equal(launch_cache.run(recordings, function, problem), function(problem))
    assert list(recordings.values()) == [launch_cache._NOT_RECORDED]


def test_changes_in_place_are_recorded(prepared):
    """Also those of a view, whose base is returned."""

    def function(p):
        out = torch.zeros_like(p.query)
        out[..., 0] = p.key[..., 0]
        out[..., 1].copy_(p.value[..., 1]).mul_(2)
        torch.add(p.query[..., 2], 1, out=out[..., 2])
        parts = torch.stack([out, p.query.contiguous()]).unbind(0)
        return Result(parts[0], parts[1].sum(-1), p.key.new_full((2,), 3.0))

    recordings = {}
    for seed in range(3):
        problem = Problem(*(t.detach() for t in tensors(seed)))
        for a, b in zip(launch_cache.run(recordings, function, problem), function(problem), strict=True):
            assert torch.equal(a, b)
    assert all(map(callable, recordings.values()))


def test_passes_of_threads_are_recorded_apart(prepared):
    """As autograd's threads, one for each device."""
    both_inside = threading.Barrier(2)

    def function(p):
        both_inside.wait(10)
        out = torch.empty_like(p.query)
        launch_cache.launch(
            Kernel(lambda query, out, **_: out.copy_(query)), (1,), p.query.device, {}, {"query": p.query, "out": out}
        )
        both_inside.wait(10)
        return out

    problems = [Problem(*(t.detach() for t in tensors(n, (1, 1, n, 16)))) for n in (20, 21)]
    calls = [({}, function, problem) for problem in problems]
    threads = [threading.Thread(target=launch_cache.run, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call in calls:
        assert torch.equal(launch_cache.run(*call), call[2].query)  # would wait for the other thread


RECORDED_IN = {
    "no_grad, of one tensor": torch.no_grad,
    "device": lambda: torch.device(DEVICE),
    "inference": torch.inference_mode,
    "counter": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("kind", [*RECORDED_IN, "transform"])
def test_passes_recorded_in_a_mode_or_a_transform_serve_other_calls(prepared, kind):
    """A cached call with one tensor for query, key and value does not imply that the next one has."""
    q, k, v = tensors(0, n=1) * 3 if "one tensor" in kind else tensors(0)
    options = {"normalize": True, "is_causal": True}
    if kind == "transform":
        torch.func.grad(lambda q: sigmoid_attention(q, k, v, backend="triton", **options).sum())(q)
    else:
        with RECORDED_IN[kind]():
            sigmoid_attention(q, k, v, backend="triton", **options)
    before = len(prepared)
    check(*tensors(1), **options)
    assert len(prepared) <= before + 1  # the backward pass


def test_descriptors_are_made_anew_and_entries_hold_no_tensors(prepared, monkeypatch):
    in_force, references = tuning.kernel_config, []
    monkeypatch.setattr(tuning, "kernel_config", lambda *given: in_force(*given)._replace(tma=True))
    for seed in (1, 2):
        leaves = tensors(seed)
        check(*leaves)
        assert len(prepared) == 2
        references += [StorageWeakRef(t.untyped_storage()) for t in leaves]  # also of what ``detach`` returns
    del leaves
    gc.collect()
    assert all(r.expired() for r in references)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("calls", [1, 2])
def test_cuda_graphs_of_cached_calls(prepared, calls):
    """Captured is the launch that is recorded, or one after that; calls before ran on another stream."""
    q, k, v = tensors(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(calls):
            both_passes(q, k, v, "triton", is_causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_passes(q, k, v, "triton", is_causal=True)
    with torch.no_grad():
        for t, other in zip((q, k, v), tensors(1), strict=True):
            t.copy_(other)
    graph.replay()
    torch.testing.assert_close(found, both_passes(q, k, v, "reference", is_causal=True), rtol=2e-4, atol=2e-4)
