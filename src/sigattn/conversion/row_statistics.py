"""Statistics of each row of softmax attention, in memory linear in the length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sigattn.nn.written_softmax import WrittenSoftmax
from sigattn.ops import reference
from sigattn.ops.problem import Problem
from sigattn.ops.reference import row_blocks


class RowStatistics(NamedTuple):
    """Statistics of the rows of one call, (B, Hq, N) each.

    Attributes:
        lse: log of the softmax denominator, log Σ exp(s) over the visible keys; -inf in a row without visible keys.
        visible: number of visible keys, at least 1, float32.
        counted: True for rows that count: with visible keys, and not of padding.
    """

    lse: Tensor
    visible: Tensor
    counted: Tensor


def row_statistics(problem: Problem | WrittenSoftmax) -> RowStatistics:
    """Return the statistics of a call's rows, computed in blocks of rows in float32 or better.

    The rows of a softmax that is written out are those of one sample and head.
    """
    if isinstance(problem, WrittenSoftmax):
        logits = problem.logits.to(torch.promote_types(problem.logits.dtype, torch.float32))
        lse = logits.masked_fill(~problem.visible, -torch.inf).logsumexp(-1)
        return RowStatistics(*(t.view(1, 1, -1) for t in (lse, problem.num_visible, problem.visible.any(-1))))
    parts = [_of_rows(problem.rows(i, stop)) for i, stop in row_blocks(problem)]
    lse, visible = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    counted, padding = visible > 0, is_padding(problem)
    if padding is not None:
        counted = counted & ~padding
    return RowStatistics(lse, visible.clamp(min=1).float(), counted)


def is_padding(problem: Problem | WrittenSoftmax) -> Tensor | None:  # (B, 1, N), or logits' dimensions but the last
    """Return True for rows of padding, which key_lengths tell in self-attention; None if there are none.

    Those of a softmax that is written out are the rows without visible keys, whose weights have no meaning.
    """
    if isinstance(problem, WrittenSoftmax):
        return ~problem.visible.any(-1)
    n, lengths = problem.query.shape[2], problem.key_lengths
    if lengths is None or n != problem.key.shape[2]:
        return None
    i = torch.arange(n, device=problem.query.device)
    return (i >= lengths.to(i.device)[:, None])[:, None]


def _of_rows(problem: Problem) -> tuple[Tensor, Tensor]:
    logits, visible = reference.masked_logits(problem, "softmax")  # (B, Hq, R, M)
    return logits.masked_fill(~visible, -torch.inf).logsumexp(-1), visible.sum(-1)
