"""Repeated calls: what was prepared for one call serves another only where the result is the same."""

import contextlib
import functools
import gc
import threading

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import sigattn
from sigattn import flash, sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from sigattn.ops import call_cache
from sigattn.ops.attention import DENSE
from sigattn.ops.kvcache import KV_CACHE

N = 20


def tensor(*shape, seed=0, requires_grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def dense(seed, *, layout=lambda t: t, context=contextlib.nullcontext, grads="qkv", shape=(2, 4, N, 16), **options):
    """Return the result of a call, and its gradients, or the error."""
    q, k, v = (layout(tensor(*shape, seed=3 * seed + i)) for i in range(3))
    q, k, v = (t.detach().requires_grad_(name in grads) for t, name in zip((q, k, v), "qkv", strict=True))
    options = {name: value(seed) if callable(value) else value for name, value in options.items()}
    torch.manual_seed(seed)
    try:
        with context():
            out = sigmoid_attention(q, k, v, **options)
        leaves = [t for t in (q, k, v, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        return [out, *(torch.autograd.grad(out.float().square().sum(), leaves) if out.requires_grad else [])]
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def packed(seed, starts=(0, 5, N), longest=15, **options):
    q, k, v = (tensor(N, 4, 16, seed=3 * seed + i) for i in range(3))
    offsets = torch.tensor(starts, dtype=torch.int32)
    try:
        return sigmoid_varlen_attention(q, k, v, offsets, offsets, longest, longest, **options)
    except ValueError as error:
        return str(error)


def cached(seed, lengths=(N, 7), new=0, new_heads=4, of_new=lambda t: t, **options):
    q, keys, values = tensor(2, 1, 4, 16, seed=seed), *tensor(2, 2, N, 4, 16, seed=seed + 100)
    added = [of_new(t) for t in tensor(2, 2, new, new_heads, 16, seed=seed + 200)] if new else []
    lengths = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, tuple) else lengths
    try:
        out = sigmoid_kvcache_attention(q, keys, values, *added, cache_seqlens=lengths, bias=-3.0, **options)
        return out, keys, values
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)


def with_grad(t):
    return t.requires_grad_()


@contextlib.contextmanager
def precision(name):
    sigattn.set_sigmoid_precision(name)
    yield
    sigattn.set_sigmoid_precision("accurate")


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def rows_first(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def of_heads(seed, requires_grad=False):
    return tensor(4, 1, 1, seed=seed, requires_grad=requires_grad)


def sometimes_lifted(seed):
    return of_heads(seed) - 200 * (seed - 1)


OPTIONS = [
    {"grads": ""}, {}, {"is_causal": True}, {"is_causal": 1}, {"window": (3, 1)}, {"window": [3, 1]},
    {"window": (3, True)}, {"shape": (1, 4, 200, 16), "normalize": True, "bias": sometimes_lifted},  # saves no weights
    {"scale": 0.5}, {"scale": 1.0}, {"scale": 1}, {"scale": True}, {"scale": lambda seed: torch.tensor(0.1 + seed)},
    {"scale": np.float64(0.5)}, {"softcap": 2.0}, {"bias": -1.0}, {"bias": -2.0}, {"bias": -2}, {"bias": of_heads},
    {"bias": functools.partial(of_heads, requires_grad=True)}, {"bias": lambda seed: torch.tensor(-1.0 - seed)},
    {"bias": lambda seed: of_heads(seed).double()}, {"normalize": True}, {"normalize": True, "bias": -200.0},
    {"normalize": True, "bias": sometimes_lifted}, {"query_offset": 3, "is_causal": True},
    {"attn_mask": lambda seed: tensor(N, N, seed=seed) > 0}, {"attn_mask": lambda seed: tensor(1, 4, N, N, seed=seed)},
    {"attn_mask": lambda seed: tensor(1, 1, N, N, seed=seed, requires_grad=True)},
    {"attn_mask": lambda seed: (tensor(2, 1, 1, N, seed=seed) > 0).expand(2, 4, N, N)},
    {"alibi_slopes": lambda seed: tensor(4, seed=seed)}, {"alibi_slopes": lambda seed: tensor(1, 4, 2, seed=seed)},
    {"key_lengths": lambda seed: torch.tensor([seed, N])}, {"key_lengths": lambda i: torch.tensor([N + 2 - i, 1])},
    {"dropout_p": 0.5}, {"dropout_p": 0.25}, {"dropout_p": True}, {"backend": "blocked"}, {"backend": "reference"},
    {"grads": "kv"}, {"layout": rows_first}, {"layout": misaligned}, {"layout": torch.Tensor.bfloat16},
    {"layout": lambda t: torch.imag(torch.conj(torch.complex(t, t)))}, {"shape": (2, 4, N, 17)}, {"shape": (4, N, 16)},
    {"layout": lambda t: t[:1].expand(2, -1, -1, -1)}, {"layout": lambda t: t.mT.contiguous().mT},
    {"context": torch.no_grad}, {"context": torch.inference_mode}, {"context": lambda: threads(1)},
    {"context": lambda: precision("fast")}, {"context": lambda: sigattn.backend("blocked")},
    {"context": lambda: sigattn.backend("reference")}, {"context": lambda: torch.autocast("cpu")},
    {"context": lambda: torch.autocast("cpu"), "layout": torch.Tensor.bfloat16}, {"backend": "llvm"},
    {"context": lambda: torch.device("cpu")}, {"backend": "llvm", "layout": torch.Tensor.bfloat16},
    {"backend": "llvm", "layout": lambda t: misaligned(t.bfloat16())},
]  # fmt: skip
CALLS = {
    "dense": [functools.partial(dense, **options) for options in OPTIONS],
    "packed": [functools.partial(packed, **options) for options in (
        {}, {"starts": (0, 7, N)}, {"starts": (0, 3, N)}, {"starts": (0, 9, 4)}, {"is_causal": True}, {"longest": 20},
        {"bias": -2.0}, {"normalize": True}, {"backend": "blocked"},
    )],
    "cached": [functools.partial(cached, **options) for options in (
        {}, {"lengths": (3, 4)}, {"lengths": (3, N + 1)}, {"lengths": 5}, {"lengths": None}, {"is_causal": True},
        {"new": 1, "lengths": (3, 4)}, {"new": 1, "lengths": (3, N)}, {"normalize": True}, {"num_splits": 2},
        {"new": 1}, {"new": 2, "lengths": (3, 4)}, {"new": 1, "lengths": 3}, {"new": 1, "lengths": (-1, 4)},
        {"new": 1, "lengths": (3, 4), "new_heads": 2}, {"new": 1, "lengths": (5, 6), "normalize": True},
        *({"new": 1, "lengths": (3, 4), "of_new": f} for f in (with_grad, torch.Tensor.double, torch.Tensor.to_sparse)),
    )],
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_after_all_others_is_as_if_it_were_the_first(kind):
    """Also calls that differ in type, value, layout, gradients, mode or setting only; the errors are the same."""
    expected = {}
    for i, call in enumerate(CALLS[kind]):
        for seed in (1, 2):
            call_cache.clear()
            expected[i, seed] = call(seed)
    call_cache.clear()
    for _ in range(3):
        for seed in (2, 1):
            for i, call in enumerate(CALLS[kind]):
                found, first = call(seed), expected[i, seed]
                if isinstance(first, str):
                    assert found == first
                else:
                    torch.testing.assert_close(found, first, rtol=0, atol=0, equal_nan=True)


def test_repeated_calls_are_known_and_hold_no_tensors(monkeypatch):
    made, original, original_of_cache = [], DENSE.choose, KV_CACHE.choose
    monkeypatch.setattr(DENSE, "choose", lambda *given: made.append(1) or original(*given))
    known = [{}, {"bias": of_heads}, {"attn_mask": lambda seed: tensor(N, N, seed=seed)}, {"dropout_p": 0.5}]
    known += [{"normalize": True}, {"context": torch.inference_mode}, {"key_lengths": lambda _: torch.tensor([3, N])}]
    for options in known:
        made.clear()
        for seed in range(3):
            dense(seed, **options)
        assert len(made) == 1, options
    monkeypatch.setattr(KV_CACHE, "choose", lambda *given: made.append(1) or original_of_cache(*given))
    for options in ({}, {"new": 1, "lengths": (3, 4)}):
        made.clear()
        for seed in range(3):
            cached(seed, **options)
        assert len(made) == 1, options
    q, k, v = (tensor(2, 4, N, 16, seed=i, requires_grad=True) for i in range(3))
    references = [StorageWeakRef(t.untyped_storage()) for t in (q, k, v)]
    for _ in range(3):
        sigmoid_attention(q, k, v).sum().backward()
    del q, k, v
    gc.collect()
    assert all(reference.expired() for reference in references)


def test_one_tensor_for_all_operands_does_not_stand_for_three():
    x, y, z = (tensor(1, 2, N, 16, seed=i) for i in range(3))
    sigmoid_attention(x, x, x)
    sigmoid_attention(x, x, x)
    torch.testing.assert_close(sigmoid_attention(x, y, z), sigmoid_attention(x, y, z, backend="reference"))


def test_threads_that_make_the_same_call_do_not_share_arguments():
    expected = {seed: dense(seed, normalize=True) for seed in range(8)}
    wrong = []

    def repeat(seed):
        for _ in range(200):
            if any(not torch.equal(a, b) for a, b in zip(dense(seed, normalize=True), expected[seed], strict=True)):
                wrong.append(seed)

    workers = [threading.Thread(target=repeat, args=(seed,)) for seed in expected]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_profiler_sees_the_ops_of_repeated_calls():
    q, k, v = tensor(3, 1, 2, N, 16).unbind()
    for _ in range(3):
        sigmoid_attention(q, k, v)
    with torch.profiler.profile(acc_events=True) as profile:
        sigmoid_attention(q, k, v)
    assert "sigattn::dense_forward" in {event.key for event in profile.key_averages()}


def test_flash_calls_are_repeated_with_other_values():
    for seed in range(3):
        q, k, v = (tensor(1, N, 2, 16, seed=3 * seed + i) for i in range(3))
        expected = sigmoid_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, backend="reference")
        torch.testing.assert_close(flash.flash_attn_func(q, k, v, causal=True), expected.transpose(1, 2))
