"""Packed sequences and caches of keys and values: each sequence or sample is computed as a dense problem.

``attend`` and ``differentiate`` are a backend's: they compute a dense problem into given memory. Lengths and tables are
read once at the beginning of a pass, which synchronises on an accelerator.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sigattn.ops.gradients import Gradients, NeedsGrad, Result, Saved
from sigattn.ops.normalization import add_parts
from sigattn.ops.problem import (
    UNLIMITED,
    KVCacheProblem,
    Problem,
    VarlenProblem,
    in_dtypes,
    new_gradients,
    new_result,
)

# writes the output of a problem and the sums of its rows
Attend = Callable[[Problem, Result], None]
# writes the gradients of query, key and value, and adds those of bias, mask and slopes
Differentiate = Callable[[Problem, Tensor, Result, Gradients], None]

FEW_ROWS = 16  # queries of a key head up to which a long cache is split
COPIED = 1 << 15  # elements of a sample's K that are copied to batch samples


def varlen_forward(attend: Attend, problem: VarlenProblem, saved: Saved | None = None) -> Result:
    """Return the output of packed sequences, (Tq, Hq, Dv), 0 for rows of no sequence, and the sums of rows."""
    result = new_result(problem.query, problem.value.shape[2], problem.normalize)
    end = 0
    for s, rows, keys in problem.row_ranges():
        attend(problem.sequence(s, rows, keys), _of_sequence(result, rows))
        end = rows.stop
    result.out[end:] = 0
    result.row_sums[end:] = 0
    return result


def varlen_backward(
    differentiate: Differentiate, problem: VarlenProblem, grad_out: Tensor, result: Result, needs_grad: NeedsGrad
) -> Gradients:
    """Return the gradients in ``needs_grad``; those of rows of no sequence are 0. grad_out: (Tq, Hq, Dv)."""
    gradients = new_gradients(problem, needs_grad)
    # as a problem, whose sequences are parts of the gradients
    packed = problem._replace(**{name: t for name, t in gradients._asdict().items() if t is not None})
    rows = keys = slice(0, 0)
    for s, rows, keys in problem.row_ranges():
        parts = zip(gradients, packed.sequence(s, rows, keys)[:6], strict=True)
        of_sequence = Gradients(*(None if gradient is None else part for gradient, part in parts))
        part = _of_sequence(result._replace(out=grad_out), rows)
        differentiate(problem.sequence(s, rows, keys), part.out, _of_sequence(result, rows), of_sequence)
    for gradient, end in zip(gradients[:3], (rows.stop, keys.stop, keys.stop), strict=True):
        if gradient is not None:
            gradient[end:] = 0
    return in_dtypes(gradients, problem)


def _of_sequence(result: Result, rows: slice) -> Result:
    """Return the part of a result that belongs to a sequence, views: (Tq, H, …) → (1, H, n, …)."""
    return Result(*(t[rows].transpose(0, 1).unsqueeze(0) if t.dim() > 1 else t for t in result))


def kvcache_forward(attend: Attend, piece: int | None, problem: KVCacheProblem, saved: Saved | None = None) -> Result:
    """Return the output of new queries against a cache, (B, N, Hq, Dv), and the sums of rows.

    Samples are computed one by one, unless they have the same length and it takes no large copy to batch them. A long
    cache is split for few queries: the partial results of disjoint keys add (Sect. 4). The query heads that share a key
    head are the rows of one problem if each has one query, which sees all of the keys.

    piece: elements of K that are computed at a time, so that converted keys are still in the processor's cache; None
    for a backend that converts as it goes, and needs no copies for a batch.
    """
    p, total = problem, new_result(problem.query, problem.value.shape[3], problem.normalize)
    (batch, n, heads, _), (_, _, key_heads, width) = p.query.shape, p.key.shape
    keys = p.key_ranges()
    is_uniform = p.block_table is None and p.attn_mask is None and len(set(keys)) == 1
    if piece is not None:
        is_uniform = is_uniform and (_can_fold_heads(p.key, keys[0][1]) and _can_fold_heads(p.value, keys[0][1]))
    size = batch if is_uniform else 1
    piece_keys = max(p.capacity, 1)
    if piece is not None and n * heads <= FEW_ROWS * key_heads:
        piece_keys = max(piece // max(size * key_heads * width, 1), 64)
    folds = n == 1 and p.attn_mask is None and p.alibi_slopes is None and total.out.is_contiguous()
    for b in range(0, batch, size):
        samples, (first, length, end) = slice(b, b + size), keys[b]
        if p.left != UNLIMITED:  # keys that no query sees are neither converted nor copied
            first = max(first, min(end - n - p.left, length))
        stop = length if p.right == UNLIMITED else max(first, min(length, end + p.right))
        # (nb, Hq, N, ·)
        result = Result(*(t[samples].transpose(1, 2) if t.dim() > 1 else t for t in total))
        if folds:
            result = Result(*(t.view(size, key_heads, -1, t.shape[3]) if t.dim() > 1 else t for t in result))
        wide = torch.promote_types(p.query.dtype, torch.float32)
        parts = []
        for start in range(first, max(stop, first + 1), piece_keys):
            is_whole = stop - first <= piece_keys
            dense = p.samples(samples, start, min(start + piece_keys, stop), length, end)
            parts.append(result if is_whole else Result(*(torch.empty_like(t, dtype=wide) for t in result)))
            attend(_with_heads_as_rows(dense) if folds else dense, parts[-1])
        if len(parts) > 1:
            add_parts(parts, result)
    return total


def _with_heads_as_rows(p: Problem) -> Problem:
    """Return a problem of one query that sees all keys, with (B, Hkv, Hq / Hkv, D) queries."""
    (batch, heads, _, d), key_heads = p.query.shape, p.key.shape[1]
    bias = p.bias
    if bias is not None and bias.dim():
        bias = bias.expand(bias.shape[0], heads, 1, 1).reshape(-1, key_heads, heads // key_heads, 1)
    query = p.query.reshape(batch, key_heads, heads // key_heads, d)
    return p._replace(query=query, bias=bias, left=UNLIMITED, right=UNLIMITED, query_offset=0)


def _can_fold_heads(cache: Tensor, length: int) -> bool:
    """Return True if samples and heads of (B, M, H, E) are one dimension in memory, or few enough to be copied."""
    return cache.stride(0) == cache.shape[2] * cache.stride(2) or length * cache.stride(1) <= COPIED
