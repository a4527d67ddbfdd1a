"""Rows of packed sequences brought together: those that are used, or those that pages hold.

The packed operator takes sequences that lie one after another without gaps. Rows are gathered into that order here, by
indices that are computed without reading any value from an accelerator; the gradient follows by autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.flash.padding import cumulative
from sigattn.ops import cached, flash_checks, scalars


class Tokens(NamedTuple):
    """Some tokens of each sample, packed: (total, H, ·).

    Attributes:
        sample: (total,), whose each is; those beyond the last sequence count as the last sample's.
        offset: (total,), where it stands among its sample's tokens.
        counts: (B,), how many each sample has.
        starts: (B + 1,), the cu_seqlens.
    """

    sample: Tensor
    offset: Tensor
    counts: Tensor
    starts: Tensor

    def padded(self, packed: Tensor, longest: int) -> Tensor:  # (B, longest, H, E)
        """Return the tokens of each sample first in a row; what follows them is arbitrary."""
        if not len(packed):
            return packed.new_zeros(len(self.counts), longest, *packed.shape[1:])
        rows = self.starts[:-1, None] + torch.arange(longest, device=packed.device)
        return packed[rows.clamp(max=len(packed) - 1)]

    def packed(self, padded: Tensor) -> Tensor:  # (total, H, E)
        """Return the tokens from ``padded``'s layout; 0 beyond the last sequence."""
        if not padded.shape[0] * padded.shape[1]:
            return padded.new_zeros(len(self.sample), *padded.shape[2:])
        rows = padded[self.sample, self.offset.clamp(max=padded.shape[1] - 1)]
        exists = self.offset < self.counts[self.sample]
        return torch.where(exists[:, None, None], rows, 0)


def tokens(caller: str, name: str, t: Any, which: str, cu_seqlens: Any, *, whole: bool = False) -> Tokens:
    """Return the tokens t (total, H, E), which begin where cu_seqlens says.

    Args:
        name, which: of t and cu_seqlens in the call.
        whole: no token may lie beyond the last sequence.

    Raises:
        ValueError, TypeError: naming what does not fit; on a CPU also values that descend or are too large.
    """
    if not isinstance(t, Tensor) or t.dim() != 3:
        given = scalars.describe(t)
        raise ValueError(f"{caller}: with {which}, {name} must be (total, heads, head_dim); got {given}")
    flash_checks.starts(caller, t, **{which: cu_seqlens})
    starts = cu_seqlens.long()
    if starts.device.type == "cpu" and not torch.compiler.is_compiling():
        last = int(starts[-1])
        if starts[0] != 0 or (starts.diff() < 0).any() or last > len(t) or (whole and last != len(t)):
            ends = "end at" if whole else "end at most at"
            raise ValueError(
                f"{caller}: {which} must begin at 0, never descend and {ends} {len(t)}; got {starts.tolist()}"
            )
    rows = torch.arange(len(t), device=starts.device)
    sample = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=max(len(starts) - 2, 0))
    return Tokens(sample, rows - starts[sample], starts.diff(), starts)


def check_used(caller: str, name: str, used: Any, cu_seqlens: Tensor) -> None:
    """Raise unless used (B,) says how many rows of each sequence are used.

    Raises:
        ValueError, TypeError: naming what does not fit; on a CPU also values that are too large or negative.
    """
    batch = len(cu_seqlens) - 1
    flash_checks.of_samples(caller, name, used, cu_seqlens, batch)
    if used is None or used.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = cu_seqlens.diff()
    if batch and ((used < 0) | (used > lengths)).any():
        raise ValueError(
            f"{caller}: {name} must lie in 0 … the sequences' lengths {lengths.tolist()}, got {used.tolist()}"
        )


def used_first(cu_seqlens: Tensor, used: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the order (total,) of rows that puts the used ones of each sequence first, and their cu_seqlens.

    Rows that are not used follow after the last sequence, where they belong to none.
    """
    starts = cu_seqlens.long()
    lengths = torch.minimum(used.long(), starts.diff()).clamp(min=0)
    rows = torch.arange(total, device=starts.device)
    if len(lengths) == 0:
        return rows, starts
    sequence = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    known = sequence.clamp(max=len(lengths) - 1)
    is_used = (sequence < len(lengths)) & (rows - starts[known] < lengths[known])
    order = torch.argsort((~is_used).to(torch.uint8), stable=True)
    return order, cumulative(lengths)


def restore(packed: Tensor, order: Tensor) -> Tensor:
    """Return rows to where ``used_first`` took them from."""
    return torch.empty_like(packed).index_copy(0, order, packed)


def check_pages(caller: str, q: Any, k: Any, v: Any, table: Any, lengths: Tensor) -> None:
    """Raise unless k (pages, page_size, Hkv, D), v (pages, page_size, Hkv, Dv) and block_table fit together.

    Raises:
        ValueError, TypeError: naming what does not fit; on a CPU also pages that do not exist or do not suffice.
    """
    flash_checks.pages(caller, q, k, v, table, len(lengths))
    if torch.compiler.is_compiling():
        return
    try:
        cached.check_places(lengths, None, table, len(k), k.shape[1] * table.shape[1])
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None


def rows_of_pages(cu_seqlens: Tensor, table: Tensor, page_size: int, longest: int) -> Tensor:
    """Return the indices among all rows of all pages of each sequence's keys, one sequence after another.

    Args:
        cu_seqlens: (B + 1,), of the keys as they will lie.
        table: (B, pages of each), the pages of each sequence in order.
        longest: the length of the longest sequence. On an accelerator, where the sum of the lengths is not read, there
            are B · longest indices, those beyond the last sequence 0.
    """
    starts = cu_seqlens.long()
    batch = len(table)
    reads_values = starts.device.type == "cpu" and not torch.compiler.is_compiling()
    total = int(starts[-1]) if reads_values else batch * longest
    if batch == 0 or table.shape[1] == 0:
        return torch.zeros(total, dtype=torch.int64, device=starts.device)
    rows = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    known = sequence.clamp(max=batch - 1)
    offset = rows - starts[known]
    page = table.long()[known, (offset // page_size).clamp(max=table.shape[1] - 1)]
    return torch.where(sequence < batch, page * page_size + offset % page_size, 0)
