"""The operators for packed sequences and caches."""

import pytest
import torch

from sigattn import sigmoid_kvcache_attention, sigmoid_varlen_attention
from sigattn.flash import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.ops.truth import one_sequence

CU_Q, CU_K = torch.tensor([0, 3, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 6, 12], dtype=torch.int32)


def formula(q, k, v, bias, **options):
    return one_sequence(q, k, v, q.dtype, bias, **options)


def test_equal_to_the_functions_of_flash_attn():
    """Which tests/test_flash.py and tests/test_flash_kvcache.py compare with the formula over all options."""
    q, k, v = torch.randn(9, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 6)
    bias, slopes = torch.randn(3, 4), torch.rand(4)
    common = {"alibi_slopes": slopes, "softcap": 2.0, "normalize": True}
    ours = sigmoid_varlen_attention(
        q, k, v, CU_Q, CU_K, 6, 6, bias=bias.view(3, 4, 1, 1), window=(3, 5), scale=0.3, is_causal=True,
        enable_gqa=True, **common,
    )  # fmt: skip
    options = {"window_size": (3, 5), "softmax_scale": 0.3, "causal": True, **common}
    assert torch.equal(flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 6, 6, sigmoid_bias=bias, **options), ours)
    query, keys, values = torch.randn(2, 2, 4, 8), torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 6)
    new, padding = (torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 6)), torch.tensor([1, 0])
    where = {"cache_seqlens": torch.tensor([5, 9]), "block_table": torch.tensor([[3, 0, 5], [1, 4, 2]])}
    ours = sigmoid_kvcache_attention(
        query, keys.clone(), values.clone(), *new, bias=bias[0].view(4, 1, 1), window=(3, 5), scale=0.3, is_causal=True,
        enable_gqa=True, left_padding=padding, **where, **common,
    )  # fmt: skip
    options |= {"cache_leftpad": padding, "sigmoid_bias": bias[:1], **where}
    assert torch.equal(flash_attn_with_kvcache(query, keys, values, *new, **options), ours)


def test_autocast_does_not_round_new_keys():
    """With new keys, nothing is cast, whether or not the call is of those with little overhead."""
    q, k, v = torch.randn(3, 2, 1, 4, 8).unbind()
    keys, values = torch.randn(2, 2, 16, 4, 8).unbind()
    bias = -2.3
    expected = [formula(q[b], torch.cat([keys[b, :9], k[b]]), torch.cat([values[b, :9], v[b]]), bias) for b in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        for call, name in ((sigmoid_kvcache_attention, "bias"), (flash_attn_with_kvcache, "sigmoid_bias")):
            out = call(q, keys.clone(), values.clone(), k, v, cache_seqlens=9, **{name: bias})
            assert out.dtype is torch.float32
            torch.testing.assert_close(out, torch.stack(expected))


@pytest.mark.parametrize(("dtype", "length"), [(torch.int8, 127), (torch.uint8, 255), (torch.uint16, 9)])
def test_integers_of_any_size(dtype, length):
    """Lengths do not overflow. Pages and offsets of several pages, whose operators take int32 and int64 only."""
    q, k, v = torch.randn(3, 2, 1, 1, 4).unbind()
    keys, values = torch.randn(2, 2, 260, 1, 4).unbind()
    lengths, table = torch.tensor([length, 3]).to(dtype), torch.tensor([[2, 0, 3, 1]])
    pages = torch.randn(2, 4, 8, 1, 4).unbind()
    for call, name in ((sigmoid_kvcache_attention, "bias"), (flash_attn_with_kvcache, "sigmoid_bias")):
        out = call(q, keys.clone(), values.clone(), k, v, cache_seqlens=lengths, **{name: -1.5})
        for b, n in enumerate((length, 3)):
            expected = formula(q[b], torch.cat([keys[b, :n], k[b]]), torch.cat([values[b, :n], v[b]]), -1.5)
            torch.testing.assert_close(out[b], expected)
        paged = [call(q[:1], *pages, cache_seqlens=10, block_table=t, **{name: -1.0}) for t in (table, table.to(dtype))]
        torch.testing.assert_close(*paged)
    rows, starts = torch.randn(10, 2, 4), torch.tensor([0, 3, 10])
    packed = [sigmoid_varlen_attention(rows, rows, rows, t, t, 7, 7) for t in (starts, starts.to(dtype))]
    torch.testing.assert_close(*packed)


@pytest.mark.parametrize("new", [False, True])
def test_decoding_of_an_empty_batch(new):
    q, cache = torch.randn(0, 1, 4, 8), torch.randn(0, 16, 4, 8)
    added = (q, q) if new else ()
    assert sigmoid_kvcache_attention(q, cache, cache, *added, bias=-1.0, cache_seqlens=5).shape == q.shape
    assert flash_attn_with_kvcache(q, cache, cache, *added, cache_seqlens=5, sigmoid_bias=-1.0).shape == q.shape
