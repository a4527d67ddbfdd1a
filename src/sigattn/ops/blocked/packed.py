"""Packed sequences and caches of keys and values: each sequence or sample is computed as a dense problem.

Lengths and tables are read once at the beginning of a pass, which synchronises on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sigattn.ops.blocked.dense import attend, differentiate, in_dtypes, new_gradients
from sigattn.ops.gradients import Gradients, NeedsGrad, Result, Saved
from sigattn.ops.normalization import add_parts
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, VarlenProblem, new_result

# measured on CPUs
FEW_ROWS = 16  # queries of a key head up to which a long cache is split
PIECE = 1 << 19  # elements of K that are computed at a time, so that converted keys are still in the cache
COPIED = 1 << 15  # elements of a sample's K that are copied to batch samples


def varlen_forward(problem: VarlenProblem, saved: Saved | None = None) -> Result:
    """Return the output of packed sequences, (Tq, Hq, Dv), 0 for rows of no sequence, and the sums of rows."""
    result = new_result(problem.query, problem.value.shape[2], problem.normalize)
    end = 0
    for s, rows, keys in _sequences(problem):
        attend(problem.sequence(s, rows, keys), _of_sequence(result, rows))
        end = rows.stop
    result.out[end:] = 0
    result.row_sums[end:] = 0
    return result


def varlen_backward(problem: VarlenProblem, grad_out: Tensor, result: Result, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``; those of rows of no sequence are 0. grad_out: (Tq, Hq, Dv)."""
    gradients = new_gradients(problem, needs_grad)
    # as a problem, whose sequences are parts of the gradients
    packed = problem._replace(**{name: t for name, t in gradients._asdict().items() if t is not None})
    rows = keys = slice(0, 0)
    for s, rows, keys in _sequences(problem):
        parts = zip(gradients, packed.sequence(s, rows, keys)[:6], strict=True)
        of_sequence = Gradients(*(None if gradient is None else part for gradient, part in parts))
        part = _of_sequence(result._replace(out=grad_out), rows)
        differentiate(problem.sequence(s, rows, keys), part.out, _of_sequence(result, rows), of_sequence)
    for gradient, end in zip(gradients[:3], (rows.stop, keys.stop, keys.stop), strict=True):
        if gradient is not None:
            gradient[end:] = 0
    return in_dtypes(gradients, problem)


def _sequences(problem: VarlenProblem) -> Iterator[tuple[int, slice, slice]]:
    """Yield the index of each sequence, its rows of queries and its rows of keys."""
    starts_q, starts_k = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    for s in range(problem.sequences):
        yield s, slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])


def _of_sequence(result: Result, rows: slice) -> Result:
    """Return the part of a result that belongs to a sequence, views: (Tq, H, …) → (1, H, n, …)."""
    return Result(*(t[rows].transpose(0, 1).unsqueeze(0) if t.dim() > 1 else t for t in result))


def kvcache_forward(problem: KVCacheProblem, saved: Saved | None = None) -> Result:
    """Return the output of new queries against a cache, (B, N, Hq, Dv), and the sums of rows.

    Samples are computed one by one, unless they have the same length and it takes no large copy to batch them. A long
    cache is split for few queries: the partial results of disjoint keys add (Sect. 4).
    """
    p, total = problem, new_result(problem.query, problem.value.shape[3], problem.normalize)
    (batch, n, heads, _), (_, _, key_heads, width) = p.query.shape, p.key.shape
    keys = p.key_ranges()
    is_uniform = p.block_table is None and p.attn_mask is None and p.key.shape[0] == batch and len(set(keys)) == 1
    is_uniform = is_uniform and (_can_fold_heads(p.key, keys[0][1]) and _can_fold_heads(p.value, keys[0][1]))
    size = batch if is_uniform else 1
    has_few_rows = n * heads <= FEW_ROWS * key_heads
    piece = max(PIECE // max(size * key_heads * width, 1), 64) if has_few_rows else p.capacity
    for b in range(0, batch, size):
        samples, (first, length, end) = slice(b, b + size), keys[b]
        if p.left != UNLIMITED:  # keys that no query sees are neither converted nor copied
            first = max(first, min(end - n - p.left, length))
        stop = length if p.right == UNLIMITED else max(first, min(length, end + p.right))
        # (nb, Hq, N, ·)
        result = Result(*(t[samples].transpose(1, 2) if t.dim() > 1 else t for t in total))
        if stop - first <= piece:
            attend(p.samples(samples, first, stop, length, end), result)
            continue
        wide = torch.promote_types(p.query.dtype, torch.float32)
        parts = []
        for start in range(first, stop, piece):
            parts.append(Result(*(torch.empty_like(t, dtype=wide) for t in result)))
            attend(p.samples(samples, start, min(start + piece, stop), length, end), parts[-1])
        add_parts(parts, result)
    return total


def _can_fold_heads(cache: Tensor, length: int) -> bool:
    """Return True if samples and heads of (B, M, H, E) are one dimension in memory, or few enough to be copied."""
    return cache.stride(0) == cache.shape[2] * cache.stride(2) or length * cache.stride(1) <= COPIED
