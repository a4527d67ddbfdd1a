"""One new token and few cached keys on a CPU, by products of PyTorch and by backend "llvm": the formula in float64."""

import math

import pytest
import torch

from sigattn import sigmoid_kvcache_attention
from sigattn.ops import llvm
from sigattn.ops.cpu import decode

KERNELS = pytest.param(
    "kernels",
    marks=pytest.mark.skipif(llvm.machine_unavailable() is not None, reason="needs backend llvm"),
)
DTYPES = [torch.float32, torch.bfloat16]


def formula(query, key, value, bias, scale):
    """Return the output of (B, 1, Hq, D) and (B, M, Hkv, …) in the dtype of the arguments."""
    repeat = query.shape[2] // key.shape[2]
    k, v = (t.repeat_interleave(repeat, 2).transpose(1, 2) for t in (key, value))
    return ((query.transpose(1, 2) @ k.mT * scale + bias).sigmoid() @ v).transpose(1, 2)


def operands(batch, keys, layout, dtype, heads=(6, 2), width=32, value_width=48):
    """Return query, key and value, (B, M, H, …) in memory, or (B, H, M, …)."""
    generator = torch.Generator().manual_seed(0)

    def cache(features):
        shape = (batch, keys, heads[1], features) if layout == "length first" else (batch, heads[1], keys, features)
        t = torch.randn(shape, generator=generator).to(dtype)
        return t if layout == "length first" else t.transpose(1, 2)

    query = torch.randn(batch, 1, heads[0], width, generator=generator).to(dtype)
    return query, cache(width), cache(value_width)


@pytest.fixture(params=["products", KERNELS])
def way(request, monkeypatch):
    """Compute by products of PyTorch, or by kernels from one key on."""
    monkeypatch.setattr(llvm, "_MEASURED", True)
    monkeypatch.setattr(decode, "KERNEL_WORK", 0 if request.param == "kernels" else math.inf)
    monkeypatch.setattr(decode, "KERNELS_FROM", 1)
    monkeypatch.setattr(llvm, "is_long_enough", lambda *_, **__: True)
    calls, forward = [], llvm.forward
    monkeypatch.setattr(llvm, "forward", lambda problem: calls.append(problem) or forward(problem))
    yield request.param
    assert bool(calls) == (request.param == "kernels")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["length first", "heads first"])
@pytest.mark.parametrize("keys", [1, 70, 200])
def test_output(way, keys, layout, dtype):
    query, key, value = operands(3, keys, layout, dtype)
    with torch.no_grad():
        out = decode.attend(query, key, value, -2.0, 0.3)
        plain = formula(query, key, value, -2.0, 0.3)
    exact = formula(query.double(), key.double(), value.double(), -2.0, 0.3)
    assert out.shape == exact.shape
    assert out.dtype is dtype
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (out, plain))
    assert error <= 2 * allowed + torch.finfo(dtype).eps


def test_samples_are_divided(way, monkeypatch):
    """So that copies stay small."""
    monkeypatch.setattr(decode, "PACKED", 2 * 70 * 2 * 32)
    monkeypatch.setattr(decode, "FEW", 2 * 70 * 2 * 32)
    query, key, value = operands(5, 70, "heads first", torch.float32)
    out = decode.attend(query, key, value, -2.0, 0.3)
    alone = [decode.attend(*(t[b : b + 1] for t in (query, key, value)), -2.0, 0.3) for b in range(5)]
    torch.testing.assert_close(out, torch.cat(alone))


def test_by_a_cache(way):
    """The part of a cache that a window lets the query see, after a new key is appended."""
    query, key, value = operands(2, 90, "length first", torch.float32)
    new = torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 48)
    with torch.no_grad():
        out = sigmoid_kvcache_attention(
            query, key, value, key=new[0], value=new[1], cache_seqlens=80, bias=-2.0, window=(40, 0), enable_gqa=True
        )
    assert torch.equal(key[:, 80:81], new[0])
    exact = formula(*(t.double() for t in (query, key[:, 40:81], value[:, 40:81])), -2.0, 32**-0.5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_longer_caches_take_kernels_only(monkeypatch):
    """Products of PyTorch are slower for them than the general implementation, which splits them."""
    query, key, value = operands(1, 10_000, "length first", torch.float32)  # 64 elements of K a key
    monkeypatch.setattr(decode, "_has_kernels", lambda *_: True)
    assert [decode.is_faster(query, key, value, n) for n in (8_192, 8_193, 16_384, 16_385)] == [True, True, True, False]
    monkeypatch.setattr(decode, "_has_kernels", lambda *_: False)
    assert [decode.is_faster(query, key, value, n) for n in (8_192, 8_193)] == [True, False]


@pytest.mark.parametrize(
    ("batch", "keys", "kernels"), [(1, 31, False), (200, 31, False), (1, 64, False), (64, 64, True)]
)
def test_which_calls_take_kernels(monkeypatch, batch, keys, kernels):
    """From 32 keys and 2^17 elements of K on, where the backend is the default."""
    monkeypatch.setattr(llvm, "_MEASURED", True)
    monkeypatch.setattr(llvm, "unavailable", lambda _: None)
    found = []
    monkeypatch.setattr(llvm, "forward", lambda p: found.append(p) or p.query.new_zeros(*p.query.shape[:3], 48))
    query, key, value = operands(batch, keys, "heads first", torch.float32)
    decode.attend(query, key, value, -2.0, 0.3)
    assert bool(found) == kernels
    monkeypatch.setattr(llvm, "_MEASURED", False)
    found.clear()
    decode.attend(query, key, value, -2.0, 0.3)
    assert not found
