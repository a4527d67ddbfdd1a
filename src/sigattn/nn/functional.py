"""Attention functions of queries, keys and values, for each activation that the paper compares.

"sigmoid" uses this library's operator and "softmax" PyTorch's, both in memory linear in the length. The other
element-wise activations materialise their weights; Performer is linear in the length.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.nn.documents import Documents
from sigattn.nn.kv_cache import KVCache
from sigattn.ops import problem as problems
from sigattn.ops import reference
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.kvcache import sigmoid_kvcache_attention
from sigattn.ops.problem import UNLIMITED, Problem, cast_operands, combine_window, two_sided_slopes
from sigattn.ops.reference import alibi, band
from sigattn.ops.settings import without_autocast
from sigattn.ops.statistics import AttentionStatistics, attention_statistics
from sigattn.ops.varlen import sigmoid_varlen_attention

Activation = Literal["sigmoid", "softmax", "relu", "relu2", "gelu", "tanh", "identity", "performer"]
ELEMENTWISE = ("sigmoid", "relu", "relu2", "gelu", "tanh", "identity")


class MaskSpec(NamedTuple):
    """Mask, bias and dropout of one attention call.

    Attributes:
        causal: True to mask the keys after a query.
        window: (left, right), as in ``sigmoid_attention``; None for no limit.
        key_lengths: (B,), number of keys of each sample padded on the right; or None.
        alibi_slopes: ALiBi's slopes, (Hq,) or (1, Hq, 2); or None.
        bias: b, a number or a tensor that broadcasts to (B, Hq, N, 1).
        dropout: probability of dropping a weight; 0 when not training.
        query_offset: position of the first query among the keys, when earlier keys come from a cache.
        documents: documents that attention stays within; or None. They need causal, no cache and no padding.
        normalize: True to divide the weights of each row by their sum; for "sigmoid" only.
        cache: where the keys and values come from, or None.
    """

    causal: bool
    window: tuple[int, int] | None
    key_lengths: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: float | Tensor = 0.0
    dropout: float = 0.0
    query_offset: int = 0
    documents: Documents | None = None
    cache: KVCache | None = None
    normalize: bool = False

    @property
    def left_padding(self) -> Tensor | None:
        """(B,), position of each sample's first key, when a cache holds prompts padded on the left; or None."""
        return None if self.cache is None else self.cache.left_padding

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of keys before and after itself that a query sees; -1 for no limit."""
        return combine_window(self.window, self.causal)

    def attn_mask(self, num_keys: int) -> Tensor | None:
        """Return (B, 1, N or 1, M) bool, which hides other documents and padding on the left; None without them."""
        if self.documents is not None:
            return self.documents.mask
        if self.left_padding is None:
            return None
        return (torch.arange(num_keys, device=self.left_padding.device) >= self.left_padding[:, None])[:, None, None]

    def operator_options(self) -> dict[str, Any]:
        masks = {"is_causal": self.causal, "window": self.window, "alibi_slopes": self.alibi_slopes}
        return masks | {"bias": self.bias, "normalize": self.normalize}


# type of ``attend`` and of replacements of it in ``Attention.attention_fn``
AttentionFn = Callable[[Activation, Tensor, Tensor, Tensor, MaskSpec], Tensor]


def attend(activation: Activation, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Tensor:
    """Return the attention output, (B, Hq, N, D), of query (B, Hq, N, D) and key and value (B, Hkv, M, D).

    "performer" is not supported here: it needs the random features of the layer.
    """
    if activation == "sigmoid":
        return _sigmoid(query, key, value, spec)
    if activation == "softmax":
        return _softmax(query, key, value, spec)
    with without_autocast(query.device.type):
        return reference.attention(make_problem(query, key, value, spec), activation)


def statistics(
    activation: Activation, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec
) -> AttentionStatistics:
    """Return ``attention_statistics`` of the weights that ``attend`` computes, before dropout.

    Raises:
        ValueError: for "performer", which has no explicit weights, and with cached keys.
    """
    if activation == "performer" or spec.query_offset:
        raise ValueError("attention statistics do not support activation='performer' or a key/value cache")
    options = {"activation": activation, "enable_gqa": True, "key_lengths": spec.key_lengths, **spec.operator_options()}
    query, key, value = query.detach(), key.detach(), value.detach()
    return attention_statistics(query, key, value, spec.attn_mask(key.shape[2]), **options)


def num_visible_keys(queries: int, keys: int, spec: MaskSpec, device: torch.device) -> Tensor:
    """Count the keys that each query sees, the n of n^(-α) in App. G.1: (1 or B, 1, N, 1), float32."""
    _, first, last = _visible_range(queries, keys, spec, device)
    return (last - first + 1).clamp(min=0)[:, None, :, None].float()


def sum_alibi_weights(queries: int, keys: int, spec: MaskSpec, device: torch.device) -> Tensor:
    """Sum ALiBi's weights exp(-slope · distance) over the keys that each query sees: (1 or B, Hq, N, 1), float32.

    It is softmax's denominator where all products of queries and keys are 0; positive, also for a query without keys.
    """
    slopes = two_sided_slopes(spec.alibi_slopes)
    assert slopes is not None
    before, after = slopes.to(device, torch.float32).unbind(-1)  # (1, Hq)
    i, first, last = _visible_range(queries, keys, spec, device)
    earlier = _geometric_sum(before, i - torch.minimum(last, i), i - first)
    later = _geometric_sum(after, torch.maximum(first, i + 1) - i, last - i)
    return (earlier + later).clamp(min=torch.finfo(torch.float32).tiny)


def _geometric_sum(slopes: Tensor, nearest: Tensor, farthest: Tensor) -> Tensor:
    """Sum exp(-slope · d) over d = nearest … farthest: slopes (1, Hq), distances (1 or B, N) → (1 or B, Hq, N, 1)."""
    m, start, count = slopes[:, :, None], nearest[:, None], (farthest - nearest + 1).clamp(min=0)[:, None]
    ratio = torch.where(m == 0, count, torch.expm1(-m * count) / torch.expm1(-torch.where(m == 0, 1, m)))
    return (torch.exp(-m * start) * ratio).unsqueeze(-1)


def _visible_range(queries: int, keys: int, spec: MaskSpec, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return each query's position in its row, and the first and the last key that it sees: (1 or B, N) each."""
    i = torch.arange(spec.query_offset, spec.query_offset + queries, device=device)
    left, right = spec.sides
    if spec.documents is not None:
        before = spec.documents.positions  # (B, N): keys of the document before a query
        before = before if left == UNLIMITED else before.clamp(max=left)
        return i[None], i - before, i[None]
    first = torch.zeros_like(i) if left == UNLIMITED else (i - left).clamp(min=0)  # (N,)
    if spec.left_padding is not None:
        first = torch.maximum(first, spec.left_padding.to(device)[:, None])  # (B, N)
    last = i * 0 + (keys - 1) if right == UNLIMITED else i + right  # (N,)
    if spec.key_lengths is None:
        last = last.clamp(max=keys - 1)[None]  # (1, N)
    else:
        last = torch.minimum(last, spec.key_lengths.to(device)[:, None] - 1)  # (B, N)
    return i[None], first if first.dim() == 2 else first[None], last


