"""The operators and the functions of ``sigattn.flash`` in torch.export: no size of the traced call is fixed."""

import pytest
import torch
from torch.export import Dim

from sigattn import attention_statistics, flash, sigmoid_attention, sigmoid_kvcache_attention, sigmoid_varlen_attention
from tests.export.programs import (
    BATCH,
    KEYS,
    ROWS,
    B,
    D,
    H,
    M,
    N,
    assert_exported,
    features,
    heads_first,
    lengths,
    packed,
    padding,
    rows_first,
    starts,
)
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.usefixtures("unchecked"), *(pytest.mark.filterwarnings(w) for w in COMPILER_NOISE)]


def test_self_attention():
    def call(**options):
        return lambda x: sigmoid_attention(x, x, x, **options)

    assert_exported(
        lambda b, n, m: (heads_first(b, n),),
        ({0: B, 2: N},),
        causal=call(is_causal=True),
        window=call(window=(3, 1), softcap=3.0, normalize=True),
        reference=call(backend="reference", is_causal=True),
        three_dimensions=lambda x: sigmoid_attention(x[:, 0], x[:, 0], x[:, 0]),
        statistics=lambda x: tuple(attention_statistics(x, x, x, is_causal=True)),
    )


def test_cross_attention():
    def call(**options):
        return lambda x, y: sigmoid_attention(x, y, y, enable_gqa=True, **options)

    assert_exported(
        lambda b, n, m: (heads_first(b, n), heads_first(b, m, 2)),
        ({0: B, 2: N}, {0: B, 2: M}),
        causal=call(is_causal=True),
        reference=call(backend="reference"),
        broadcast=lambda x, y: sigmoid_attention(x, y[:1, :1], y[:1, :1]),
    )


def test_tensor_options_of_the_operator():
    def inputs(b, n, m):
        masks = torch.rand(b, 1, n, n) > 0.3, torch.randn(n, n)
        return heads_first(b, n), lengths(b, n), *masks, torch.randn(b, 1, n, 1), torch.rand(b, H)

    assert_exported(
        inputs,
        ({0: B, 2: N}, BATCH, {0: B, 2: N, 3: N}, {0: N, 1: N}, {0: B, 2: N}, BATCH),
        key_lengths=lambda x, k, *_: sigmoid_attention(x, x, x, key_lengths=k),
        seen=lambda x, _, mask, *__: sigmoid_attention(x, x, x, mask),
        added=lambda x, _, __, mask, *___: sigmoid_attention(x, x, x, mask),
        bias=lambda x, _, __, ___, bias, ____: sigmoid_attention(x, x, x, bias=bias),
        alibi=lambda x, *rest: sigmoid_attention(x, x, x, alibi_slopes=rest[-1]),
    )


def test_packed_sequences():
    def in_graph(q, cu_seqlens):
        longest = cu_seqlens.diff().max().item()
        return sigmoid_varlen_attention(q, q, q, cu_seqlens, cu_seqlens, longest, longest, is_causal=True)

    def packed_inputs(b, n, m):
        return packed(b, n), starts(b, n), torch.randn(b, 1, 1, 1), torch.rand(b, H)

    longest = (64, 64)
    assert_exported(
        packed_inputs,
        ({0: Dim("t")}, {0: B + 1}, BATCH, BATCH),
        varlen=lambda q, c, *_: sigmoid_varlen_attention(q, q, q, c, c, *longest, is_causal=True),
        longest_in_the_graph=lambda q, c, *_: in_graph(q, c),
        bias=lambda q, c, bias, *_: sigmoid_varlen_attention(q, q, q, c, c, *longest, bias=bias),
        alibi=lambda q, c, _, slopes: sigmoid_varlen_attention(q, q, q, c, c, *longest, alibi_slopes=slopes),
        qkvpacked=lambda q, c, *_: flash.flash_attn_varlen_qkvpacked_func(torch.stack([q] * 3, 1), c, 64),
    )


