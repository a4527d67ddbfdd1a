"""Groups of heads that are computed together, and the weights of one tile of their queries and keys.

A group consists of G (sample, key head) pairs, the batch of its products. The rows of a product are those of all query
heads that share the key head, so that K and V need not be repeated. Operations that depend on the indices of a weight
(masks, positions, dropout) view a tile as (nb, nh, rep, R, C): samples, key heads, query heads of each, queries, keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.block_mask import HIDDEN, Blocks, runs
from sigattn.ops.dropout import keep_mask
from sigattn.ops.positions import alibi
from sigattn.ops.problem import UNLIMITED, Problem

# measured on CPUs with 1 to 2 MiB of L2 per core (docs/log.md)
TILE_BYTES = 4 << 20  # of the weights of a tile; at most two tiles exist at a time
LONG_SIDE = 4096  # most keys (in the backward pass, queries) of a tile
SHORT_SIDE = 256  # least queries (keys) of a tile of several heads
WINDOWED_SIDE = 128  # most, with a window: smaller tiles skip more of what it hides
WHOLE_UP_TO = 540**2  # weights of a head up to which skipping what a window hides gains nothing
NARROW_FROM = 16, 24**2  # rows and weights of a key head from which bfloat16 products are faster than float32
DENSE_FROM = 640  # rows from which copying operands that are not dense takes less time than their products lose


def arithmetic(problem: Problem) -> torch.dtype:
    """Return the dtype to compute in.

    Half precision is computed in float32, because rounding a logit to 8 or 11 bits makes its weight inaccurate, and in
    float16 a weight of 1/n loses bits as n grows. The exception is bfloat16, if the processor has bfloat16 products and
    the logits have no terms other than a bias: they are rounded once or twice, where the plain formula rounds them
    three times.
    """
    p = problem
    rows = p.query.shape[2] * (p.query.shape[1] // max(p.key.shape[1], 1))
    is_small = rows < NARROW_FROM[0] or rows * p.key.shape[2] <= NARROW_FROM[1]
    has_terms = p.softcap or p.alibi_slopes is not None or (p.attn_mask is not None and p.attn_mask.is_floating_point())
    if p.query.dtype is not torch.bfloat16 or has_terms or is_small or p.query.device.type != "cpu":
        return torch.promote_types(p.query.dtype, torch.float32)
    return torch.bfloat16 if has_bfloat16_products() else torch.float32


@functools.cache
def has_bfloat16_products() -> bool:
    """Return True if oneDNN has bfloat16 products for this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded(length: int, dtype: torch.dtype) -> int:
    """Return the number of rows to compute for ``length`` rows.

    oneDNN compiles a bfloat16 product for each shape, and keeps the last thousand, up to a megabyte each. Padding
    leaves few shapes.
    """
    multiple = 1 << max(length.bit_length() - 6, 4) if dtype is torch.bfloat16 else 1  # at most 32 lengths per octave
    return -(-length // multiple) * multiple


class Tiling(NamedTuple):
    """Sizes of the tiles of a pass.

    Attributes:
        dtype: dtype of the computation.
        num_queries, num_keys: queries and keys of a head, padded.
        samples, heads: samples and key heads that are computed together.
        rows, columns: most queries and keys of a tile.
        is_whole: True if a tile has all queries and keys of its heads.
        is_saved: True if the weights are saved. Their layout must not depend on how heads are grouped, because the
            number of threads may change between the passes.
    """

    dtype: torch.dtype
    num_queries: int
    num_keys: int
    samples: int
    heads: int
    rows: int
    columns: int
    is_whole: bool
    is_saved: bool


def choose_tiles(problem: Problem, weights: Tensor, outer: int) -> Tiling:
    """Return the tiles of a pass.

    Args:
        problem: the problem.
        weights: the saved weights, whose tiles have all queries and keys of a head; or an empty tensor.
        outer: axis of the outer loop, 0 for queries and 1 for keys; tiles are long along the other.
    """
    p, is_saved = problem, weights.numel() > 0
    dtype = weights.dtype if is_saved else arithmetic(p)
    (batch, query_heads, n, width), (_, heads, m, _) = p.query.shape, p.key.shape
    if p.mask_table is None:
        n, m = padded(n, dtype), padded(m, dtype)
    repeat, limit = query_heads // heads, TILE_BYTES // dtype.itemsize
    has_window = p.left != UNLIMITED or p.right != UNLIMITED
    fits = repeat * n * m <= limit and not (has_window and n * m > WHOLE_UP_TO)
    is_whole = is_saved or (fits and p.mask_table is None)
    short, long = (n, m) if outer == 0 else (m, n)
    if not is_whole:
        long = min(long, LONG_SIDE)
    side = short if is_whole else min(short, WINDOWED_SIDE if has_window else SHORT_SIDE)
    together = max(1, limit // max(repeat * side * long, m * width, 1))  # keys and values stay in the cache, too
    if together >= heads:
        samples, together = min(together // heads, batch), heads
    else:
        samples, together = 1, _multiple_of_threads(heads, together)
    if not is_whole:
        size = max(1, limit // (samples * together * repeat * long))
        side = _evenly(short, size, 32 if size >= 128 else 1)
        side = min(side, WINDOWED_SIDE) if has_window else side
        if p.blocks is not None:  # must divide the block size of the mask
            size = p.blocks.size[outer]
            side = next(s for s in range(min(side, size), 0, -1) if size % s == 0)
    rows, columns = (side, long) if outer == 0 else (long, side)
    return Tiling(dtype, n, m, samples, together, rows, columns, is_whole, is_saved)


def _evenly(length: int, limit: int, multiple: int) -> int:
    """Return the size of nearly equal pieces of at most ``most``, rounded up to a multiple."""
    pieces = -(-length // limit)
    return -(-length // (pieces * multiple)) * multiple


def _multiple_of_threads(heads: int, limit: int) -> int:
    """Return how many of the heads to compute at a time, because a batched product computes each on one thread."""
    threads = torch.get_num_threads()
    return min(heads, limit if threads > 2 * limit else _evenly(heads, max(limit - limit % threads, threads), threads))


class Group:
    """Operands of a group of heads, padded with rows of 0, which add nothing to any sum.

    Attributes:
        query: (G, rep · N, D). key: (G, M, D). value: (G, M, Dv). In the compute dtype; 0 beyond ``key_lengths``.
        shape: (nb, nh, rep).
        num_keys: number of keys to compute, padded.
        exists: (nb, 1, num_keys, 1), False for keys beyond ``key_lengths``; None if there are none.
        samples, heads, query_heads: indices of the group.
    """

    def __init__(self, problem: Problem, tiling: Tiling, samples: slice, heads: slice) -> None:
        p, repeat = problem, problem.query.shape[1] // problem.key.shape[1]
        self.problem, self.tiling, self.samples, self.heads = p, tiling, samples, heads
        self.query_heads = slice(heads.start * repeat, heads.stop * repeat)
        self.shape = samples.stop - samples.start, heads.stop - heads.start, repeat
        self.size: int = self.shape[0] * self.shape[1]
        self.is_all: bool = self.size == p.key.shape[0] * p.key.shape[1]
        self.num_keys: int = tiling.num_keys
        self.exists: Tensor | None = None
        if p.key_lengths is not None:
            lengths = p.key_lengths[samples]
            if lengths.device.type == "cpu" and not tiling.is_saved:  # on an accelerator, reading would synchronise
                longest = int(lengths.max())
                self.num_keys = longest if p.mask_table is not None else padded(longest, tiling.dtype)
            j = torch.arange(self.num_keys, device=p.key.device)
            self.exists = (j < lengths.to(j.device).view(-1, 1, 1)).unsqueeze(-1)
        self.blocks: Blocks | None = None
        if p.mask_table is not None and p.mask_tiles is not None:
            self.blocks = Blocks(self.of_heads(p.mask_table), p.mask_tiles)
            self.visible_blocks = (self.blocks.table != HIDDEN).flatten(0, 2).any(0).cpu()
        self.query: Tensor = self.of_queries(p.query)
        self.key: Tensor = self._operand(p.key, self.num_keys)
        self.value: Tensor = self._operand(p.value, self.num_keys)

    def prepare_logits(self) -> None:
        """Prepare the operands of the logits, scale · Q Kᵀ + b.

        In bfloat16, in which the sum would be rounded once more, the bias is added inside the product: query and key
        get two columns whose product is b / scale, and the remainder of its rounding.
        """
        p, query, key = self.problem, self.query, self.key
        scale, bias, wide = p.scale_value, p.bias_value(), torch.promote_types(self.tiling.dtype, torch.float32)
        if not 2.0**-64 < abs(scale) < 2.0**64:  # b / scale may overflow, and oneDNN does not compute 0 · Q Kᵀ
            query, scale = query * scale, 1.0
        if isinstance(bias, Tensor):
            bias = self.of_heads(bias).to(wide).expand(*self.shape, p.query.shape[2], 1)
            bias = _pad_rows(bias, self.tiling.num_queries).reshape(self.size, -1, 1)  # (G, rep · N, 1)
        if self.tiling.dtype is torch.bfloat16 and not p.softcap:
            if not isinstance(bias, Tensor):  # which may be infinite
                bias = torch.full((1, 1, 1), bias, dtype=torch.float64, device="cpu").to(query.device, wide)
            term = bias / scale
            columns = term.to(torch.bfloat16)
            rest = torch.nan_to_num(term - columns, nan=0.0, posinf=0.0, neginf=0.0)  # not of inf - inf
            columns = torch.cat([columns, rest.to(torch.bfloat16)], -1)
            query = torch.cat([query, columns.expand(*query.shape[:2], -1)], -1)
            key = torch.cat([key, key.new_ones(1, 1, 1).expand(*key.shape[:2], columns.shape[2])], -1)
            bias = 0.0
        self._logits = query, key, scale, bias

    # -- the group's part of a tensor ---------------------------------------------------------------------------------

    def _operand(self, t: Tensor, rows: int) -> Tensor:  # (B, Hkv, M, E) → (G, rows, E)
        """Return the group's keys or values, padded to a number of rows, in the compute dtype."""
        t = self.rows_of(t, self.heads, 0, rows).to(self.tiling.dtype)
        if self.exists is not None:  # a NaN beyond key_lengths must not enter a product
            t = t.masked_fill(~self.exists[:, :, : t.shape[2]], 0)
        return self._dense(_pad_rows(t, rows).reshape(self.size, rows, t.shape[3]))

    def of_queries(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:  # (B, Hq, N, E) → (G, rep · N, E)
        """Return the group's part of the query, or of a gradient or term of each query, as an operand."""
        t = self.rows_of(t, self.query_heads, 0, t.shape[2]).to(self.tiling.dtype if dtype is None else dtype)
        rows = self.shape[2] * self.tiling.num_queries
        return self._dense(_pad_rows(t, self.tiling.num_queries).reshape(self.size, rows, t.shape[3]))

    def _dense(self, t: Tensor) -> Tensor:
        """Return an operand in dense memory, if each product would copy it otherwise."""
        has_many_rows = self.shape[2] * self.tiling.num_queries >= DENSE_FROM
        return t.contiguous() if has_many_rows or t.dtype is torch.bfloat16 else t

    def of_heads(self, t: Tensor) -> Tensor:  # (B or 1, Hq or 1, ·, ·) → (nb or 1, nh or 1, rep or 1, ·, ·)
        """Return the part of a tensor that applies to the group, a view."""
        t = t if t.shape[0] == 1 else t[self.samples]
        return t.unsqueeze(1) if t.shape[1] == 1 else t[:, self.query_heads].unflatten(1, self.shape[1:])

    def of_tile(self, t: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Return a tile's part of a tensor broadcastable to (B, Hq, N, M), broadcastable to (nb, nh, rep, R, C)."""
        t = self.of_heads(t)
        t = t if t.shape[3] == 1 else t[..., i0:i1, :]
        return t if t.shape[4] == 1 else t[..., j0:j1]

    def rows_of(self, t: Tensor, heads: slice, i0: int, i1: int) -> Tensor:  # (B, H, N, E) → (nb, heads, R, E)
        """Return rows i0 … i1 - 1 of the group's part of an operand, the output or a gradient, a view."""
        return t if self.is_all and i1 - i0 >= t.shape[2] else t[self.samples, heads, i0:i1]

    def rows(self, t: Tensor, i0: int, i1: int) -> Tensor:  # (G, rep · N, E) → (G, rep · R, E)
        """Return rows i0 … i1 - 1 of each query head."""
        if i1 - i0 == self.tiling.num_queries:
            return t
        return t.unflatten(1, (self.shape[2], -1))[:, :, i0:i1].flatten(1, 2)

    def existing(self, t: Tensor | None, j0: int, j1: int) -> Tensor | None:  # (G, C, E)
        """Return the gradient of keys j0 … j1 - 1: 0 beyond ``key_lengths``, even if the output's is not finite."""
        if t is None or self.exists is None:
            return t
        return t.view(*self.shape[:2], j1 - j0, t.shape[2]).masked_fill(~self.exists[:, :, j0:j1], 0)

    def new_query_sums(self) -> Tensor:  # (G, rep, N, D)
        """Return zeros for the sums of the query's gradient over tiles."""
        wide = torch.promote_types(self.tiling.dtype, torch.float32)
        return self.query.new_zeros(self.query.shape, dtype=wide).unflatten(1, (self.shape[2], -1))

    # -- tiles --------------------------------------------------------------------------------------------------------

    def visible(self, start: int, stop: int, outer: int) -> list[tuple[int, int]]:
        """Return the ranges of the inner loop: of keys that queries start … stop - 1 see, at most a tile long.

        outer: axis of the outer loop; if 1, the ranges of queries that see keys start … stop - 1.
        """
        p, tiling = self.problem, self.tiling
        before, after, shift, length, side = p.left, p.right, p.query_offset, self.num_keys, tiling.columns
        if outer == 1:
            before, after, shift, length, side = after, before, -shift, tiling.num_queries, tiling.rows
        if tiling.is_whole:
            return [(0, length)] if length else []
        first = 0 if before == UNLIMITED else max(0, start + shift - before)
        last = length if after == UNLIMITED else min(length, stop + shift + after)
        spans = [(first, last)]
        if self.blocks is not None:
            size = self.blocks.size
            table = self.visible_blocks if outer == 0 else self.visible_blocks.T
            chosen = table[start // size[outer] : -(-stop // size[outer])].any(0)
            spans = list(runs(chosen, size[1 - outer], first, last))
        elif tiling.dtype is torch.bfloat16:  # few shapes, see ``padded``
            last = min(length, -(-last // 64) * 64)
            spans = [(max(0, last - -(-(last - first) // 64) * 64), last)]
        return [(i, min(i + side, last)) for first, last in spans for i in range(first, last, side)]

    def tile(self, memory: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:  # (G, rep · R, C)
        """Return the memory of a tile for queries i0 … i1 - 1 and keys j0 … j1 - 1, uninitialised if not saved."""
        if memory.dim() == 4:
            return memory[self.samples, self.query_heads].view(self.size, -1, memory.shape[3])
        rows, columns = self.shape[2] * (i1 - i0), j1 - j0
        return memory[: self.size * rows * columns].view(self.size, rows, columns)

    def by_head(self, tile: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """View a tile as (nb, nh, rep, R, C), without padding."""
        n, m = self.problem.query.shape[2], self.problem.key.shape[2]
        return tile.view(*self.shape, i1 - i0, j1 - j0)[..., : max(n - i0, 0), : max(m - j0, 0)]

    def weights(self, memory: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:  # (G, rep · R, C)
        """Return σ(scale · Q Kᵀ + b + …) of queries i0 … i1 - 1 and keys j0 … j1 - 1, before dropout, in the memory."""
        problem, bias, p = self.problem, self._logits[3], self.tile(memory, i0, i1, j0, j1)
        mask, slopes = problem.attn_mask, problem.alibi_slopes
        self._write_product(p, i0, i1, j0, j1)
        if problem.softcap:
            p.tanh_().mul_(problem.softcap)
        if isinstance(bias, Tensor) or bias != 0:
            p.add_(self.rows(bias, i0, i1) if isinstance(bias, Tensor) else bias)
        if mask is not None and mask.is_floating_point():
            self.by_head(p, i0, i1, j0, j1).add_(self.of_tile(mask, i0, i1, j0, j1))
        if slopes is not None:
            positions = i0 + problem.query_offset, i1 + problem.query_offset
            slopes = self.of_heads(slopes.unsqueeze(-1)).squeeze(-1)
            self.by_head(p, i0, i1, j0, j1).add_(alibi(slopes, positions, (j0, j1), p.dtype))
        self.hide(p.sigmoid_(), i0, i1, j0, j1)
        return p

    def slope_of_cap(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:  # (G, rep · R, C)
        """Return the derivative of the cap, 1 - tanh². NaN becomes 0: if its key is visible, dS is NaN already."""
        out = self.query.new_empty(self.size, self.shape[2] * (i1 - i0), j1 - j0)
        self._write_product(out, i0, i1, j0, j1)
        return out.tanh_().square_().neg_().add_(1).nan_to_num_(0.0)

    def _write_product(self, out: Tensor, i0: int, i1: int, j0: int, j1: int) -> None:
        """Write scale · Q Kᵀ, divided by ``softcap`` if there is one."""
        query, key, scale, _ = self._logits
        query, key = self.rows(query, i0, i1), key[:, j0:j1].transpose(1, 2)
        # no beta = b: oneDNN compiles a product for each of its values, thus for each length
        torch.baddbmm(out, query, key, beta=0, alpha=scale / (self.problem.softcap or 1.0), out=out)

    def hide(self, p: Tensor, i0: int, i1: int, j0: int, j1: int) -> None:
        """Set the weights, or their gradients, of hidden keys to 0, whatever they are.

        Keys beyond ``key_lengths`` are hidden with ``normalize`` only: else it is enough that they and their values are
        0.
        """
        left, right, offset = self.problem.left, self.problem.right, self.problem.query_offset
        by_query_head = p if self.shape[2] == 1 else p.view(-1, i1 - i0, j1 - j0)
        if i1 > self.problem.query.shape[2]:  # rows of padding, whose weights are NaN where a key is
            by_query_head[:, max(self.problem.query.shape[2] - i0, 0) :] = 0
        if j1 > self.problem.key.shape[2]:  # columns of padding, whose weights are NaN where a query is
            by_query_head[:, :, max(self.problem.key.shape[2] - j0, 0) :] = 0
        if right != UNLIMITED and j1 - 1 > i0 + offset + right:
            by_query_head.tril_(i0 + offset + right - j0)
        if left != UNLIMITED and j0 < i1 - 1 + offset - left:
            by_query_head.triu_(i0 + offset - left - j0)
        mask = self.problem.attn_mask
        if mask is not None and mask.dtype is torch.bool:
            self.by_head(p, i0, i1, j0, j1).masked_fill_(~self.of_tile(mask, i0, i1, j0, j1), 0)
        elif mask is not None:  # the sum of -inf with a logit of inf or NaN is NaN
            added = self.of_tile(mask, i0, i1, j0, j1)
            if mask.device.type != "cpu" or not added.amin() > -torch.inf:
                self.by_head(p, i0, i1, j0, j1).masked_fill_(added == -torch.inf, 0)
        if self.exists is not None and self.problem.normalize:  # their weights are part of a sum
            p.view(*self.shape[:2], -1, j1 - j0).masked_fill_(~self.exists[:, :, j0:j1].mT, 0)
        if self.blocks is not None and not self.blocks.are_visible(slice(i0, i1), slice(j0, j1)):
            visible = self.blocks.dense(slice(i0, i1), slice(j0, j1))
            self.by_head(p, i0, i1, j0, j1).masked_fill_(~visible, 0)

    def drop(self, tile: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Return a copy of a tile with 0 for the weights that dropout drops."""
        p, device = self.problem, tile.device
        assert p.seed is not None
        batch, heads = p.query.shape[:2]
        indices = torch.arange(p.first_head, p.first_head + batch * heads, device=device).view(batch, heads, 1, 1)
        i = torch.arange(i0 + p.query_offset, i1 + p.query_offset, device=device)
        j = torch.arange(j0, j1, device=device)
        keep = keep_mask(p.seed, self.of_heads(indices)[..., 0, 0], i, j, p.dropout_p)  # (nb, nh, rep, R, C)
        return tile.masked_fill(~keep.view(tile.shape), 0)


def groups(problem: Problem, tiling: Tiling) -> Iterator[Group]:
    """Split a problem into groups of heads."""
    batch, heads = problem.query.shape[0], problem.key.shape[1]
    for b in range(0, batch, tiling.samples):
        for h in range(0, heads, tiling.heads):
            samples, together = slice(b, min(b + tiling.samples, batch)), slice(h, min(h + tiling.heads, heads))
            yield Group(problem, tiling, samples, together)


def new_memory(problem: Problem, tiling: Tiling) -> Tensor:
    """Return memory for a tile, which is used again for every tile because new memory is slow to write."""
    heads = tiling.samples * tiling.heads * (problem.query.shape[1] // problem.key.shape[1])
    return problem.query.new_empty(heads * tiling.rows * tiling.columns, dtype=tiling.dtype)


def _pad_rows(t: Tensor, rows: int) -> Tensor:  # (…, R, E) → (…, rows, E)
    """Return a tensor with rows of 0 appended."""
    return t if t.shape[-2] == rows else F.pad(t, (0, 0, 0, rows - t.shape[-2]))
