"""The operators for packed sequences and caches."""

import math

import pytest
import torch

from sigattn import sigmoid_kvcache_attention, sigmoid_varlen_attention
from sigattn.flash import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.ops.cases import ON_CPU
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


Q, K = torch.randn(9, 4, 8), torch.randn(12, 2, 8)
NEW, CACHE = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8)


def packed(*starts, q=Q, k=Q, **options):
    return lambda: sigmoid_varlen_attention(q, k, k, *starts, **options)


def cached(new=NEW, cache=CACHE, bias=-1.0, enable_gqa=True, **options):
    return lambda: sigmoid_kvcache_attention(new, cache, cache, bias=bias, enable_gqa=enable_gqa, **options)


NAME, REFUSED = "sigmoid_kvcache_attention", "backend 'triton' does not support this call"
WRONG = {
    "gqa": (packed(CU_Q, CU_K, 6, 6, k=K), ValueError, "enable_gqa=True"),
    "layout": (packed(CU_Q, CU_K, 6, 6, q=Q[None], k=K), ValueError, r"3 dimensions, \(total"),
    "starts": (packed(CU_Q, CU_Q + 1, 6, 6), ValueError, r"\(cu_seq_k\) must begin"),
    "longest": (packed(CU_Q, CU_Q, 5, 6), ValueError, r"\(max_q\) is 5, but"),
    "float starts": (packed(CU_Q / 1, CU_Q, 6, 6), TypeError, "cu_seq_q must be a"),
    "mask": (packed(CU_Q, CU_Q, 6, 6, attn_mask=torch.ones(5, 6)), ValueError, r"max_q, max_k\) = \(3, 4, 6, 6\)"),
    "backend": (
        packed(CU_Q, CU_Q, 6, 6, q=Q.double(), k=Q.double(), backend="triton"),
        ValueError,
        f"sigmoid_varlen_attention: {REFUSED}",
    ),
    "cache backend": (cached(NEW.double(), CACHE.double(), backend="triton"), ValueError, f"{NAME}: {REFUSED}"),
    "cache gqa": (cached(enable_gqa=False), ValueError, "enable_gqa=True"),
    "no bias": (cached(bias=None), TypeError, f"{NAME}: bias must be the number or tensor that the model was trained"),
    "cache bias": (cached(bias="-log n"), TypeError, f"{NAME}: bias, if not a tensor, must be a number"),
    "cache lengths": (cached(cache_seqlens=17), ValueError, "a cache of 16 keys for each sample cannot hold"),
    "negative length": (
        cached(key=CACHE[:, :1], value=CACHE[:, :1], cache_seqlens=torch.tensor([-1, 3])),
        ValueError,
        "the index of the first new key must lie in 0",
    ),
    "length": (cached(cache_seqlens=1 << 70), ValueError, "cache_seqlens, if not a tensor, must lie in"),
    "cache causal": (cached(is_causal="no"), TypeError, "is_causal must be True or False, got 'no'"),
    "cache gradient": (cached(NEW.clone().requires_grad_()), RuntimeError, f"{NAME} has no gradient"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_explained(what):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call()


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


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_new_token_sees_the_keys_of_its_sample(backend, normalize):
    """Of any number of keys, none too, with grouped heads and b of each head; behind them is what is not a number."""
    q, k, v = torch.randn(3, 1, 6, 8), torch.randn(3, 2, 50, 8).transpose(1, 2), torch.randn(3, 50, 2, 5)
    bias, options = torch.linspace(-4, 1, 6), {"is_causal": True, "enable_gqa": True, "normalize": normalize}
    for lengths in ([0, 7, 41], [23, 23, 23], [0, 0, 0]):
        for b, n in enumerate(lengths):
            k[b, n:], v[b, n:] = math.nan, math.inf
            k[b, :n], v[b, :n] = torch.randn(n, 2, 8), torch.randn(n, 2, 5)
        out = sigmoid_kvcache_attention(
            q, k, v, bias=bias.view(6, 1, 1), cache_seqlens=torch.tensor(lengths), backend=backend, **options
        )
        for b, n in enumerate(lengths):
            expected = formula(q[b].double(), k[b, :n].double(), v[b, :n].double(), bias, normalize=normalize)
            torch.testing.assert_close(out[b], expected.float())
    nothing = sigmoid_kvcache_attention(q, k[:, :0], v[:, :0], bias=1.0, backend=backend, **options)
    assert not nothing.any()


@pytest.mark.parametrize("new", [False, True])
def test_decoding_of_an_empty_batch(new):
    q, cache = torch.randn(0, 1, 4, 8), torch.randn(0, 16, 4, 8)
    added = (q, q) if new else ()
    assert sigmoid_kvcache_attention(q, cache, cache, *added, bias=-1.0, cache_seqlens=5).shape == q.shape
    assert flash_attn_with_kvcache(q, cache, cache, *added, cache_seqlens=5, sigmoid_bias=-1.0).shape == q.shape