def _sigmoid(query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Tensor:
    if spec.left_padding is not None or (spec.query_offset and query.shape[2] == 1 and spec.key_lengths is None):
        return _sigmoid_of_cache(query, key, value, spec)
    of_queries = isinstance(spec.bias, Tensor) and spec.bias.dim() > 1 and spec.bias.shape[-2] > 1
    if spec.documents is not None and not of_queries:  # the kernels for packed sequences have one bias for a sequence
        return _sigmoid_of_documents(query, key, value, spec, spec.documents)
    return sigmoid_attention(
        *(query, key, value, spec.attn_mask(key.shape[2])), dropout_p=spec.dropout, enable_gqa=True,
        query_offset=spec.query_offset, key_lengths=spec.key_lengths, **spec.operator_options(),
    )  # fmt: skip


def _sigmoid_of_cache(query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Tensor:
    """Attend to a cache from one new token, or with prompts padded on the left; causal and without dropout."""
    length = key.shape[2]
    if spec.cache is not None and spec.cache.key is not None and spec.cache.value is not None:
        # the whole memory: with shapes that do not change from token to token GPU kernels start faster
        key, value = spec.cache.key, spec.cache.value
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    # a prompt may be processed in pieces, of which the first may hold only padding
    padding = None if spec.left_padding is None else spec.left_padding.clamp(max=length)
    out = sigmoid_kvcache_attention(
        q, k, v, cache_seqlens=length, left_padding=padding, enable_gqa=True, **spec.operator_options()
    )
    return out.transpose(1, 2)


def _sigmoid_of_documents(query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, documents: Documents) -> Tensor:
    """Attend within each document by the kernels for packed sequences, which skip pairs of documents."""
    batch, length = query.shape[0], query.shape[2]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in cast_operands(query, key, value))  # (B · N, H, D)
    starts, options = documents.cu_seqlens, {"dropout_p": spec.dropout, **spec.operator_options()}
    out = sigmoid_varlen_attention(q, k, v, starts, starts, length, length, enable_gqa=True, **options)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def make_problem(query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Problem:
    """Return the operator's problem of the call, in autocast's dtype if autocast is on."""
    return problems.make_problem(
        Problem, *cast_operands(query, key, value), attn_mask=spec.attn_mask(key.shape[2]), dropout_p=spec.dropout,
        key_lengths=spec.key_lengths, query_offset=spec.query_offset, **spec.operator_options(),
    )  # fmt: skip


def _softmax(query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Tensor:
    mask = _softmax_mask(query, key, spec)
    return F.scaled_dot_product_attention(
        *(query, key, value, mask),
        dropout_p=spec.dropout,
        is_causal=spec.causal and mask is None,
        enable_gqa=bool(query.shape[1] != key.shape[1]),  # torch.jit.trace has tensors for sizes
    )


def _softmax_mask(query: Tensor, key: Tensor, spec: MaskSpec) -> Tensor | None:
    """Return the mask of windows, padding, caches and ALiBi, broadcastable to (B, Hq, N, M); None if not needed."""
    slopes, mask = two_sided_slopes(spec.alibi_slopes), spec.attn_mask(key.shape[2])
    plain = all(x is None for x in (spec.window, spec.key_lengths, slopes, mask))
    if plain and not (spec.causal and spec.query_offset):
        return None
    rows, columns = (spec.query_offset, spec.query_offset + query.shape[2]), (0, key.shape[2])
    seen = band(*spec.sides, rows, columns, query.device)
    if spec.key_lengths is not None:
        exists = torch.arange(key.shape[2], device=query.device) < spec.key_lengths.to(query.device).view(-1, 1, 1, 1)
        seen = seen & exists
    if mask is not None:
        seen = seen & mask.to(query.device)
    if slopes is None:
        return seen
    return alibi(slopes, rows, columns, slopes.dtype).masked_fill(~seen, -torch.inf).to(query.dtype)
