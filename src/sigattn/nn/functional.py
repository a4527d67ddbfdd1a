"""Attention functions of queries, keys and values, for each activation that the paper compares.

"sigmoid" uses this library's operator and "softmax" PyTorch's, both in memory linear in the length. The other
element-wise activations materialise their weights; Performer is linear in the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.nn.documents import Documents
from sigattn.ops import problem as problems
from sigattn.ops import reference
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.autocast import without_autocast
from sigattn.ops.kvcache import sigmoid_kvcache_attention
from sigattn.ops.positions import alibi, band
from sigattn.ops.problem import UNLIMITED, Problem, cast_operands, combine_window, two_sided_slopes
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
        left_padding: (B,), position of each sample's first key, when a cache holds prompts padded on the left; or None.
    """

    causal: bool
    window: tuple[int, int] | None
    key_lengths: Tensor | None
    alibi_slopes: Tensor | None
    bias: float | Tensor
    dropout: float
    query_offset: int = 0
    documents: Documents | None = None
    left_padding: Tensor | None = None
    normalize: bool = False

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of keys before and after itself that a query sees; -1 for no limit."""
        return combine_window(self.window, self.causal)

    def operator_options(self) -> dict[str, Any]:
        """Return the options that all operators share."""
        return {
            "is_causal": self.causal,
            "bias": self.bias,
            "window": self.window,
            "alibi_slopes": self.alibi_slopes,
            "normalize": self.normalize,
        }


# type of ``attend`` and of replacements of it in ``Attention.attention_fn``
AttentionFn = Callable[[Activation, Tensor, Tensor, Tensor, MaskSpec], Tensor]


def attend(activation: Activation, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec) -> Tensor:
    """Return the attention output, (B, Hq, N, D), of query (B, Hq, N, D) and key and value (B, Hkv, M, D).

    "performer" is not supported here: it needs the random features of the layer.
    """
    return _ATTEND[activation](activation, query, key, value, spec)


def statistics(
    activation: Activation, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec
) -> AttentionStatistics:
    """Return ``attention_statistics`` of the weights that ``attend`` computes, before dropout.

    Raises:
        ValueError: for "performer", which has no explicit weights, and with cached keys.
    """
    if activation == "performer" or spec.query_offset:
        raise ValueError("attention statistics do not support activation='performer' or a key/value cache")
    p = spec
    return attention_statistics(
        query.detach(),
        key.detach(),
        value.detach(),
        None if p.documents is None else p.documents.mask,
        enable_gqa=True,
        key_lengths=p.key_lengths,
        activation=activation,
        **p.operator_options(),
    )


def num_visible_keys(queries: int, keys: int, spec: MaskSpec, device: torch.device) -> Tensor:
    """Count the keys that each query sees, the n of n^(-α) in App. G.1: (1 or B, 1, N, 1), float32."""
    if max(spec.sides) == UNLIMITED and spec.key_lengths is None and spec.left_padding is None:
        return torch.full((1, 1, 1, 1), keys, dtype=torch.float32, device=device).expand(1, 1, queries, 1)
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
    """Return each query's position, and the first and the last key that it sees (first > last for none).

    They are (1 or B, N) each, and count positions from the row's start, which documents do not change.
    """
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


def _sigmoid(_: str, query: Tensor, key: Tensor, value: Tensor, p: MaskSpec) -> Tensor:
    if p.left_padding is not None or (p.query_offset and query.shape[2] == 1 and p.key_lengths is None):
        return _sigmoid_of_cache(query, key, value, p)
    of_queries = isinstance(p.bias, Tensor) and p.bias.dim() > 1 and p.bias.shape[-2] > 1
    if p.documents is not None and not of_queries:  # the kernels for packed sequences have one bias for a sequence
        return _sigmoid_of_documents(query, key, value, p, p.documents)
    return sigmoid_attention(
        query,
        key,
        value,
        None if p.documents is None else p.documents.mask,
        dropout_p=p.dropout,
        enable_gqa=True,
        query_offset=p.query_offset,
        key_lengths=p.key_lengths,
        **p.operator_options(),
    )


def _sigmoid_of_cache(query: Tensor, key: Tensor, value: Tensor, p: MaskSpec) -> Tensor:
    """Attend to a cache from one new token, or with prompts padded on the left; causal and without dropout."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = p.operator_options()
    # a prompt may be processed in pieces, of which the first may hold only padding
    padding = None if p.left_padding is None else p.left_padding.clamp(max=key.shape[2])
    out = sigmoid_kvcache_attention(q, k, v, left_padding=padding, enable_gqa=True, **options)
    return out.transpose(1, 2)


