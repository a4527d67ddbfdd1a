"""Wrong calls of the operators, statistics and ``sigattn.flash``: each error names the function and the remedy."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch.nn.attention.bias import causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

import sigattn
from sigattn import flash, sigmoid_attention
from tests.ops.cases import HAS_LLVM

META = torch.device("meta")
Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 7)
FLOAT8 = torch.zeros(1).to(torch.float8_e5m2)
LEAF = torch.tensor(1.0, requires_grad=True)


def op(*tensors, function=sigmoid_attention, **options):
    """Return a call of the operator; with query, key and value, and perhaps a mask, unless others are given."""
    return partial(function, *(tensors if len(tensors) > 1 else (Q, K, V, *tensors)), **options)


def ones(*shape, dtype=torch.bool):
    return torch.ones(shape).to(dtype)


statistics = partial(op, function=sigattn.attention_statistics)


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def blocks(n=5, m=6, samples=None, heads=None):
    return create_block_mask(lambda b, h, i, j: i >= j, samples, heads, n, m, device="cpu", BLOCK_SIZE=16)


BLOCKS, TAGGED = blocks(), ones(5, 6).as_subclass(Tagged)

# Nested tensors of the jagged layout
LENGTHS, OTHERS = torch.tensor([0, 3, 10, 11]), torch.tensor([0, 4, 6, 12])


def nest(offsets, heads=4):
    return torch.nested.nested_tensor_from_jagged(torch.randn(offsets[-1], heads, 8), offsets).transpose(1, 2)


NESTED, OTHER, FEW, PADDED = nest(LENGTHS), nest(OTHERS), nest(LENGTHS, 2), torch.randn(3, 4, 7, 8)
GAPS = torch.nested.narrow(
    PADDED.transpose(1, 2).contiguous(), 1, LENGTHS[:3] // 4, LENGTHS[1:] // 2, layout=torch.jagged
)
with warnings.catch_warnings():  # PyTorch's, of prototypes
    warnings.simplefilter("ignore")
    STRIDED, MASKED = torch.nested.nested_tensor([PADDED[0]]), torch.masked.masked_tensor(torch.zeros(5, 6), ones(5, 6))

# Packed sequences of 5 rows, pages of 4 keys, and a cache of 16 keys of two samples, which no wrong call may change
ROWS, STARTS = torch.randn(10, 4, 8), torch.tensor([0, 5, 10])
PAGES, TABLE = torch.zeros(2, 4, 4, 8), torch.tensor([[0, 1], [0, 1]])
TOKEN, CACHE, OF_CACHE = torch.randn(2, 1, 4, 8), torch.zeros(2, 16, 2, 8), torch.randn(2, 1, 2, 8)


def packed(q=ROWS, k=ROWS, starts=(STARTS, STARTS), longest=(5, 5), v=None, **options):
    return partial(sigattn.sigmoid_varlen_attention, q, k, k if v is None else v, *starts, *longest, **options)


def packed_flash(k=ROWS, starts=(STARTS, STARTS), longest=(5, 5), v=None, q=ROWS, **options):
    return partial(flash.flash_attn_varlen_func, q, k, k if v is None else v, *starts, *longest, **options)


def paged(table, k=PAGES, **options):
    return packed_flash(k, block_table=torch.tensor(table), **options)


def cached(*new, q=TOKEN, cache=CACHE, **options):
    options = {"bias": -1.0, "enable_gqa": True, "cache_seqlens": 3} | options
    return partial(sigattn.sigmoid_kvcache_attention, q, cache, cache, *new, **options)


def cached_flash(q=TOKEN, k=OF_CACHE, v=OF_CACHE, caches=(CACHE, CACHE), **options):
    options = {"cache_seqlens": torch.tensor([3, 5]), "causal": True, "sigmoid_bias": -2.0} | options
    return partial(flash.flash_attn_with_kvcache, q, *caches, k, v, **options)


def dense_flash(*tensors, **options):
    return partial(flash.flash_attn_func, *(tensors or [TOKEN.expand(2, 5, 4, 8)] * 3), **options)


HEADS_FIRST, UNSUPPORTED = torch.randn(2, 4, 5, 8), "backend 'triton' does not support this call"
VALUES = [
    (op(Q[0, 0, 0], K, V), r"at least 2 dimensions.*query \(8,\) float32 on cpu"),
    (op(Q, K[..., :3], V), r"same head_dim.*\(2, 4, 6, 3\)"),
    (op(Q, K, V[:, :, :2]), "key and value must have the same length"),
    (op(Q, *(t[:1].expand(3, -1, -1, -1) for t in (K, V))), "same batch size, or 1"),
    (op(Q[0], K[0], V[0], torch.ones(1, 1, 5, 6)), r"\(Hq, N, M\) = \(4, 5, 6\)"),
    (op(Q[0, 0], K[0, 0], V[0, 0], bias=torch.ones(6, 1)), r"\(N, 1\) = \(5, 1\)"),
    (op(Q[0], K[0], V[0], key_lengths=torch.tensor([3])), r"before its heads, \(\)"),
    (op(Q[None], K[None], V[None], alibi_slopes=torch.ones(2, 4)), r"\(…, Hq, 2\)"),
    (op(Q, K[:, :2], V[:, :2]), "pass enable_gqa=True"),
    (op(Q, K, V[:, :2]), "key and value must have the same number of heads, or 1"),
    (op(Q, K, V[:, :3], enable_gqa=True), "not a multiple of the 3 of value"),
    (op(Q, K[:, :3], V[:, :3], enable_gqa=True), "not a multiple"),
    (op(Q[:, :0], K, V, enable_gqa=True), "the 0 heads of query are not a multiple of"),
    (op(Q, torch.randn(2, 6, 5, 8), torch.randn(2, 6, 5, 8)), r"t.transpose\(1, 2\)"),
    (op(ones(4, 4)), r"t.transpose\(1, 2\)"),
    (op(Q, K.to(META), V.to(META)), "one device.*on meta"),
    (op(ones(5, 5)), r"\(2, 4, 5, 6\).*attn_mask \(5, 5\)"),
    (op(ones(2, 6)), r"\(B, M\), pass attn_mask\[:, None, None, :\] or key_l"),
    (op(torch.ones(5, 6, device=META)), "query's device"),
    (op(blocks(6, 6)), r"the BlockMask is for \(6, 6\) queries and keys, not for \(5, 6\)"),
    (op(blocks(5, 6, 1, 3)), r"1 or 2 samples and 1 or 4 heads, got \(1, 3\)"),
    (op(BLOCKS, backend="triton"), r"triton. does not support.*multiples of 128, not \(16, 16\)"),
    (op(causal_upper_left(9, 9)), "CausalBias of 9 queries and 9 keys, but query and key have 5 and 6"),
    (op(bias=torch.zeros(5, 6)), "one per key as an additive attn_mask"),
    (op(bias=torch.zeros(4)), r"per head is \(Hq, 1, 1\)"),
    (op(bias=torch.zeros(1, device=META)), "query's device"),
    (op(query_offset=(1 << 30) + 1), r"query_offset must lie in -2\^30 … 2\^30, got 10"),
    (op(softcap=-1.0), "softcap must be finite and at least 0"),
    (op(softcap=math.nan), "softcap must be finite and at least 0"),
    (op(key_lengths=torch.tensor([3, 7])), r"0…6.*\[3, 7\]"),
    (op(key_lengths=torch.tensor([3])), r"\(B,\) = \(2,\)"),
    (op(alibi_slopes=torch.ones(3)), r"\(Hq,\), \(B, Hq\)"),
    (op(window=(-2, 0)), "the sides of window must be at least 0, or -1"),
    (op(dropout_p=1.0), r"\[0, 1\), got 1.0"),
    (op(dropout_p=math.nan), r"\[0, 1\)"),
    (op(scale=math.nan), "scale is NaN"),
    (op(backend="cuda"), "unknown backend 'cuda'; choose one of 'triton', 'llvm'"),
    (statistics(Q, K[..., :3], V), "same head_dim"),
    (statistics(activation=None), "unknown activation None; choose one of .*'identity'$"),
    (statistics(Q[:, :, :0], K, V), "at least one query"),
    (statistics(key_lengths=torch.tensor([3, 7])), "0…6"),
    (statistics(causal_upper_left(3, 3)), "CausalBias of 3 queries"),
    (partial(sigattn.log_length_bias, 0), "at least 1"),
    (op(NESTED, NESTED, NESTED, torch.ones(7, 7)), "attn_mask is not supported with nested tensors"),
    (op(NESTED, NESTED, NESTED, key_lengths=torch.tensor([1, 2, 3])), "offsets define the lengths"),
    (op(*[GAPS.transpose(1, 2)] * 3), r"gaps between its sequences: call .contiguous\(\) before"),
    (op(*[NESTED.transpose(1, 2)] * 3), r"make \(B, ragged length, H, D\) and transpose"),
    (op(*[NESTED.transpose(1, 2).flatten(2)] * 3), r"\(B, H, ragged length, D\)"),
    (op(NESTED, OTHER, OTHER, is_causal=True), "of the same lengths"),
    (op(NESTED, OTHER, NESTED), "key and value must have the same lengths"),
    (op(NESTED, FEW, FEW), "query has 4 heads and key 2: pass enable_gqa=True"),
    (op(NESTED, NESTED, NESTED, bias=torch.zeros(7, 1)), r"broadcast to \(B, Hq, 1, 1\) = \(3, 4, 1, 1\)"),
    (packed(k=ROWS[:, :2]), "enable_gqa=True"),
    (packed(q=ROWS[None]), r"3 dimensions, \(total"),
    (packed(starts=(STARTS, STARTS + 1)), r"\(cu_seq_k\) must begin"),
    (packed(longest=(4, 5)), r"max_seqlen_q \(max_q\) is 4, but"),
    (packed(attn_mask=torch.ones(4, 5)), r"max_q, max_k\) = \(2, 4, 5, 5\)"),
    (packed(ROWS.double(), ROWS.double(), backend="triton"), UNSUPPORTED),
    (packed_flash(starts=(STARTS[:2], STARTS)), "as many sequences"),
    (packed_flash(starts=(STARTS, STARTS * 2), longest=(5, 10)), "end at most at 10"),
    (packed_flash(starts=(STARTS[[0, 2, 1]], STARTS), longest=(10, 5)), "never descend"),
    (packed_flash(attn_mask=torch.ones(3, 1, 5, 5)), "attn_mask does not broad"),
    (paged([[0, 1]] * 2, ROWS), r"k and v must be \(pages, page_size, heads, head_dim\)"),
    (paged([0, 1]), r"block_table must be \(B, pages of each\)"),
    (paged([[0, 2], [0, 1]]), r"names pages \[0, 2\], but the cache has"),
    (paged([[0], [1]]), "a cache of 4 keys for each sample cannot hold"),
    (paged([[0, 1]] * 2, v=PAGES[:1]), "alike but for head_dim; got k .*, v "),
    (cached(q=TOKEN.double(), cache=CACHE.double(), backend="triton"), UNSUPPORTED),
    (cached(enable_gqa=False), "enable_gqa=True"),
    (cached(cache_seqlens=17), "a cache of 16 keys for each sample cannot hold"),
    (cached(OF_CACHE, OF_CACHE, cache_seqlens=torch.tensor([-1, 3])), "the index of the first new key must lie in 0"),
    (cached(cache_seqlens=1 << 70), "cache_seqlens, if not a tensor, must lie in"),
    (cached_flash(cache_seqlens=torch.tensor([3, 16])), r"a cache of 16 keys for each sample cannot hold .* \[4, 17\]"),
    (cached_flash(cache_seqlens=None), "new keys and values need cache_seqlens"),
    (cached_flash(cache_leftpad=torch.tensor([0, 9])), r"cache_leftpad must lie in 0 … length; got \[0, 9\]"),
    (cached_flash(cache_batch_idx=torch.tensor([0, 2])), r"names pages \[2\], but the cache has pages 0 … 1"),
    (cached_flash(block_table=torch.tensor([[0], [-1]])), r"names pages \[-1\]"),
    (cached_flash(block_table=torch.tensor([0, 1])), r"block_table must be \(B, pages of each sample\)"),
    (cached_flash(block_table=TABLE[:, :1], cache_batch_idx=torch.tensor([0, 1])), "exclude each other"),
    (cached_flash(torch.zeros(3, 1, 4, 8), None, None), "the cache must have q's batch size"),
    (cached_flash(k=None), "k and v must both be given"),
    (cached_flash(k=TOKEN, v=TOKEN), "must have the cache's heads and head_dim"),
    (cached_flash(caches=(CACHE, torch.zeros(2, 2, 16, 8))), "k_cache and v_cache must have the same length"),
    (cached_flash(return_softmax_lse=True), "no log-sum-exp"),
    (cached_flash(rotary_cos=torch.ones(5, 4), rotary_sin=torch.ones(5, 4)), r"does not contain .* \d … 5;"),
    (cached_flash(rotary_cos=torch.ones(9, 5), rotary_sin=torch.ones(9, 5)), "rotary_dim at most head_dim"),
    (cached_flash(sigmoid_bias=torch.ones(2, 4, 3)), r"\(B or 1, Hq or 1, N or 1\) = \(2 or 1, 4 or 1, 1 or 1\)"),
    (cached_flash(attn_mask=ones(3, 5)), "attn_mask does not broadcast"),
    (dense_flash(return_attn_probs=True), "attention_statistics"),
    (dense_flash(ROWS, ROWS, ROWS), r"4 dimensions.*q \(10, 4, 8\)"),
    (dense_flash(HEADS_FIRST, *[HEADS_FIRST[:, :, :3]] * 2), r"5 heads of q .* the 3 of k.*as in PyTorch's"),
    (dense_flash(sigmoid_bias=torch.zeros(3)), r"\(B,\) = \(2,\)"),
    (dense_flash(alibi_slopes=torch.ones(3)), r"slopes must be \(Hq,\), \(B, Hq\); got q \(2, 5"),
    (dense_flash(attn_mask=ones(5, 6)), r"attn_mask does not br.* = \(2, 4, 5, 5\)"),
    (dense_flash(attn_mask=BLOCKS), r"the BlockMask is for \(5, 6\)"),
    (partial(flash.flash_attn_qkvpacked_func, Q), r"\(batch, length, 3, heads, head_dim\)"),
    (partial(flash.unpad_input, V, torch.ones(2, 3) > 0), r"must be \(B, L\) = \(2, 4\)"),
    (partial(flash.pad_input, V, torch.tensor([0]), 2, 3), r"must be \(total,\) = \(2,\)"),
    (partial(flash.pad_input, V, torch.tensor([0, 8]), 1, 8), "0 … 7, for 8 batch . seqlen positions, got 0 … 8"),
]
TYPES = [
    (op(Q.numpy(), K, V), "query must be a tensor, got ndarray"),
    (op(True), r"got bool; .* as in flash-attn and triton-sigmoid"),
    (op(Q, K.double(), V), "one dtype.*float64"),
    (op(*(t.to(torch.float8_e4m3fn) for t in (Q, K, V))), "bfloat16, float32 or float64; got"),
    (op(Q.to_sparse(), K, V), "dense"),
    (op(is_causal=None), "is_causal must be True or False, got None"),
    (op(is_causal=ones(5, 6)), "pass a mask as attn_mask"),
    (op(normalize=1), "normalize must be True or False, got 1"),
    (op(ones(5, 6, dtype=torch.int32)), "bool"),
    (op([[True]]), "attn_mask must be a tensor"),
    (op(Q[0], K[0], V[0], BLOCKS), "of 4 dimensions"),
    (op(TAGGED), "attn_mask is a .*Tagged"),
    (op(MASKED), "attn_mask is a .*MaskedTensor"),
    (op(bias=FLOAT8), "of 16 bits and more"),
    (op(bias="-log n"), "bias, if not a tensor, must be a number"),
    (op(window=3), r"window must be a pair \(left, right\), got 3"),
    (op(window=(1.5, 0)), "each side of window must be an integer, got 1.5"),
    (op(window=(torch.tensor(1.0), 0)), "must be an integer"),
    (op(query_offset=0.5), "query_offset must be an integer"),
    (op(softcap=True), "softcap must be a number"),
    (op(key_lengths=torch.tensor([3.0, 4.0])), "integers"),
    (op(scale=True), "scale must be a number, got True"),
    (op(scale=LEAF), "scale would lose its gradient"),
    (statistics(is_causal=None), "is_causal must be True or False"),
    (statistics(BLOCKS), "attn_mask must be a tensor, .*, got BlockMask"),
    (statistics(TAGGED), "attn_mask is a .*Tagged"),
    (statistics(bias="1"), "bias, if not a tensor, must be a number"),
    *((partial(sigattn.log_length_bias, n), "int or a tensor") for n in (1.5, "8", True)),
    (op(NESTED, PADDED, PADDED), "must all be nested, or none of them; key is not"),
    (op(STRIDED, STRIDED, STRIDED), "layout=torch.jagged"),
    (packed(starts=(STARTS / 1, STARTS)), "cu_seq_q must be a"),
    (packed_flash(starts=(STARTS / 1, STARTS)), "cu_seqlens_q must be a tensor of integers"),
    (packed_flash(longest=(torch.tensor([5]), 5)), "max_seqlen_q must be an integer"),
    (packed_flash(attn_mask=BLOCKS), "attn_mask must be a tensor, bool"),
    (paged([[0.0, 1.0]] * 2), "block_table must be a tensor of integers"),
    (paged([[0, 1]] * 2, q=None), "q must be a t"),
    (cached(OF_CACHE, OF_CACHE, q=[[1.0]]), "query must be a tensor, got list"),
    (cached(bias=None), "bias must be the number or tensor that the model was trained"),
    (cached(is_causal="no"), "is_causal must be True or False, got 'no'"),
    (cached_flash(cache_seqlens=torch.tensor([3.0, 5.0])), ""),
    (cached_flash(rotary_cos=torch.ones(20, 4)), "rotary_cos and rotary_sin must be floating-point tensors"),
    (cached_flash(sigmoid_bias=None), "-log of the current length would change as the cache grows"),
    (dense_flash(None, TOKEN, TOKEN), "q must be a tensor"),
    (dense_flash(window_size=3), "window_size must be a pair"),
    (dense_flash(causal="no"), "causal must be True or False, got 'no'"),
    (dense_flash(TOKEN, TOKEN, TOKEN, 0.25, True), "softmax_scale must be a number, got True"),  # flash-attn 3's order
    (dense_flash(TOKEN, TOKEN, TOKEN, None), "dropout_p must be a number, got None"),
    (partial(flash.unpad_input, V, torch.ones(2, 4)), "attention_mask must be bool or integers"),
    (partial(flash.unpad_input, None, ones(2, 4)), "hidden_states must be a tensor"),
    (partial(flash.pad_input, [1.0], torch.zeros(1).long(), 1, 2), r"must be a tensor \(total, …\), got"),
    (partial(flash.index_first_axis, torch.ones(()), torch.zeros(1).long()), r"must be a tensor \(rows, …\), got"),
    (partial(flash.index_first_axis, V, ones(1)), "indices must be"),
]
WITHOUT_GRADIENT = [
    (cached(q=TOKEN * LEAF), "has no gradient"),
    (cached_flash(TOKEN * LEAF), "has no gradient"),
    (cached_flash(attn_mask=LEAF.expand(1, 5)), "has no gradient"),
]
if HAS_LLVM:
    GRADIENT = "llvm' does not support this call: it does not compute the gradient of attn_mask"
    VALUES += [
        (op(softcap=2.0, backend="llvm"), "llvm' does not support this call: it does not support softcap"),
        (op(torch.zeros(5, 6, requires_grad=True), backend="llvm"), GRADIENT),
        (op(*(t.half() for t in (Q, K, V)), backend="llvm"), "it is for float32 and bfloat16, not for float16"),
    ]
TABLES = {ValueError: VALUES, TypeError: TYPES, RuntimeError: WITHOUT_GRADIENT}


@pytest.mark.parametrize(("error", "call", "message"), [(e, *row) for e, table in TABLES.items() for row in table])
def test_a_wrong_call_is_explained(error, call, message):
    """Before anything is computed, and before a cache is changed."""
    with pytest.raises(error, match=rf"(?s)\b{call.func.__name__}\)?( |: ).*{message}"):
        call()
    assert not CACHE.any()
