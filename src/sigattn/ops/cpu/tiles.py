"""Partition of a problem into groups of heads and tiles of queries and keys, and masks within a tile.

A group consists of (sample, key/value head) pairs that are batched. The rows of its products are those of all query
heads that share a key/value head, so that K and V need not be repeated. Operations that depend on the indices of a
weight (masks, positions, dropout) view a tile as (nb, nh, rep, R, C): samples, key/value heads, query heads of each,
queries, keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sigattn.ops.block_mask import HIDDEN, Blocks, runs
from sigattn.ops.cpu.matmul import (
    Capped,
    Extended,
    Fused,
    Products,
    Scratch,
    fused_unavailable,
    keep_memory_warm,
    scratch,
)
from sigattn.ops.dropout import keep_mask
from sigattn.ops.problem import UNLIMITED, Problem, alibi, distances

# Sizes measured on a CPU with 1 MiB of L2 and 32 MiB of L3 (docs/log.md). They bound the working memory: a tile has
# TILE_BYTES, and only a few tiles exist at a time.
TILE_BYTES = 4 << 20
LONG_SIDE = 4096
WINDOWED_SIDE = 512
SHORT_SIDE = 256  # least number of queries (keys, in the backward pass) in a tile of several heads
WINDOWED_SHORT_SIDE = 128
WIDE_UP_TO = 24**2  # weights per head up to which bfloat16 gains nothing over float32


def _is_zen_5() -> bool:
    """Return True on AMD processors from Zen 5 on.

    There, oneDNN's products are up to twice as fast as MKL's, because they use AVX-512 where MKL's use AVX2; on Zen 4
    they are equally fast (docs/log.md).
    """
    processor = torch.cpu.get_capabilities()
    return bool(processor.get("sse4a") and processor.get("avx_vnni"))


# weights per head from which fused products, of one head at a time, are faster than batched ones; and with a window,
# of which smaller tiles skip more, times this factor
FUSED_FROM, WINDOWED_FACTOR = (
    ({torch.float32: 320**2, torch.bfloat16: 640**2}, 1)
    if _is_zen_5()
    else ({torch.float32: 900**2, torch.bfloat16: 1100**2}, 4)
)


class Span(NamedTuple):
    """Range of indices start … stop - 1."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start


def spans(start: int, stop: int, size: int) -> Iterator[Span]:
    """Cut start … stop - 1 into pieces of the given size."""
    for s in range(start, stop, size):
        yield Span(s, min(s + size, stop))