def _sigmoid_of_documents(query: Tensor, key: Tensor, value: Tensor, p: MaskSpec, documents: Documents) -> Tensor:
    """Attend within each document by the kernels for packed sequences, which skip pairs of documents."""
    batch, length = query.shape[0], query.shape[2]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in cast_operands(query, key, value))  # (B · N, H, D)
    starts, options = documents.cu_seqlens, p.operator_options()
    out = sigmoid_varlen_attention(  # (B · N, Hq, D)
        q, k, v, starts, starts, length, length, enable_gqa=True, dropout_p=p.dropout, **options
    )
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def _elementwise(activation: str, query: Tensor, key: Tensor, value: Tensor, p: MaskSpec) -> Tensor:
    problem = make_problem(query, key, value, p)
    if p.left_padding is not None:
        j = torch.arange(key.shape[2], device=key.device)
        problem = problem._replace(attn_mask=(j >= p.left_padding[:, None])[:, None, None])
    with without_autocast(query.device.type):
        return reference.attention(problem, activation)


def make_problem(query: Tensor, key: Tensor, value: Tensor, p: MaskSpec) -> Problem:
    """Return the operator's problem of the call, in autocast's dtype if autocast is on."""
    query, key, value = cast_operands(query, key, value)
    return problems.make_problem(
        Problem,
        query,
        key,
        value,
        attn_mask=None if p.documents is None else p.documents.mask,
        dropout_p=p.dropout,
        key_lengths=p.key_lengths,
        query_offset=p.query_offset,
        **p.operator_options(),
    )


def _softmax(_: str, query: Tensor, key: Tensor, value: Tensor, p: MaskSpec) -> Tensor:
    mask = _softmax_mask(query, key, p)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=p.dropout,
        is_causal=p.causal and mask is None,
        enable_gqa=bool(query.shape[1] != key.shape[1]),  # torch.jit.trace has tensors for sizes
    )


def _softmax_mask(query: Tensor, key: Tensor, p: MaskSpec) -> Tensor | None:
    """Return the mask of windows, padding, caches and ALiBi, broadcastable to (B, Hq, N, M); None if not needed."""
    plain = all(x is None for x in (p.window, p.key_lengths, p.alibi_slopes, p.documents, p.left_padding))
    if plain and not (p.causal and p.query_offset):
        return None
    rows, columns = (p.query_offset, p.query_offset + query.shape[2]), (0, key.shape[2])
    seen = band(*p.sides, rows, columns, query.device)
    j = torch.arange(key.shape[2], device=query.device)
    if p.key_lengths is not None:
        seen = seen & (j < p.key_lengths.view(-1, 1, 1, 1).to(j.device))
    if p.left_padding is not None:
        seen = seen & (j >= p.left_padding[:, None, None, None].to(j.device))
    if p.documents is not None:
        seen = seen & p.documents.mask
    slopes = two_sided_slopes(p.alibi_slopes)
    if slopes is None:
        return seen
    return alibi(slopes, rows, columns, slopes.dtype).masked_fill(~seen, -torch.inf).to(query.dtype)


_ATTEND: dict[str, Callable[[str, Tensor, Tensor, Tensor, MaskSpec], Tensor]] = {
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    **{name: _elementwise for name in ELEMENTWISE if name != "sigmoid"},
}
