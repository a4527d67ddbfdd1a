"""Gathering of the used rows of packed sequences, and of the rows of paged ones.

The packed operator takes concatenated sequences without gaps. The functions here compute the indices that gather rows
in that order, without reading a value from an accelerator; autograd computes the gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.flash.padding import cumulative
from sigattn.ops import scalars, validation
from sigattn.ops.kvcache import check_cache_bounds


class Tokens(NamedTuple):
    """Indices of packed tokens (total, H, ·), several per sample.

    Attributes:
        sample: (total,), sample of each token; the last sample for tokens beyond the last sequence.
        offset: (total,), index of each token among its sample's.
        counts: (B,), number of tokens of each sample.
        starts: (B + 1,), the cu_seqlens.
    """

    sample: Tensor
    offset: Tensor
    counts: Tensor
    starts: Tensor

    def padded(self, packed: Tensor, longest: int) -> Tensor:  # (B, longest, H, E)
        """Return packed tokens as a padded batch; the values of padding are arbitrary."""
        if not packed.shape[0]:
            return packed.new_zeros(self.counts.shape[0], longest, *packed.shape[1:])
        rows = self.starts[:-1, None] + torch.arange(longest, device=packed.device)
        return packed[rows.clamp(max=packed.shape[0] - 1)]

    def packed(self, padded: Tensor) -> Tensor:  # (total, H, E)
        """Return a padded batch as packed tokens, 0 beyond the last sequence."""
        if not padded.shape[0] * padded.shape[1]:
            return padded.new_zeros(self.sample.shape[0], *padded.shape[2:])
        rows = padded[self.sample, self.offset.clamp(max=padded.shape[1] - 1)]
        exists = self.offset < self.counts[self.sample]
        return torch.where(exists[:, None, None], rows, 0)


def tokens(caller: str, name: str, t: Any, which: str, cu_seqlens: Any, *, whole: bool = False) -> Tokens:
    """Return the ``Tokens`` of t (total, H, E) and cu_seqlens.

    Args:
        caller: name of the public function, for error messages.
        name, which: names of t and cu_seqlens in the call.
        whole: True if the last sequence must end at total.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; on a CPU also for values of cu_seqlens that
            decrease or are too large.
    """
    if not isinstance(t, Tensor) or t.dim() != 3:
        description = scalars.describe(t)
        raise ValueError(f"{caller}: with {which}, {name} must be (total, heads, head_dim); got {description}")
    validation.sequence_offsets(caller, t, **{which: cu_seqlens})
    starts = cu_seqlens.long()
    if starts.device.type == "cpu" and not torch.compiler.is_compiling():
        last = int(starts[-1])
        if starts[0] != 0 or (starts.diff() < 0).any() or last > t.shape[0] or (whole and last != t.shape[0]):
            ends = "end at" if whole else "end at most at"
            raise ValueError(
                f"{caller}: {which} must begin at 0, never decrease and {ends} {t.shape[0]}; got {starts.tolist()}"
            )
    _, sample, offset = _locate(starts, t.shape[0])
    return Tokens(sample, offset, starts.diff(), starts)


def _locate(starts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:  # each (total,)
    """Return whether each row belongs to a sequence, its sequence (else the last), and its index in that."""
    rows = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    known = sequence.clamp(max=max(starts.shape[0] - 2, 0))
    return sequence < starts.shape[0] - 1, known, rows - starts[known]


def check_used(caller: str, name: str, used: Any, cu_seqlens: Tensor) -> None:
    """Check used (B,), the number of rows of each sequence that are used.

    Raises:
        ValueError, TypeError: if it does not fit; on a CPU also for values that are too large or negative.
    """
    batch = cu_seqlens.shape[0] - 1
    if used is None:
        return
    validation.integers(caller, name, used, (batch,), "(B,)", cu_seqlens.device)
    if used.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = cu_seqlens.diff()
    if batch and ((used < 0) | (used > lengths)).any():
        raise ValueError(
            f"{caller}: {name} must lie in 0 … the sequences' lengths {lengths.tolist()}, got {used.tolist()}"
        )


def used_first(cu_seqlens: Tensor, used: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the order (total,) of rows that concatenates the used ones of each sequence, and their cu_seqlens.

    Unused rows come after the last sequence.
    """
    starts = cu_seqlens.long()
    lengths = torch.minimum(used.long(), starts.diff()).clamp(min=0)
    if lengths.shape[0] == 0:
        return torch.arange(total, device=starts.device), starts
    exists, sequence, offset = _locate(starts, total)
    is_used = exists & (offset < lengths[sequence])
    order = torch.argsort((~is_used).to(torch.uint8), stable=True)
    return order, cumulative(lengths)


def restore(packed: Tensor, order: Tensor) -> Tensor:
    """Return rows in the order before ``used_first``."""
    return torch.empty_like(packed).index_copy(0, order, packed)


def check_pages(caller: str, q: Any, k: Any, v: Any, table: Any, lengths: Tensor) -> None:
    """Check k (pages, page_size, Hkv, D), v (pages, page_size, Hkv, Dv) and block_table.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; on a CPU also for pages that do not exist, or too
            few pages.
    """
    flash_validation.pages(caller, q, k, v, table, lengths.shape[0])
    check_cache_bounds(caller, lengths, None, table, k.shape[0], k.shape[1] * table.shape[1])


def rows_of_pages(cu_seqlens: Tensor, table: Tensor, page_size: int, longest: int) -> Tensor:
    """Return the indices of the concatenated sequences' keys among all rows of all pages.

    Args:
        cu_seqlens: (B + 1,), starts of the concatenated sequences, and end of the last.
        table: (B, pages of each), the pages of each sequence in order.
        page_size: number of rows of a page.
        longest: length of the longest sequence. On an accelerator, where the sum of the lengths is not read, there are
            B · longest indices, 0 beyond the last sequence.
    """
    starts = cu_seqlens.long()
    batch = table.shape[0]
    reads_values = starts.device.type == "cpu" and not torch.compiler.is_compiling()
    total = int(starts[-1]) if reads_values else batch * longest
    if batch == 0 or table.shape[1] == 0:
        return torch.zeros(total, dtype=torch.int64, device=starts.device)
    exists, sequence, offset = _locate(starts, total)
    page = table.long()[sequence, (offset // page_size).clamp(max=table.shape[1] - 1)]
    return torch.where(exists, page * page_size + offset % page_size, 0)
