"""How a problem is cut into groups of heads and tiles of queries and keys, and what is hidden in a tile.

A group is a few (sample, key/value head) pairs worked on together. The query heads that share a key/value head are
laid one after another in the rows of its products, so neither K nor V is ever repeated for them. What depends on a
weight's place (masks, positions, dropout) sees a tile as (nb, nh, rep, R, C): samples, key/value heads, query heads
of each, queries, keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sigattn.ops.block_mask import HIDDEN, Blocks, runs
from sigattn.ops.dropout import keep_mask
from sigattn.ops.problem import UNLIMITED, Problem, alibi, distances
from sigattn.ops.products import Capped, Extended, Fused, Products, fused_unavailable, keep_memory_warm

# Sizes measured on a CPU with 1 MiB of L2 and 32 MiB of L3 (docs/log.md). They bound the working memory: a tile has
# TILE_BYTES, and at most a handful are held at once.
TILE_BYTES = 4 << 20
LONG_SIDE = 4096
WINDOWED_SIDE = 512
WIDE_UP_TO = 24**2  # weights per head up to which bfloat16 gains nothing over float32
FUSED_FROM = {torch.float32: 320**2, torch.bfloat16: 640**2}  # weights per head; below, a batched product is faster


class Span(NamedTuple):
    """The indices start … stop - 1."""

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


class Group:
    """A few heads of a problem: their operands ready for the products, and the rules of their tiles.

    Attributes (G = nb · nh): query (G, rep, N, D) and key (G, M, D), unscaled, and value (G, M, Dv), all in the compute
    dtype; ``keys``, how many keys there are to visit (fewer than M where ``key_lengths`` says so).
    """

    def __init__(self, problem: Problem, batch: Span, heads: Span, dtype: torch.dtype, products: type[Products]):
        self.problem, self.batch, self.heads, self.dtype = problem, batch, heads, dtype
        self.long_side = LONG_SIDE
        self.accumulator = torch.promote_types(dtype, torch.float32)
        self.repeat = problem.query.shape[1] // problem.key.shape[1]
        self.shape = (batch.size, heads.size, self.repeat)
        self.queries = problem.query.shape[2]
        self.keys, self.ragged = self._count_keys()
        self.query = self.queries_of(problem.query)
        self.key, self.value = self.keys_of(problem.key), self.keys_of(problem.value)
        mask = problem.attn_mask
        self.additive = problem.alibi_slopes is not None or (mask is not None and mask.is_floating_point())
        self.hidden = mask is not None and not mask.is_floating_point()
        self.blocks = self._blocks_here()
        plain = not (self.additive or self.hidden or self.ragged) and problem.seed is None and self.blocks is None
        self.bare = products is Fused and plain
        bias = problem.bias_value()
        if isinstance(bias, Tensor):
            bias = self.heads_of(bias).to(self.accumulator)
            bias = bias.expand(*self.shape, self.queries, 1).flatten(0, 1)
        operands = self.query, self.key, bias, problem.scale_value
        self.products = Capped(*operands, problem.softcap) if problem.softcap else products(*operands)

    def _count_keys(self) -> tuple[int, bool]:
        """How many keys to visit, and whether some of them do not exist in some sample of the group."""
        lengths = self.problem.key_lengths
        if lengths is None:
            return self.problem.key.shape[2], False
        if lengths.device.type != "cpu":  # reading the lengths would make the host wait for the device
            return self.problem.key.shape[2], True
        here = lengths[self.batch.slice].tolist()
        return max(here), min(here) < max(here)

    def _blocks_here(self) -> Blocks | None:
        """Return the blocks of the group's heads, (nb or 1, nh or 1, rep or 1, blocks of queries, blocks of keys)."""
        blocks = self.problem.blocks
        if blocks is None:
            return None
        blocks = blocks._replace(table=self.heads_of(blocks.table))
        self.visible_blocks = (blocks.table != HIDDEN).flatten(0, 2).any(0).cpu()
        return blocks

    # -- the group's part of a whole tensor -----------------------------------------------------------------------

    def heads_of(self, t: Tensor) -> Tensor:
        """(B or 1, Hq or 1, ·, ·) → (nb or 1, nh or 1, rep or 1, ·, ·), a view."""
        if t.shape[0] != self.shape[0] and t.shape[0] != 1:
            t = t[self.batch.slice]
        if t.shape[1] == 1:
            return t.unsqueeze(1)
        t = t.unflatten(1, (-1, self.repeat)) if self.repeat > 1 else t.unsqueeze(2)
        return t if t.shape[1] == self.shape[1] else t[:, self.heads.slice]

    def queries_of(self, t: Tensor) -> Tensor:
        """(B, Hq, N, E) → (G, rep, N, E), dense, in the compute dtype."""
        nb, nh, rep = self.shape
        return self.heads_of(t).to(self.dtype).reshape(nb * nh, rep, *t.shape[2:]).contiguous()

    def keys_of(self, t: Tensor) -> Tensor:
        """(B, Hkv, M, E) → (G, keys, E), dense, in the compute dtype; zero where a key does not exist."""
        part = t[self.batch.slice, self.heads.slice, : self.keys].to(self.dtype)
        if self.ragged:  # a NaN in a key that does not exist must not reach a product
            part = part.masked_fill(~self.exists(Span(0, self.keys)).view(-1, 1, self.keys, 1), 0)
        return part.flatten(0, 1).contiguous()

    def exists(self, columns: Span) -> Tensor:  # (nb, 1, 1, 1, C)
        assert self.problem.key_lengths is not None
        j = torch.arange(*columns, device=self.problem.key.device)
        return j < self.problem.key_lengths[self.batch.slice].to(j.device).view(-1, 1, 1, 1, 1)

    # -- which tiles there are ------------------------------------------------------------------------------------

    def row_range(self, columns: Span) -> Span:
        """The queries that see any of these keys."""
        left, right, first = self.problem.left, self.problem.right, self.problem.first_row
        start = 0 if right == UNLIMITED else columns.start - right - first
        stop = self.queries if left == UNLIMITED else columns.stop + left - first
        return Span(max(start, 0), min(stop, self.queries))

    def column_range(self, rows: Span) -> Span:
        """The keys that any of these queries sees."""
        left, right, first = self.problem.left, self.problem.right, self.problem.first_row
        start = 0 if left == UNLIMITED else rows.start + first - left
        stop = self.keys if right == UNLIMITED else rows.stop + first + right
        return Span(max(start, 0), min(stop, self.keys))

    def short_blocks(self, span: Span, long_side: int, dimension: int = 0) -> Iterator[Span]:
        """The outer loop: blocks such that one of them against ``long_side`` fills a tile.

        dimension: 0 for queries, 1 for keys.
        """
        weights = TILE_BYTES // self.dtype.itemsize // (self.shape[0] * self.shape[1] * self.repeat)
        size = max(1, weights // max(1, min(long_side, LONG_SIDE)))
        if self.problem.left != UNLIMITED or self.problem.right != UNLIMITED:
            # long enough for the products (at the price of two tiles), short enough to waste little along the border
            size = min(WINDOWED_SIDE, 2 * size)
        if self.blocks is not None:  # a block of the mask's, or a part of one
            size = min(size, self.blocks.size[dimension])
            size = next(s for s in range(size, 0, -1) if self.blocks.size[dimension] % s == 0)
        return spans(*span, size)

    def columns_of(self, rows: Span) -> Iterator[Span]:
        """The inner loop of the forward pass: keys that these queries see."""
        return self._inner(rows, self.column_range(rows), 0)

    def rows_of(self, columns: Span) -> Iterator[Span]:
        """The inner loop of the backward pass: queries that see these keys."""
        return self._inner(columns, self.row_range(columns), 1)

    def _inner(self, outer: Span, span: Span, dimension: int) -> Iterator[Span]:
        """Cut a range of the inner axis into long blocks, leaving out what is hidden from all of the outer block.

        dimension: of the outer axis in the table of blocks.
        """
        if self.blocks is None:
            yield from spans(*span, self.long_side)
            return
        size, other = self.blocks.size[dimension], self.blocks.size[1 - dimension]
        chosen = slice(outer.start // size, -(-outer.stop // size))
        table = self.visible_blocks if dimension == 0 else self.visible_blocks.T
        for start, stop in runs(table[chosen].any(0), other, *span):
            yield from spans(start, stop, self.long_side)

    # -- inside a tile --------------------------------------------------------------------------------------------

    def part(self, t: Tensor, rows: Span, columns: Span) -> Tensor:
        """What a tile sees of a mask that is broadcastable to (B, Hq, N, M): broadcastable to (nb, nh, rep, R, C)."""
        t = self.heads_of(t)
        t = t if t.shape[3] == 1 else t[..., rows.slice, :]
        return t if t.shape[4] == 1 else t[..., columns.slice]

    def tile(self, rows: Span, columns: Span, transposed: bool) -> Tensor:
        """The weights P of a tile before dropout: (G, rep·R, C), or (G, C, rep·R) when transposed."""
        if self.additive:
            p = self.products.logits(rows.slice, columns.slice, transposed)
            self._add_terms(self.by_place(p, rows, transposed), rows, columns)
            p.sigmoid_()
            self._hide_minus_infinity(p, rows, columns, transposed)
        else:
            p = self.products.weights(rows.slice, columns.slice, transposed)
        self._hide_beyond_window(p, rows, columns, transposed)
        if self.ragged:
            self.by_place(p, rows, transposed).masked_fill_(~self.exists(columns), 0)
        if self.blocks is not None and not self.blocks.are_visible(rows.slice, columns.slice):
            hidden = self.blocks.dense(rows.slice, columns.slice).logical_not_()
            self.by_place(p, rows, transposed).masked_fill_(hidden, 0)
        if self.hidden:
            assert self.problem.attn_mask is not None
            seen = self.part(self.problem.attn_mask, rows, columns)
            self.by_place(p, rows, transposed).masked_fill_(~seen, 0)
        return p

    def _hide_minus_infinity(self, p: Tensor, rows: Span, columns: Span, transposed: bool) -> None:
        """Zero where an additive mask is -inf: added to a logit of inf or NaN, it gives NaN."""
        mask = self.problem.attn_mask
        if mask is None or not mask.is_floating_point():
            return
        added = self.part(mask, rows, columns)
        if mask.device.type != "cpu" or not added.amin() > -torch.inf:  # on an accelerator, reading would synchronise
            self.by_place(p, rows, transposed).masked_fill_(added == -torch.inf, 0)

    def by_place(self, tile: Tensor, rows: Span, transposed: bool) -> Tensor:
        """See a tile as (nb, nh, rep, R, C), in the same memory."""
        nb, nh, rep = self.shape
        if transposed:
            return tile.view(nb, nh, tile.shape[1], rep, rows.size).permute(0, 1, 3, 4, 2)
        return tile.view(nb, nh, rep, rows.size, tile.shape[-1])

    def _add_terms(self, logits: Tensor, rows: Span, columns: Span) -> None:
        mask, slopes = self.problem.attn_mask, self.problem.alibi_slopes
        if mask is not None and mask.is_floating_point():
            logits.add_(self.part(mask, rows, columns))
        if slopes is not None:
            logits.add_(alibi(self.slopes_of(slopes), self._places(rows), columns, logits.dtype))

    def _hide_beyond_window(self, p: Tensor, rows: Span, columns: Span, transposed: bool) -> None:
        """Zero what lies outside i - left ≤ j ≤ i + right, touching only the corners that the borders cross."""
        left, right = self.problem.left, self.problem.right
        (i0, i1), (j0, j1) = self._places(rows), columns
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
        """Part of a tile for each query head of a key head: (G, R, C), or (G, C, R) when transposed, views.

        Three dimensions and dense rows, because there torch's triangles are ten times as fast as a masked fill.
        """
        for h in range(self.repeat):
            q = slice(h * rows.size + r[0], h * rows.size + r[1])
            yield p[:, slice(*c), q] if transposed else p[:, q, slice(*c)]

    def slopes_of(self, slopes: Tensor) -> Tensor:
        """(B or 1, Hq, 2) → (nb or 1, nh, rep, 2)."""
        return self.heads_of(slopes.unsqueeze(-1)).squeeze(-1)

    def _places(self, rows: Span) -> Span:
        return Span(rows.start + self.problem.first_row, rows.stop + self.problem.first_row)

    def dropped(self, rows: Span, columns: Span) -> Tensor | None:
        """True where dropout drops a weight, (nb, nh, rep, R, C); None without dropout."""
        problem = self.problem
        if problem.seed is None:
            return None
        device = problem.query.device
        heads = torch.arange(problem.query.shape[0] * problem.query.shape[1], device=device) + problem.first_head
        heads = self.heads_of(heads.view(*problem.query.shape[:2], 1, 1))[..., 0, 0]  # (nb, nh, rep)
        i, j = torch.arange(*self._places(rows), device=device), torch.arange(*columns, device=device)
        return keep_mask(problem.seed, heads, i, j, problem.dropout_p).logical_not_()

    def distances(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        """How far each key lies before its query (0 if it does not), and how far after it: each (R, C)."""
        return distances(self._places(rows), columns, self.dtype, self.problem.query.device)


def groups(problem: Problem) -> Iterator[Group]:
    """Cut a problem into groups: single heads where the fused product serves, else as many as a tile may hold."""
    (batch, _, n, _), (_, heads, m, _) = problem.query.shape, problem.key.shape
    dtype, products = arithmetic(problem)
    keep_memory_warm()
    nb = nh = 1
    if products is not Fused:
        per_head = min(n, LONG_SIDE) * min(m, LONG_SIDE) * (problem.query.shape[1] // heads)
        together = max(1, TILE_BYTES // dtype.itemsize // max(per_head, 1))
        nb, nh = (min(together // heads, batch), heads) if together >= heads else (1, together)
    for b in spans(0, batch, nb):
        for h in spans(0, heads, nh):
            yield Group(problem, b, h, dtype, products)


def arithmetic(problem: Problem) -> tuple[torch.dtype, type[Products]]:
    """The dtype to compute in and the products to compute with.

    Half precision is computed in float32, for a logit rounded to 8 or 11 bits spoils its weight, and in float16 a
    weight of 1/n loses its bits as n grows. The exception is bfloat16 where the processor has products of it, and
    nothing but the bias, which travels inside the product, is added to the logits, and they are not capped; the
    shortest sequences are not worth it.
    """
    query, key, mask = problem.query, problem.key, problem.attn_mask
    per_head = query.shape[2] * key.shape[2] * (query.shape[1] // key.shape[1])
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.device.type != "cpu" or not query.shape[-1] or per_head <= WIDE_UP_TO or problem.softcap:
        return wide, Products
    additive = problem.alibi_slopes is not None or (mask is not None and mask.is_floating_point())
    dtype = torch.bfloat16 if query.dtype is torch.bfloat16 and not additive else wide
    if (dtype is wide and per_head < FUSED_FROM.get(wide, 0)) or fused_unavailable(query.device, dtype) is not None:
        return wide, Products
    if per_head >= FUSED_FROM[dtype]:
        return dtype, Fused
    return dtype, Extended if dtype is torch.bfloat16 else Products
