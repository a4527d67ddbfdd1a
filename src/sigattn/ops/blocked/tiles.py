"""Tiles of weights, and the operands of their products.

The batch of a product has G pairs of a sample and a key head. Its rows are those of all query heads that share the key
head, so that K and V need not be repeated. What depends on the indices of a weight (masks, positions, dropout) views a
tile, (G, rep · R, C), as (B, H, R, C): samples, query heads, queries, keys.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.block_mask import HIDDEN, runs
from sigattn.ops.dropout import keep_mask
from sigattn.ops.problem import UNLIMITED, Problem, keep_memory_warm, scale_of, select_rows, select_samples
from sigattn.ops.reference import alibi

# measured on CPUs with 1 to 2 MiB of L2 per core (docs/log.md)
TILE_BYTES = 4 << 20  # of the weights of a tile, of which at most two exist, and of an operand converted as a whole
LONG_SIDE = 2048  # most keys (in the backward pass, queries) of a tile
SHORT_SIDE = 256  # least queries (keys) of a tile of several heads; most, with a window that shows more keys than below
WINDOWED_SIDE = 128  # most, if a window shows fewer than 2 · LONG_SIDE keys: smaller tiles skip more of the others
WHOLE_UP_TO = 540**2  # weights of a head up to which skipping what a window hides gains nothing
NARROW_FROM = 16, 24**2  # rows and weights of a key head from which bfloat16 products are faster than float32
DENSE_FROM = 640  # rows from which copying operands that are not dense takes less time than their products lose


def arithmetic(problem: Problem) -> tuple[torch.dtype, int, int]:
    """Return the dtype to compute in, and the numbers of queries and keys, padded.

    Half precision is computed in float32, because rounding a logit to 8 or 11 bits makes its weight inaccurate, and in
    float16 a weight of 1/n loses bits as n grows. The exception is bfloat16, if the processor has bfloat16 products and
    the logits have no terms other than a bias: they are rounded once or twice, where the plain formula rounds them
    three times.
    """
    p, n, m = problem, problem.query.shape[2], problem.key.shape[2]
    rows = n * (p.query.shape[1] // max(p.key.shape[1], 1))
    is_small = rows < NARROW_FROM[0] or rows * m <= NARROW_FROM[1]
    has_terms = p.softcap or p.alibi_slopes is not None or (p.attn_mask is not None and p.attn_mask.is_floating_point())
    is_candidate = p.query.dtype is torch.bfloat16 and p.query.device.type == "cpu" and not (has_terms or is_small)
    if not is_candidate or not has_bfloat16_products():
        return torch.promote_types(p.query.dtype, torch.float32), n, m
    return torch.bfloat16, *((n, m) if p.mask_table is not None else (padded(n), padded(m)))


@functools.cache
def has_bfloat16_products() -> bool:
    """Return True if oneDNN has bfloat16 products for this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded(length: int, per_octave: int = 32) -> int:
    """Return the number of rows in bfloat16 for ``length`` rows: one of ``per_octave`` numbers in each octave.

    oneDNN compiles a bfloat16 product for each shape and its strides, and keeps the last thousand, up to a megabyte
    each. Padding leaves few shapes.
    """
    multiple = 1 << max(length.bit_length() - per_octave.bit_length(), 4)
    return -(-length // multiple) * multiple


class Tiling(NamedTuple):
    """Sizes of the tiles of a pass."""

    dtype: torch.dtype  # of the computation
    num_queries: int  # of a head, padded
    num_keys: int  # of a head, padded
    samples: int  # that are computed together
    heads: int  # key heads that are computed together
    rows: int  # most queries of a tile
    columns: int  # most keys of a tile
    is_whole: bool  # a tile has all queries and keys of its heads
    is_saved: bool  # the weights are saved


def choose_tiles(problem: Problem, weights: Tensor, outer: int) -> Tiling:
    """Return the tiles of a pass: whole heads if weights are saved, else long along the axis other than ``outer``."""
    p, is_saved = problem, weights.numel() > 0
    dtype, n, m = arithmetic(p)
    (batch, query_heads, _, width), heads = p.query.shape, p.key.shape[1]
    repeat, limit = query_heads // heads, TILE_BYTES // dtype.itemsize
    has_window = p.left != UNLIMITED or p.right != UNLIMITED
    fits = repeat * n * m <= limit and not (has_window and n * m > WHOLE_UP_TO)
    is_whole = is_saved or (fits and p.mask_table is None)
    short, long = (n, m) if outer == 0 else (m, n)
    if not is_whole:
        long = min(long, LONG_SIDE)
    span = m if UNLIMITED in (p.left, p.right) else p.left + p.right + 1
    most = WINDOWED_SIDE if has_window and span < 2 * LONG_SIDE else SHORT_SIDE
    side = short if is_whole else min(short, most)
    together = max(1, limit // max(repeat * side * long, m * width, 1))  # keys and values stay in the cache, too
    samples = max(1, min(together // heads, batch))
    if together < heads:  # a batched product computes each head on one thread
        threads = torch.get_num_threads()
        if threads <= 2 * together:
            together = _evenly(heads, max(together - together % threads, threads), threads)
    together = min(together, heads)
    if not is_whole:
        size = max(1, limit // (samples * together * repeat * long))
        side = _evenly(short, size, 32 if size >= 128 else 1)
        side = min(side, most) if has_window else side
        if p.mask_tiles is not None:  # a tile does not cross the blocks of the mask
            size = p.mask_tiles.shape[1 + outer]
            side = math.gcd(min(side, size), size)
    rows, columns = (side, long) if outer == 0 else (long, side)
    if dtype is torch.bfloat16 and has_window and not is_whole and p.mask_table is None:
        n, m = padded(n, 2), padded(m, 2)  # of rows in memory, which determine the strides of all tiles' operands
    return Tiling(dtype, n, m, samples, together, rows, columns, is_whole, is_saved)


def _evenly(length: int, limit: int, multiple: int) -> int:
    """Return the size of nearly equal pieces of at most ``limit``, rounded up to a multiple."""
    pieces = -(-length // limit)
    return -(-length // (pieces * multiple)) * multiple


def groups(problem: Problem, tiling: Tiling, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of a problem, and of other named tuples of tensors, that belong to heads computed together."""
    batch, heads = problem.key.shape[:2]
    repeat = problem.query.shape[1] // heads
    if tiling.samples >= batch and tiling.heads >= heads:
        yield problem, *others
        return
    for b in range(0, batch, tiling.samples):
        for h in range(0, heads, tiling.heads):
            samples, key_heads = slice(b, b + tiling.samples), slice(h, min(h + tiling.heads, heads))
            part, *parts = (_of_heads(t, samples, key_heads, repeat) for t in (problem, *others))
            lengths = None if problem.key_lengths is None else problem.key_lengths[samples]
            first_head = problem.first_head + (b * heads + h) * repeat
            yield part._replace(key_lengths=lengths, first_head=first_head), *parts


def _of_heads(tensors: Any, samples: slice, key_heads: slice, repeat: int) -> Any:
    """Return the part of a named tuple of tensors, which may be broadcast, that belongs to samples and key heads."""
    query_heads = slice(key_heads.start * repeat, key_heads.stop * repeat)
    parts = {}
    for name, t in tensors._asdict().items():
        if isinstance(t, Tensor) and t.dim() > 2 and name != "mask_tiles":
            t = select_samples(t, samples)
            parts[name] = t if t.shape[1] == 1 else t[:, key_heads if name in ("key", "value") else query_heads]
    return tensors._replace(**parts)


class Tiles:
    """Operands of a problem, padded with rows of 0, which add nothing to any sum, and its tiles."""

    def __init__(self, problem: Problem, tiling: Tiling) -> None:
        p = problem
        self.problem, self.tiling, self.blocks = p, tiling, p.blocks
        self.batch, self.heads = p.query.shape[:2]
        self.size: int = self.batch * p.key.shape[1]  # G
        self.repeat: int = self.batch * self.heads // self.size  # rep
        self.num_keys: int = tiling.num_keys  # that are computed, padded
        self.exists: Tensor | None = None  # with ``key_lengths``: (B, 1, num_keys, 1), False for keys beyond
        if p.key_lengths is not None:
            lengths = p.key_lengths
            if lengths.device.type == "cpu" and not tiling.is_saved:  # on an accelerator, reading would synchronise
                longest = int(lengths.max())
                is_padded = tiling.dtype is torch.bfloat16 and self.blocks is None
                self.num_keys = padded(longest) if is_padded else longest
            j = torch.arange(self.num_keys, device=p.key.device)
            self.exists = (j < lengths.to(j.device).view(-1, 1, 1)).unsqueeze(-1)
        is_padded = tiling.num_queries > p.query.shape[2] or self.num_keys > p.key.shape[2]
        has_mask = p.attn_mask is not None or self.blocks is not None or (p.normalize and self.exists is not None)
        self.may_hide: bool = is_padded or has_mask or p.left != UNLIMITED or p.right != UNLIMITED
        self.query: Tensor = self.operand(p.query, tiling.num_queries)  # (G, rep · N, D)
        self.key: Tensor = self.operand(p.key, self.num_keys, self.exists)  # (G, M, D)
        self.value: Tensor = self.operand(p.value, self.num_keys, self.exists)  # (G, M, Dv)

    def operand(self, t: Tensor, rows: int, exists: Tensor | None = None) -> Tensor:  # (B, H, ·, E) → (G, ·, E)
        """Return a tensor as operand of products: padded, and dense where that is faster.

        It is in the compute dtype, unless that needs more than ``TILE_BYTES``: then each tile's part is converted.
        """
        dtype, repeat = self.tiling.dtype, t.shape[0] * t.shape[1] // self.size
        t = t if t.shape[2] <= rows else t[:, :, :rows]
        t = t if t.numel() * dtype.itemsize > TILE_BYTES else t.to(dtype)
        if exists is not None:  # a NaN beyond key_lengths must not enter a product
            t = t.masked_fill(~exists[:, :, : t.shape[2]], 0)
        if t.shape[2] < rows:
            t = F.pad(t, (0, 0, 0, rows - t.shape[2]))
        t = t.reshape(self.size, repeat * rows, t.shape[3])
        has_many_rows = self.repeat * self.tiling.num_queries >= DENSE_FROM
        return t.contiguous() if has_many_rows or dtype is torch.bfloat16 else t

    def rows(self, t: Tensor, i: slice) -> Tensor:  # (G, rep · N, E) → (G, rep · R, E)
        """Return the rows of queries i of each query head, in the compute dtype."""
        if self.repeat == 1:
            return self.columns(t, i)
        if i.stop - i.start < self.tiling.num_queries:
            t = t.unflatten(1, (self.repeat, -1))[:, :, i].flatten(1, 2)
        return t.to(self.tiling.dtype)

    def columns(self, t: Tensor, j: slice) -> Tensor:  # (G, M, E) → (G, C, E)
        """Return rows j of each head, in the compute dtype."""
        return t[:, j].to(self.tiling.dtype)

    def prepare_logits(self) -> None:
        """Prepare the operands of the logits, scale · Q Kᵀ + b.

        In bfloat16, in which the sum would be rounded once more, the bias is added inside the product: query and key
        get two columns whose product is b / scale, and the remainder of its rounding.
        """
        p, query, key = self.problem, self.query, self.key
        scale, bias = scale_of(p), p.bias_value()
        if not 2.0**-64 < abs(scale) < 2.0**64:  # b / scale may overflow, and oneDNN does not compute 0 · Q Kᵀ
            query, scale = query.to(self.tiling.dtype) * scale, 1.0
        if self.tiling.dtype is torch.bfloat16:
            if not isinstance(bias, Tensor):
                bias = query.new_full((1, 1, 1, 1), bias, dtype=torch.float64)  # which may be infinite in float32
            term = bias.float() / scale
            columns = term.to(torch.bfloat16)
            rest = torch.nan_to_num(term - columns, nan=0.0, posinf=0.0, neginf=0.0)  # not of inf - inf
            columns = torch.cat([columns, rest.to(torch.bfloat16)], -1).expand(*p.query.shape[:3], 2)
            query = torch.cat([query, self.operand(columns, self.tiling.num_queries)], -1)
            key = torch.cat([key, key.new_ones(1, 1, 1).expand(*key.shape[:2], 2)], -1)
            bias = 0.0
        self._logits = query, key, scale, bias.to(self.tiling.dtype) if isinstance(bias, Tensor) else bias

    def loop(self, outer: int) -> list[tuple[slice, list[slice]]]:
        """Return the ranges of the outer loop (0: queries, 1: keys), each with those of the inner loop to compute."""
        p, t = self.problem, self.tiling
        before, after, shift = (p.left, p.right, p.query_offset) if outer == 0 else (p.right, p.left, -p.query_offset)
        if t.is_whole:
            before = after = UNLIMITED
        axes = (p.query.shape[2], t.num_queries, t.rows), (p.key.shape[2], self.num_keys, t.columns)
        (length, end, side), (inner_length, inner_end, inner_side) = axes[outer], axes[1 - outer]
        end, inner_end = min(end, padded(length)), min(inner_end, padded(inner_length))
        if self.blocks is not None:
            table = (self.blocks.table != HIDDEN).flatten(0, 1).any(0).cpu()
            table = table if outer == 0 else table.T
            size, inner_size = self.blocks.size[outer], self.blocks.size[1 - outer]
        ranges = []
        for start in range(0, min(length, end), side):
            stop, first, last = min(start + side, end), 0, inner_end
            if before != UNLIMITED:
                first = max(0, start + shift - before)
            if after != UNLIMITED:
                last = min(inner_end, stop + shift + after)
            if t.dtype is torch.bfloat16 and self.blocks is None:  # few shapes, see ``padded``
                last = min(inner_end, -(-last // 64) * 64)
                first = max(0, last - -(-(last - first) // 64) * 64)
            spans = [(first, last)]
            if self.blocks is not None:
                spans = list(runs(table[start // size : -(-stop // size)].any(0), inner_size, first, last))
            tiles = []
            for first, last in spans:
                for i in range(first, min(last, inner_length), inner_side):
                    tiles.append(slice(i, min(i + inner_side, last)))
            ranges.append((slice(start, stop), tiles))
        return ranges

    def tile(self, memory: Tensor, i: slice, j: slice) -> Tensor:  # (G, rep · R, C)
        """Return the memory of the tile of queries i and keys j, with its weights if they are saved."""
        rows, columns = self.repeat * (i.stop - i.start), j.stop - j.start
        return memory.view(-1)[: self.size * rows * columns].view(self.size, rows, columns)

    def by_head(self, tile: Tensor, i: slice, j: slice) -> Tensor:  # (B, H, R, C)
        """View a tile by sample and query head, without padding."""
        n, m = self.problem.query.shape[2], self.problem.key.shape[2]
        return tile.view(self.batch, self.heads, -1, tile.shape[2])[:, :, : n - i.start, : m - j.start]

    def logits(self, out: Tensor, i: slice, j: slice) -> Tensor:  # (G, rep · R, C)
        """Write scale · Q Kᵀ, or with a cap c tanh(scale · Q Kᵀ / c)."""
        query, key, scale, _ = self._logits
        # no beta = b: oneDNN compiles a product for each of its values, thus for each length
        alpha = scale / (self.problem.softcap or 1.0)
        torch.baddbmm(out, self.rows(query, i), self.columns(key, j).mT, beta=0, alpha=alpha, out=out)
        return out.tanh_() if self.problem.softcap else out

    def weights(self, memory: Tensor, i: slice, j: slice) -> Tensor:  # (G, rep · R, C)
        """Return σ(scale · Q Kᵀ + b + …) of queries i and keys j, before dropout, in the memory."""
        problem, bias, p = self.problem, self._logits[3], self.logits(self.tile(memory, i, j), i, j)
        mask, slopes, offset = problem.attn_mask, problem.alibi_slopes, problem.query_offset
        if problem.softcap:
            p.mul_(problem.softcap)
        if isinstance(bias, Tensor):
            self.by_head(p, i, j).add_(select_rows(bias, i))
        elif bias != 0:
            p.add_(bias)
        if mask is not None and mask.is_floating_point():
            self.by_head(p, i, j).add_(of_tile(mask, i, j))
        if slopes is not None:
            term = alibi(slopes, (i.start + offset, i.stop + offset), (j.start, j.stop), p.dtype)
            self.by_head(p, i, j).add_(term)
        p.sigmoid_()
        if self.may_hide:
            self.hide(p, i, j)
        return p

    def hide(self, p: Tensor, i: slice, j: slice) -> None:
        """Set the weights, or their gradients, of hidden keys to 0, whatever they are.

        Keys beyond ``key_lengths`` are hidden with ``normalize`` only: else it is enough that they and their values are
        0.
        """
        problem, p = self.problem, p.view(self.batch, self.heads, -1, p.shape[2])
        rows, columns = problem.query.shape[2] - i.start, problem.key.shape[2] - j.start  # that exist
        if p.shape[2] > rows:  # rows of padding, whose weights are NaN where a key is
            p[:, :, rows:] = 0
        if p.shape[3] > columns:  # columns of padding, whose weights are NaN where a query is
            p[..., columns:] = 0
        first, last = i.start + problem.query_offset, i.stop - 1 + problem.query_offset  # positions of the queries
        if problem.right != UNLIMITED and j.stop - 1 > first + problem.right:
            p.tril_(first + problem.right - j.start)
        if problem.left != UNLIMITED and j.start < last - problem.left:
            p.triu_(first - problem.left - j.start)
        if self.exists is not None and problem.normalize:  # their weights are part of a sum
            p.masked_fill_(~self.exists[:, :, j].mT, 0)
        if problem.attn_mask is not None:
            mask = of_tile(problem.attn_mask, i, j)
            if mask.dtype is torch.bool:
                p[:, :, :rows, :columns].masked_fill_(~mask, 0)
            elif mask.device.type != "cpu" or not mask.amin() > -torch.inf:  # -inf plus inf or NaN is NaN
                p[:, :, :rows, :columns].masked_fill_(mask == -torch.inf, 0)
        if self.blocks is not None and not self.blocks.are_visible(i, j):
            p.masked_fill_(~self.blocks.dense(i, j), 0)

    def dropped(self, i: slice, j: slice) -> Tensor:  # (G, rep · R, C)
        """Return the mask of the weights that dropout drops."""
        p, device = self.problem, self.query.device
        assert p.seed is not None
        heads = torch.arange(p.first_head, p.first_head + self.batch * self.heads, device=device)
        rows = torch.arange(i.start + p.query_offset, i.stop + p.query_offset, device=device)
        columns = torch.arange(j.start, j.stop, device=device)
        return ~keep_mask(p.seed, heads, rows, columns, p.dropout_p).view(self.size, -1, len(columns))


def new_memory(problem: Problem, tiling: Tiling) -> Tensor:
    """Return memory for a tile."""
    keep_memory_warm()
    heads = tiling.samples * tiling.heads * (problem.query.shape[1] // problem.key.shape[1])
    return problem.query.new_empty(heads * tiling.rows * tiling.columns, dtype=tiling.dtype)


def of_tile(t: Tensor, i: slice, j: slice) -> Tensor:  # (B or 1, H or 1, R or 1, C or 1)
    """Return a tile's part of a tensor broadcastable to (B, H, N, M), a view."""
    t = select_rows(t, i)
    return t if t.shape[3] == 1 else t[..., j]