def test_flash_attention():
    def inputs(b, n, m):
        return rows_first(b, n), rows_first(b, m), torch.randn(b)

    assert_exported(
        inputs,
        (ROWS, KEYS, BATCH),
        cross=lambda q, k, _: flash.flash_attn_func(q, k, k, causal=True),
        bias_of_samples=lambda q, k, bias: flash.flash_attn_func(q, k, k, sigmoid_bias=bias),
        qkvpacked=lambda q, *_: flash.flash_attn_qkvpacked_func(torch.stack([q] * 3, 2)),
        kvpacked=lambda q, k, _: flash.flash_attn_kvpacked_func(q, torch.stack([k] * 2, 2)),
    )


@pytest.mark.parametrize("strict", [False, True])
def test_padding_of_flash_attention(strict):
    assert_exported(
        lambda b, n, m: (features(b, n), ~padding(b, n), torch.arange(n * m) % b),
        (ROWS, ROWS, {0: Dim("rows")}),
        strict=strict,
        index_first_axis=lambda x, _, indices: flash.index_first_axis(x[:, 0], indices),
        unpad_input=lambda x, mask, _: flash.unpad_input(x, mask)[:3],
        pad_input=lambda x, *_: flash.pad_input(x[:, 0], torch.arange(x.shape[0]), x.shape[0], 3),
    )


def test_caches():
    def inputs(b, n, m):
        cache, table, seen = rows_first(b, n + m), torch.randn(99, D // 2), torch.rand(b, 1, n, n) > 0.3
        return rows_first(b, n), cache, lengths(b, m) - 1, table, seen

    def operator(q, cache, held, **options):
        return sigmoid_kvcache_attention(q, cache, cache, bias=-3.0, cache_seqlens=held + q.shape[1], **options)

    def append(q, cache, held, *_):
        key_cache, value_cache = cache.clone(), cache.clone()
        out = sigmoid_kvcache_attention(q, key_cache, value_cache, q, q, bias=-3.0, cache_seqlens=held, is_causal=True)
        return out, key_cache, value_cache

    def rotated(q, cache, held, table, _):
        key_cache, value_cache, tables = cache.clone(), cache.clone(), {"rotary_cos": table, "rotary_sin": table}
        options = {"cache_seqlens": held, "causal": True, "sigmoid_bias": -3.0}
        return flash.flash_attn_with_kvcache(q, key_cache, value_cache, q, q, **tables, **options), key_cache

    def indexed(q, cache, held, *_):
        options = {"cache_seqlens": held + q.shape[1], "cache_batch_idx": held * 0, "causal": True}
        return flash.flash_attn_with_kvcache(q, cache, cache, sigmoid_bias=-3.0, **options)

    assert_exported(
        inputs,
        (ROWS, {0: B, 1: Dim("c")}, BATCH, {0: Dim("r")}, {0: B, 2: N, 3: N}),
        lengths=lambda q, cache, held, *_: operator(q, cache, held, is_causal=True),
        number=lambda q, cache, *_: sigmoid_kvcache_attention(q, cache, cache, bias=-3.0, cache_seqlens=4),
        left_padding=lambda q, cache, held, *_: sigmoid_kvcache_attention(
            q, cache, cache, bias=-3.0, cache_seqlens=held + 1, left_padding=held
        ),
        mask=lambda q, cache, held, _, seen: operator(q, cache, held, attn_mask=seen),
        append=append,
        flash_number=lambda q, cache, *_: flash.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=4, sigmoid_bias=-3.0
        ),
        flash_index=indexed,
        rotated=rotated,
    )


def test_paged_caches():
    def inputs(b, n, m):
        table = torch.arange(3 * b).view(b, 3).int()
        return rows_first(b, n), rows_first(3 * b, 4), lengths(b, 9), table, packed(b, 9), starts(b, 9)

    assert_exported(
        inputs,
        (ROWS, {0: Dim("pages")}, BATCH, BATCH, {0: Dim("t")}, {0: B + 1}),
        operator=lambda q, pages, held, table, *_: sigmoid_kvcache_attention(
            q, pages, pages, bias=-3.0, cache_seqlens=held, block_table=table
        ),
        flash=lambda q, pages, held, table, *_: flash.flash_attn_with_kvcache(
            q, pages, pages, cache_seqlens=held, block_table=table, sigmoid_bias=-3.0
        ),
        varlen=lambda _, pages, __, table, q, c: flash.flash_attn_varlen_func(
            q, pages, pages, c, c, 64, 12, block_table=table
        ),
    )
