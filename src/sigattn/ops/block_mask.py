"""Conversion of FlexAttention's ``BlockMask`` to tensors: the state of each block, and the masks of partial blocks.

A backend skips hidden blocks, needs no mask in blocks that are entirely visible, and looks up the mask of the others.
The memory is that of the block lists plus one byte per weight of the blocks that are partially visible.

A mask is converted once (20 ms for 4,096 tokens on an H100), unless its lists or what ``mask_mod`` refers to change.
"""

import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

HIDDEN, VISIBLE, PARTIAL = 0, 1, 2  # entries of a table; entries from PARTIAL on are indices of partial blocks
_EVALUATED_TOGETHER = 1 << 24  # number of mask entries evaluated at a time


class Blocks(NamedTuple):
    """Blocks of a mask."""

    table: Tensor  # (B or 1, Hq or 1, blocks of queries, blocks of keys), int32: index of each block's mask in tiles
    tiles: Tensor  # (T, queries of a block, keys of a block), bool; HIDDEN is all False, VISIBLE all True

    @property
    def size(self) -> tuple[int, int]:
        """Number of queries and keys of a block."""
        return self.tiles.shape[1], self.tiles.shape[2]

    def dense(self, rows: slice, columns: slice) -> Tensor:  # (…, rows, columns)
        """Return the mask of ranges of queries and keys, which need not align with blocks."""
        mask = self.tiles[self._entries(rows, columns).long()].transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
        i, j = rows.start % self.size[0], columns.start % self.size[1]
        return mask[..., i : i + rows.stop - rows.start, j : j + columns.stop - columns.start]

    def are_visible(self, rows: slice, columns: slice) -> bool:
        """Return True if every key of the columns' blocks is visible to every query of the rows' blocks."""
        return bool((self._entries(rows, columns) == VISIBLE).all())

    def _entries(self, rows: slice, columns: slice) -> Tensor:
        """Return the entries of the blocks in which ranges of queries and keys lie."""
        pairs = zip((rows, columns), self.size, strict=True)
        i, j = (slice(indices.start // size, -(-indices.stop // size)) for indices, size in pairs)
        return self.table[..., i, j]


def runs(visible: Tensor, size: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of start … stop - 1 covered by visible blocks of ``size`` indices, merged if adjacent."""
    for is_visible, run in itertools.groupby(enumerate(visible.tolist()), key=operator.itemgetter(1)):
        blocks = [block for block, _ in run]
        first, last = max(blocks[0] * size, start), min((blocks[-1] + 1) * size, stop)
        if is_visible and first < last:
            yield first, last


def is_block_mask(mask: Any) -> bool:
    """Return True for a ``BlockMask``, without importing FlexAttention."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(mask, module.BlockMask)


def resolve(mask: Any, query: Any, key: Any, value: Any, caller: str = "sigmoid_attention") -> dict[str, Tensor]:
    """Return a ``BlockMask`` for (B, Hq, N, D), (B, Hkv, M, D) and (B, Hkv, M, Dv) as fields of a ``Problem``.

    Batch and heads may be 1 in some of them, which then broadcast. ``mask_mod`` is evaluated in blocks that are
    partially visible, for sample or head 0 if the mask was created with B=None or H=None.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{caller}: attn_mask is a BlockMask, which is not supported inside torch.compile or torch.export, because "
            "the number of partially visible blocks is unknown there; pass a bool mask (create_mask makes it)"
        )
    if any(not isinstance(t, Tensor) or t.is_nested or t.dim() != 4 for t in (query, key, value)):
        raise TypeError(f"{caller}: attn_mask is a BlockMask: query, key and value must be dense, of 4 dimensions")
    n, m = query.shape[2], key.shape[2]
    batch, heads = (max(t.shape[i] for t in (query, key, value)) for i in (0, 1))
    counts = mask.kv_num_blocks
    shape = tuple(counts.shape[:-1])
    made_for = tuple(mask.seq_lengths)
    if made_for != (n, m):
        raise ValueError(f"{caller}: the BlockMask is for {made_for} queries and keys, not for {(n, m)}")
    if counts.dim() != 3 or shape[0] not in (1, batch) or shape[1] not in (1, heads):
        expected = f"1 or {batch} samples and 1 or {heads} heads"
        raise ValueError(f"{caller}: the BlockMask must be of {expected}, got {shape}")
    if counts.device != query.device:
        raise ValueError(f"{caller}: the BlockMask must be on the query's device: move it with .to(device)")
    blocks = _convert(mask) if torch._C._are_functorch_transforms_active() else _converted_once(mask)
    return {"mask_table": blocks.table, "mask_tiles": blocks.tiles}


def _converted_once(mask: Any) -> Blocks:
    """Return the blocks of a mask, those of the last call if nothing that they depend on has changed."""
    state = [torch.is_inference_mode_enabled()]
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    if not _add_state((*lists, mask.seq_lengths, mask.BLOCK_SIZE, mask.mask_mod), state):
        return _convert(mask)
    known = _converted.get(mask)
    if known is None or [*map(_identity, known[0])] != [*map(_identity, state)]:
        known = _converted[mask] = (state, _convert(mask))
    return known[1]


# By mask: what its conversion depended on (held, so that no other object gets the id of one of these), and its blocks.
_converted: weakref.WeakKeyDictionary[Any, tuple[list[Any], Blocks]] = weakref.WeakKeyDictionary()
_NUMBERS = (bool, int, float, str, type(None))
_UNCHANGING = ("torch", "math", "builtins")  # packages whose modules and classes keep their attributes


def _identity(x: Any) -> Any:
    return (type(x), x) if isinstance(x, _NUMBERS) else id(x)


def _add_state(x: Any, state: list[Any]) -> bool:
    """Add the objects and versions of tensors that x depends on; return False if changes of one cannot be seen."""
    if isinstance(x, (tuple, list)):
        state.append(len(x))
        return all(_add_state(item, state) for item in x)
    if isinstance(x, functools.partial):
        return _add_state((x.func, x.args, *x.keywords.items()), state)
    is_known = any(x is known for known in state)
    state.append(x)
    if is_known and isinstance(x, types.FunctionType):  # it may call itself
        return True
    if isinstance(x, types.FunctionType):
        state.append(x.__code__)
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        named = [x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__]
        return _add_state((cells, named, x.__defaults__, *(x.__kwdefaults__ or {}).items()), state)
    if type(x) is Tensor and not x.is_inference():  # else it has no version
        state.append(x._version)
        return True
    package = x.__name__ if isinstance(x, types.ModuleType) else x.__module__ if isinstance(x, type) else ""
    is_constant = isinstance(x, (*_NUMBERS, types.BuiltinFunctionType, torch.dtype, torch.device))
    return is_constant or package.partition(".")[0] in _UNCHANGING


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in that of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _convert(mask: Any) -> Blocks:
    (n, m), (size_q, size_k) = mask.seq_lengths, mask.BLOCK_SIZE
    counts, indices = mask.kv_num_blocks, mask.kv_indices
    shape = tuple(counts.shape[:-1])
    table = torch.zeros(*shape, -(-n // size_q), -(-m // size_k), dtype=torch.int32, device=counts.device)
    at = _listed(counts, indices)
    table[at] = torch.arange(PARTIAL, PARTIAL + len(at[0]), dtype=torch.int32, device=table.device)
    if mask.full_kv_num_blocks is not None:
        table[_listed(mask.full_kv_num_blocks, mask.full_kv_indices)] = VISIBLE
    whole = torch.tensor([False, True], device=table.device).view(2, 1, 1).expand(2, size_q, size_k)
    return Blocks(table, torch.cat([whole, *_evaluate(mask.mask_mod, at, (n, m), (size_q, size_k))]))


def _listed(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sample, head, block of queries and block of keys of each block in a list of a ``BlockMask``."""
    named = torch.arange(indices.shape[-1], device=counts.device) < counts.unsqueeze(-1)
    b, h, i, _ = named.nonzero(as_tuple=True)
    return b, h, i, indices[named].long()


def _evaluate(
    mask_mod: Any, at: tuple[Tensor, Tensor, Tensor, Tensor], lengths: tuple[int, int], size: tuple[int, int]
) -> Iterator[Tensor]:  # (blocks, queries of a block, keys of a block), bool
    """Yield the masks of blocks; entries beyond the last query and key are False."""
    from torch.nn.attention.flex_attention import create_mask

    (n, m), (size_q, size_k) = lengths, size
    device = at[0].device
    rows, columns = torch.arange(size_q, device=device), torch.arange(size_k, device=device)
    together = max(1, _EVALUATED_TOGETHER // (size_q * size_k))
    for b, h, i, j in zip(*(t.split(together) for t in at if len(t)), strict=True):
        first_q, first_k = i * size_q, j * size_k
        of_block = _mask_mod_of_blocks(mask_mod, (b, h, first_q, first_k), lengths)
        visible = create_mask(of_block, len(b), 1, size_q, size_k, device=device)[:, 0].to(torch.bool)
        exists = (first_q[:, None] + rows < n).unsqueeze(2) & (first_k[:, None] + columns < m).unsqueeze(1)
        yield visible & exists


def _mask_mod_of_blocks(mask_mod: Any, blocks: tuple[Tensor, ...], lengths: tuple[int, int]) -> Any:
    """Return mask_mod as a function of (index of a block, 0, query within the block, key within the block).

    ``blocks`` holds sample, head, first query and first key of each block. Indices beyond the last query and key are
    clamped, because mask_mod may index tensors of these lengths.
    """
    b, h, first_q, first_k = blocks
    n, m = lengths
    # a lambda, because create_mask counts the parameters, which a decorator would change
    return lambda t, _, q, k: mask_mod(b[t], h[t], (first_q[t] + q).clamp(max=n - 1), (first_k[t] + k).clamp(max=m - 1))