def evenly(length: int, most: int, multiple: int = 1) -> int:
    """Return the size of nearly equal pieces of ``most`` at most, rounded up to a multiple."""
    size = -(-length // -(-length // most)) if length else 1
    return -(-size // multiple) * multiple


def heads_together(heads: int, most: int) -> int:
    """Return how many of the heads to compute at a time: ``most`` at most, or twice as many with as many threads.

    A product computes each head on one thread, so that other numbers than multiples of the threads leave some idle.
    """
    threads = _num_threads()
    if threads > 2 * most:
        return min(heads, most)
    return min(heads, evenly(heads, max(most - most % threads, threads), threads))


@functools.cache
def _num_threads() -> int:
    """Return the number of threads at the first call, so that a backward pass has the groups of its forward pass."""
    return torch.get_num_threads()


class Group:
    """Group of heads of a problem: the operands of their products, and the masks of their tiles.

    Attributes (G = nb · nh):
        query: (G, rep, N, D). key: (G, M, D). value: (G, M, Dv). All unscaled, in the compute dtype.
        num_keys: number of keys to process, less than M if ``key_lengths`` are.
    """

    def __init__(
        self,
        problem: Problem,
        batch: Span,
        heads: Span,
        dtype: torch.dtype,
        products: type[Products],
        memory: Scratch | None = None,
    ) -> None:
        self.problem = problem
        self.batch = batch
        self.heads = heads
        self.dtype = dtype
        self.long_side = LONG_SIDE
        self.accumulator: torch.dtype = torch.promote_types(dtype, torch.float32)
        self.repeat: int = problem.query.shape[1] // problem.key.shape[1]
        self.shape: tuple[int, int, int] = (batch.size, heads.size, self.repeat)
        self.num_queries: int = problem.query.shape[2]
        self.num_keys: int
        self.ragged: bool
        self.num_keys, self.ragged = self._count_keys()
        self.query: Tensor = self.queries_of(problem.query)
        self.key: Tensor = self.keys_of(problem.key)
        self.value: Tensor = self.keys_of(problem.value)
        mask = problem.attn_mask
        self.additive: bool = problem.alibi_slopes is not None or (mask is not None and mask.is_floating_point())
        self.hidden: bool = mask is not None and not mask.is_floating_point()
        self.blocks: Blocks | None = self._blocks_here()
        plain = not (self.additive or self.hidden or self.ragged) and problem.seed is None and self.blocks is None
        self.bare: bool = products is Fused and plain
        bias = problem.bias_value()
        if isinstance(bias, Tensor):
            bias = self.heads_of(bias).to(self.accumulator)
            bias = bias.expand(*self.shape, self.num_queries, 1).flatten(0, 1)
        operands = self.query, self.key, bias, problem.scale_value
        self.products: Products = Capped(*operands, problem.softcap) if problem.softcap else products(*operands)
        self.products.scratch = memory

    def _count_keys(self) -> tuple[int, bool]:
        """Return the number of keys to process, and True if a sample of the group may have fewer keys."""
        lengths = self.problem.key_lengths
        if lengths is None:
            return self.problem.key.shape[2], False
        if lengths.device.type != "cpu":  # reading the lengths would synchronise
            return self.problem.key.shape[2], True
        here = lengths[self.batch.slice].tolist()
        return max(here), min(here) < max(here)

    def _blocks_here(self) -> Blocks | None:
        """Return the blocks of the group's heads, (nb or 1, nh or 1, rep or 1, blocks of queries, blocks of keys)."""
        blocks = self.problem.blocks
        if blocks is None:
            return None
        blocks = blocks._replace(table=self.heads_of(blocks.table))
        self.visible_blocks: Tensor = (blocks.table != HIDDEN).flatten(0, 2).any(0).cpu()
        return blocks

    # -- the group's part of a tensor -----------------------------------------------------------------------------

    def heads_of(self, t: Tensor) -> Tensor:
        """Return the group's heads, a view: (B or 1, Hq or 1, ·, ·) → (nb or 1, nh or 1, rep or 1, ·, ·)."""
        if t.shape[0] != self.shape[0] and t.shape[0] != 1:
            t = t[self.batch.slice]
        if t.shape[1] == 1:
            return t.unsqueeze(1)
        t = t.unflatten(1, (-1, self.repeat)) if self.repeat > 1 else t.unsqueeze(2)
        return t if t.shape[1] == self.shape[1] else t[:, self.heads.slice]

    def queries_of(self, t: Tensor) -> Tensor:
        """Return the group's part of (B, Hq, N, E) as (G, rep, N, E), dense, in the compute dtype."""
        nb, nh, rep = self.shape
        return self.heads_of(t).to(self.dtype).reshape(nb * nh, rep, *t.shape[2:]).contiguous()

    def keys_of(self, t: Tensor) -> Tensor:
        """Return the group's part of (B, Hkv, M, E) as (G, num_keys, E), dense, in the compute dtype, padded with 0."""
        part = t[self.batch.slice, self.heads.slice, : self.num_keys].to(self.dtype)
        if self.ragged:  # a NaN beyond key_lengths must not enter a product
            part = part.masked_fill(~self.exists(Span(0, self.num_keys)).view(-1, 1, self.num_keys, 1), 0)
        return part.flatten(0, 1).contiguous()

    def exists(self, columns: Span) -> Tensor:  # (nb, 1, 1, 1, C)
        assert self.problem.key_lengths is not None
        j = torch.arange(*columns, device=self.problem.key.device)
        return j < self.problem.key_lengths[self.batch.slice].to(j.device).view(-1, 1, 1, 1, 1)

    # -- ranges and blocks of queries and keys --------------------------------------------------------------------

    def visible_range(self, span: Span, dimension: int) -> Span:
        """Return the keys that any of these queries sees (dimension 0), or the queries that see any of the keys (1)."""
        p, (before, after) = self.problem, (self.problem.left, self.problem.right)
        shift, length = p.query_offset, self.num_keys
        if dimension == 1:
            before, after, shift, length = after, before, -shift, self.num_queries
        start = 0 if before == UNLIMITED else span.start + shift - before
        stop = length if after == UNLIMITED else span.stop + shift + after
        return Span(max(start, 0), min(stop, length))

    def short_blocks(self, span: Span, long_side: int, dimension: int = 0) -> Iterator[Span]:
        """Yield the blocks of the outer loop, of such a size that a block times ``long_side`` fills a tile.

        dimension: 0 for queries, 1 for keys.
        """
        weights = TILE_BYTES // self.dtype.itemsize // (self.shape[0] * self.shape[1] * self.repeat)
        size = max(1, weights // max(1, min(long_side, LONG_SIDE)))
        if self.problem.left != UNLIMITED or self.problem.right != UNLIMITED:
            # twice as large at most: larger blocks make products faster, smaller ones waste less at the window's edges
            size = min(WINDOWED_SIDE, 2 * size) if isinstance(self.products, Fused) else min(WINDOWED_SHORT_SIDE, size)
        if self.blocks is not None:  # must divide the block size of the mask
            size = min(size, self.blocks.size[dimension])
            size = next(s for s in range(size, 0, -1) if self.blocks.size[dimension] % s == 0)
        elif not isinstance(self.products, Fused):
            size = evenly(span.size, size, 32 if size >= 128 else 1)  # products of other sizes are slower
        return spans(*span, size)

    def columns_of(self, rows: Span) -> Iterator[Span]:
        """Yield the blocks of keys visible to these queries, the inner loop of the forward pass."""
        return self._inner(rows, 0)

    def rows_of(self, columns: Span) -> Iterator[Span]:
        """Yield the blocks of queries to which these keys are visible, the inner loop of the backward pass."""
        return self._inner(columns, 1)

    def _inner(self, outer: Span, dimension: int) -> Iterator[Span]:
        """Split the visible range of the inner axis into long blocks, without blocks of the mask that are hidden.

        dimension: dimension of the outer axis in the table of blocks.
        """
        span = self.visible_range(outer, dimension)
        if self.blocks is None:
            yield from spans(*span, self.long_side)
            return
        size, other = self.blocks.size[dimension], self.blocks.size[1 - dimension]
        chosen = slice(outer.start // size, -(-outer.stop // size))
        table = self.visible_blocks if dimension == 0 else self.visible_blocks.T
        for start, stop in runs(table[chosen].any(0), other, *span):
            yield from spans(start, stop, self.long_side)

    # -- weights and masks of a tile ------------------------------------------------------------------------------

    def part(self, t: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return a tile's part of a mask broadcastable to (B, Hq, N, M), broadcastable to (nb, nh, rep, R, C)."""
        t = self.heads_of(t)
        t = t if t.shape[3] == 1 else t[..., rows.slice, :]
        return t if t.shape[4] == 1 else t[..., columns.slice]

    def tile(self, rows: Span, columns: Span, transposed: bool) -> Tensor:
        """Return the weights P of a tile before dropout: (G, rep·R, C), or (G, C, rep·R) if transposed."""
        if self.additive:
            p = self.products.logits(rows.slice, columns.slice, transposed)
            self._add_terms(self.split_heads(p, rows, transposed), rows, columns)
            p.sigmoid_()
            self._mask_minus_infinity(p, rows, columns, transposed)
        else:
            p = self.products.weights(rows.slice, columns.slice, transposed)
        self._apply_window_mask(p, rows, columns, transposed)
        if self.ragged:
            self.split_heads(p, rows, transposed).masked_fill_(~self.exists(columns), 0)
        if self.blocks is not None and not self.blocks.are_visible(rows.slice, columns.slice):
            hidden = self.blocks.dense(rows.slice, columns.slice).logical_not_()
            self.split_heads(p, rows, transposed).masked_fill_(hidden, 0)
        if self.hidden:
            assert self.problem.attn_mask is not None
            visible = self.part(self.problem.attn_mask, rows, columns)
            self.split_heads(p, rows, transposed).masked_fill_(~visible, 0)
        return p

    def _mask_minus_infinity(self, p: Tensor, rows: Span, columns: Span, transposed: bool) -> None:
        """Zero the weights where an additive mask is -inf, because its sum with a logit of inf or NaN is NaN."""
        mask = self.problem.attn_mask
        if mask is None or not mask.is_floating_point():
            return
        added = self.part(mask, rows, columns)
        if mask.device.type != "cpu" or not added.amin() > -torch.inf:  # on an accelerator, reading would synchronise
            self.split_heads(p, rows, transposed).masked_fill_(added == -torch.inf, 0)

    def split_heads(self, tile: Tensor, rows: Span, transposed: bool) -> Tensor:
        """View a tile as (nb, nh, rep, R, C)."""
        nb, nh, rep = self.shape
        if transposed:
            return tile.view(nb, nh, tile.shape[1], rep, rows.size).permute(0, 1, 3, 4, 2)
        return tile.view(nb, nh, rep, rows.size, tile.shape[-1])

    def _add_terms(self, logits: Tensor, rows: Span, columns: Span) -> None:
        mask, slopes = self.problem.attn_mask, self.problem.alibi_slopes
        if mask is not None and mask.is_floating_point():
            logits.add_(self.part(mask, rows, columns))
        if slopes is not None:
            logits.add_(alibi(self.slopes_of(slopes), self._positions(rows), columns, logits.dtype))

    def _apply_window_mask(self, p: Tensor, rows: Span, columns: Span, transposed: bool) -> None:
        """Zero the weights outside i - left ≤ j ≤ i + right, writing only the corners that the window's edges cross."""
        left, right = self.problem.left, self.problem.right
        (i0, i1), (j0, j1) = self._positions(rows), columns
        if right != UNLIMITED:  # hidden where j > i + right
            i, j = min(i1, j1 - 1 - right), max(j0, i0 + right + 1)
            if i0 < i and j < j1:
                for q_k in self._corner(p, rows, (0, i - i0), (j - j0, j1 - j0), transposed):
                    q_k.triu_(j - i0 - right) if transposed else q_k.tril_(i0 - j + right)
        if left != UNLIMITED:  # hidden where j < i - left
            i, j = max(i0, j0 + left + 1), min(j1, i1 - 1 - left)
            if i < i1 and j0 < j:
                for q_k in self._corner(p, rows, (i - i0, i1 - i0), (0, j - j0), transposed):
                    q_k.tril_(j0 - i + left) if transposed else q_k.triu_(i - j0 - left)

    def _corner(
        self, p: Tensor, rows: Span, r: tuple[int, int], c: tuple[int, int], transposed: bool
    ) -> Iterator[Tensor]:
        """Yield views of a part of a tile, one for each query head of a key head: (G, R, C), or transposed (G, C, R).

        With three dimensions and dense rows, ``tril_`` and ``triu_`` are ten times as fast as a masked fill.
        """
        for h in range(self.repeat):
            q = slice(h * rows.size + r[0], h * rows.size + r[1])
            yield p[:, slice(*c), q] if transposed else p[:, q, slice(*c)]

    def slopes_of(self, slopes: Tensor) -> Tensor:
        """Return the group's slopes, (B or 1, Hq, 2) → (nb or 1, nh, rep, 2)."""
        return self.heads_of(slopes.unsqueeze(-1)).squeeze(-1)

    def _positions(self, rows: Span) -> Span:
        return Span(rows.start + self.problem.query_offset, rows.stop + self.problem.query_offset)

    def dropped(self, rows: Span, columns: Span) -> Tensor | None:
        """Return the mask of dropped weights, (nb, nh, rep, R, C), or None without dropout."""
        problem = self.problem
        if problem.seed is None:
            return None
        device = problem.query.device
        heads = torch.arange(problem.query.shape[0] * problem.query.shape[1], device=device) + problem.first_head
        heads = self.heads_of(heads.view(*problem.query.shape[:2], 1, 1))[..., 0, 0]  # (nb, nh, rep)
        i, j = torch.arange(*self._positions(rows), device=device), torch.arange(*columns, device=device)
        return keep_mask(problem.seed, heads, i, j, problem.dropout_p).logical_not_()

    def distances(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        """Return the distances of keys before and after the query, each (R, C); see ``problem.distances``."""
        return distances(self._positions(rows), columns, self.dtype, self.problem.query.device)


def groups(problem: Problem, *, keep_tiles: bool = False) -> Iterator[Group]:
    """Split a problem into groups: single heads with the fused product, else as many heads as fit into a tile.

    keep_tiles: if True, a tile is not overwritten by the next one.
    """
    (batch, _, n, _), (_, heads, m, _) = problem.query.shape, problem.key.shape
    dtype, products = arithmetic(problem)
    keep_memory_warm()
    nb = nh = 1
    if products is not Fused:
        side = WINDOWED_SHORT_SIDE if problem.left != UNLIMITED or problem.right != UNLIMITED else SHORT_SIDE
        per_head = min(n, side) * min(m, LONG_SIDE) * (problem.query.shape[1] // heads)
        together = max(1, TILE_BYTES // dtype.itemsize // max(per_head, 1))
        nb, nh = (min(together // heads, batch), heads) if together >= heads else (1, heads_together(heads, together))
    memory = None if keep_tiles else scratch(problem.query.device)
    for b in spans(0, batch, nb):
        for h in spans(0, heads, nh):
            yield Group(problem, b, h, dtype, products, memory)


def arithmetic(problem: Problem) -> tuple[torch.dtype, type[Products]]:
    """Return the dtype to compute in and the class of products to compute with.

    Half precision is computed in float32, because rounding a logit to 8 or 11 bits makes its weight inaccurate, and in
    float16 a weight of 1/n loses bits as n grows. The exception is bfloat16, if the processor has bfloat16 products and
    the logits are neither capped nor have terms other than the bias, which is added inside the product; the shortest
    sequences gain nothing from it.
    """
    query, key, mask = problem.query, problem.key, problem.attn_mask
    per_head = query.shape[2] * key.shape[2] * (query.shape[1] // max(key.shape[1], 1))
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.device.type != "cpu" or not query.shape[-1] or per_head <= WIDE_UP_TO or problem.softcap:
        return wide, Products
    additive = problem.alibi_slopes is not None or (mask is not None and mask.is_floating_point())
    factor = 1 if problem.left == UNLIMITED and problem.right == UNLIMITED else WINDOWED_FACTOR
    dtype = torch.bfloat16 if query.dtype is torch.bfloat16 and not additive else wide
    if (dtype is wide and per_head < factor * FUSED_FROM.get(wide, 0)) or fused_unavailable(
        query.device, dtype
    ) is not None:
        return wide, Products
    if per_head >= factor * FUSED_FROM[dtype]:
        return dtype, Fused
    return dtype, Extended if dtype is torch.bfloat16 else Products
