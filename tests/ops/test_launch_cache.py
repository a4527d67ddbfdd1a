"""Launch cache: repeated calls are not prepared again, and use nothing of the first call's tensors."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

from sigattn import sigmoid_attention
from sigattn.ops.problem import Problem
from sigattn.ops.triton import kernel_args, launch_cache, tuning
from tests.ops.cases import device_of

DEVICE = device_of("triton")


class Everything(set):
    def __contains__(self, x):
        return True


@pytest.fixture(params=[False, True] if torch.cuda.is_available() else [False])
def prepared(monkeypatch, request):
    """Count the problems that were prepared without the cache; on a GPU also with direct launches."""
    monkeypatch.setattr(tuning, "DIRECT_LAUNCH", request.param)
    count = []
    prepare = kernel_args.prepare
    monkeypatch.setattr(launch_cache, "_cache", {})
    monkeypatch.setattr(launch_cache, "_seen", Everything())
    monkeypatch.setattr(kernel_args, "prepare", lambda problem: count.append(1) or prepare(problem))
    return count


def tensors(seed, shape=(1, 1, 20, 16), n=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for _ in range(n)]


def both_passes(q, k, v, backend, **options):
    out = sigmoid_attention(q, k, v, backend=backend, **options)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


def check(q, k, v, **options):
    found = both_passes(q, k, v, "triton", **options)
    for a, b in zip(found, both_passes(q, k, v, "reference", **options), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_repeated_calls_are_not_prepared_again(prepared):
    check(*tensors(0), is_causal=True)
    assert len(prepared) == 2  # forward and backward
    for seed in (1, 2):
        check(*tensors(seed), is_causal=True)
    assert len(prepared) == 2


def test_the_first_call_with_a_key_is_not_stored_and_the_cache_is_bounded(prepared, monkeypatch):
    monkeypatch.setattr(launch_cache, "_seen", set())
    for seed, count in enumerate([2, 4, 4]):
        check(*tensors(seed))
        assert len(prepared) == count
    assert len(launch_cache._cache) == 2
    monkeypatch.setattr(launch_cache, "_MAX_ENTRIES", 1)
    for n in range(1, 7):
        check(*tensors(n, (1, 1, n, 16)))
    assert len(launch_cache._seen) <= 4
    monkeypatch.setattr(launch_cache, "_seen", Everything())
    for n in (1, 2):
        check(*tensors(n, (1, 1, n, 16)))
    assert len(launch_cache._cache) <= 1


def test_one_tensor_as_query_key_and_value(prepared):
    """A cached call with one tensor for all three does not imply that the next one has."""
    (x,) = tensors(0, n=1)
    q, k, v = (x.view_as(x) for _ in range(3))
    with torch.no_grad():
        same = sigmoid_attention(x, x, x, backend="triton")
    torch.testing.assert_close(same, sigmoid_attention(q, k, v, backend="reference"), rtol=2e-4, atol=2e-4)
    check(*tensors(1))
    check(q, k, v)


KINDS = [
    {},
    {"is_causal": True},
    {"window": (3, 2)},
    {"scale": 0.5},
    {"softcap": 0.5},
    {"softcap": 2.0},
    {"bias": -1.0},
    {"bias": -2.0},
]


def test_different_calls_have_different_keys(prepared):
    shapes = [(1, 1, 20, 16), (1, 2, 21, 16), (2, 1, 20, 16)]
    after = []
    for _ in range(2):
        for seed, options in enumerate(KINDS):
            for shape in shapes if seed < 2 else shapes[:1]:
                check(*tensors(seed, shape), **options)
        q, k, v = tensors(9)
        check(q, *tensors(8, (1, 1, 33, 16), 2), is_causal=True)  # more keys than queries
        check(tensors(9, (1, 2, 20, 16))[0], k, v, enable_gqa=True)  # one key head
        check(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))
        one_off = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (q, k, v)]  # another alignment
        check(*one_off)
        after.append(len(prepared))
    assert after[1] == after[0]  # the second round repeats the first


def test_alignment_and_dtype_are_part_of_the_key():
    """Kernels are specialised by dtype and by the alignment of each address to 16 bytes."""
    aligned = tensors(0, n=4)
    moved = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in aligned]

    def kind(operands):
        return launch_cache.cache_key(Problem(*operands[:3]), operands[3])

    kinds = {kind(aligned), kind([*aligned[:3], aligned[3].bfloat16()])}  # the gradient's dtype may be another
    for at in range(4):
        kinds.add(kind([*aligned[:at], moved[at], *aligned[at + 1 :]]))
    assert len(kinds) == 6
    assert kind(tensors(1, n=4)) == kind(aligned)


def test_only_plain_calls_are_cached(prepared):
    q, k, v = tensors(0)
    for options in (
        {"alibi_slopes": torch.ones(1, device=DEVICE)},
        {"attn_mask": torch.ones(20, 20, dtype=torch.bool, device=DEVICE)},
        {"key_lengths": torch.tensor([7])},
        {"bias": torch.zeros(20, 1, device=DEVICE)},
    ):
        before = len(prepared)
        for _ in range(2):
            check(q, k, v, **options)
        assert len(prepared) == before + 4
    before = len(prepared)
    for _ in range(2):
        sigmoid_attention(q, k, v, dropout_p=0.5, backend="triton")
    assert len(prepared) == before + 2


def test_some_gradients_only(prepared):
    q, k, v = tensors(0)
    for _ in range(2):
        out = sigmoid_attention(q, k.detach(), v, backend="triton")
        expected = sigmoid_attention(q, k.detach(), v, backend="reference")
        for a, b in zip(*(torch.autograd.grad(o.sum(), (q, v)) for o in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
    check(q, k, v)


def test_the_tables_are_part_of_the_key(prepared, monkeypatch):
    check(*tensors(0))
    in_force = tuning.kernel_config
    monkeypatch.setattr(tuning, "kernel_config", lambda *given: in_force(*given)._replace(tma=True))
    check(*tensors(1))
    assert len(prepared) == 4
    check(*tensors(2))  # descriptors are made anew for other tensors
    assert len(prepared) == 4


def test_entries_hold_no_tensors(prepared):
    q, k, v = tensors(0)
    check(q, k, v)
    references = [weakref.ref(t) for t in (q, k, v)]
    del q, k, v
    gc.collect()
    assert [r() for r in references] == [None] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("calls", [1, 2])
def test_cuda_graphs_of_cached_calls(prepared, calls):
    """Captured is the launch that is compared with Triton's, or one after that; calls before ran on another stream."""
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
    for a, b in zip(found, both_passes(q, k, v, "reference", is_causal=True), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
