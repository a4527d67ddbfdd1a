"""One new token against cached keys on a CPU: the formula in float64."""

import pytest
import torch

from sigattn import sigmoid_kvcache_attention


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["length first", "heads first"])
@pytest.mark.parametrize("keys", [1, 70, 200])
def test_the_output_is_as_accurate_as_the_formula(keys, layout, dtype):
    query, key, value = operands(3, keys, layout, dtype)
    out = sigmoid_kvcache_attention(query, key, value, bias=-2.0, scale=0.3, enable_gqa=True)
    plain = formula(query, key, value, -2.0, 0.3)
    exact = formula(query.double(), key.double(), value.double(), -2.0, 0.3)
    assert out.shape == exact.shape
    assert out.dtype is dtype
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (out, plain))
    assert error <= 2 * allowed + torch.finfo(dtype).eps


def test_samples_of_different_lengths_are_those_of_each_alone():
    query, key, value = operands(5, 70, "heads first", torch.float32)
    lengths = torch.tensor([70, 1, 33, 70, 64])
    out = sigmoid_kvcache_attention(query, key, value, bias=-2.0, cache_seqlens=lengths, enable_gqa=True)
    for b, length in enumerate(lengths.tolist()):
        alone = (query[b : b + 1], key[b : b + 1, :length], value[b : b + 1, :length])
        torch.testing.assert_close(out[b : b + 1], formula(*alone, -2.0, 32**-0.5))


def test_a_window_of_a_cache_after_a_new_key_is_appended():
    query, key, value = operands(2, 90, "length first", torch.float32)
    new = torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 48)
    with torch.no_grad():
        out = sigmoid_kvcache_attention(
            query, key, value, key=new[0], value=new[1], cache_seqlens=80, bias=-2.0, window=(40, 0), enable_gqa=True
        )
    assert torch.equal(key[:, 80:81], new[0])
    exact = formula(*(t.double() for t in (query, key[:, 40:81], value[:, 40:81])), -2.0, 32**-0.5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
