"""Decoding: one new query of each sample against a cache, as a dense problem."""

from __future__ import annotations

from sigattn.ops.gradients import Result, Saved
from sigattn.ops.llvm.calls import forward
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, Problem


def kvcache_unavailable(p: KVCacheProblem) -> str | None:
    """Return why ``kvcache_forward`` does not support a problem, whose device and dtype are supported, or None."""
    given = {
        "several new queries": p.query.shape[1] != 1,
        "pages": p.block_table is not None,
        "left padding": p.left_padding is not None,
        "a mask": p.attn_mask is not None,
        "ALiBi": p.alibi_slopes is not None,
        "a window": p.left != UNLIMITED,
        "softcap": bool(p.softcap),
        "a cache that is sharded": p.query_ends is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    return f"for a cache it does not support {' and '.join(names)}" if names else None


def kvcache_forward(p: KVCacheProblem, saved: Saved | None) -> Result:
    """Return the output of a new query of each sample, (B, 1, Hq, Dv), and the sums of rows.

    The query sees all keys of its sample. The query heads that share a key head are the rows of the dense problem, so
    that the keys are read once for all of them.
    """
    batch, _, heads, d = p.query.shape
    shape = batch, p.key.shape[2], heads // p.key.shape[2]
    lengths = p.seqlens.tolist()
    keys = slice(0, max(lengths, default=0))
    is_uniform = len(set(lengths)) <= 1
    bias = p.bias if p.bias.dim() == 0 else p.bias.expand(batch, heads, 1, 1).reshape(*shape, 1)
    dense = Problem(
        p.query.reshape(*shape, d), p.key[:, keys].transpose(1, 2), p.value[:, keys].transpose(1, 2), bias,
        key_lengths=None if is_uniform else p.seqlens, scale=p.scale, fast=p.fast, normalize=p.normalize,
    )  # fmt: skip
    return Result(*(t.reshape(batch, 1, heads, t.shape[-1]) if t.dim() > 1 else t for t in forward(dense, None)))
