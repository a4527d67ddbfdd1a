"""Fit of each head's bias c + a · log(visible keys) to -log of the softmax denominators, by least squares.

The bias is a margin m below the fit, and the weights are divided by their sum: a softmax weight p becomes
p / (1 + p e^-m) up to a common factor of its row, which is nearly p where single keys dominate, too. Where a row's -lse
differs from the fit, only its margin changes, because the sum cancels the rest. So m is ``MARGIN`` and ``SPREAD``
standard deviations of what the fit misses.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigattn.conversion.report import ConversionError
from sigattn.nn.bias import VisibleKeysLinearBias
from sigattn.nn.observer import Attend, AttentionCall
from sigattn.nn.written_softmax import WrittenSoftmax
from sigattn.ops.problem import Problem
from sigattn.ops.reference import masked_logits, row_blocks
from sigattn.ops.settings import without_autocast

MARGIN = 8.0  # in nats; docs/log.md compares others
SPREAD = 4.0
_SLOPE_RIDGE = 0.01  # pulls a to -1 where calibration has rows of nearly one length: in (nats per log visible)²


class RowStatistics(NamedTuple):
    """Statistics of the rows of one call, (B, Hq, N) each."""

    lse: Tensor  # log of the softmax denominator, log Σ exp(s) over the visible keys; -inf in a row without
    visible: Tensor  # number of visible keys, at least 1, float32
    counted: Tensor  # True for rows that count: with visible keys, and not of padding


def row_statistics(problem: Problem | WrittenSoftmax, num_heads: int = 1) -> RowStatistics:
    """Return the statistics of a call's rows, in float32 or better; with one head a written softmax has one sample."""
    if isinstance(problem, WrittenSoftmax):
        logits = problem.logits.to(torch.promote_types(problem.logits.dtype, torch.float32))
        hidden = problem.hidden
        lse = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
        shape = (-1, num_heads, logits.shape[-2]) if num_heads > 1 else (1, 1, -1)
        rows = lse, problem.num_visible(hidden), ~hidden.all(-1)
        return RowStatistics(*(t.reshape(shape) for t in rows))
    blocks = []
    with without_autocast(problem.query.device.type):
        for start, stop in row_blocks(problem):
            logits, seen = masked_logits(problem, "softmax", (start, stop))  # (B, Hq, R, M)
            blocks.append((logits.masked_fill(~seen, -torch.inf).logsumexp(-1), seen.sum(-1)))
    lse, visible = (torch.cat(block, -1) for block in zip(*blocks, strict=True))
    counted, padding = visible > 0, is_padding(problem)
    if padding is not None:
        counted = counted & ~padding
    return RowStatistics(lse, visible.clamp(min=1).float(), counted)


def is_padding(problem: Problem | WrittenSoftmax) -> Tensor | None:  # (B, 1, N), or logits' dimensions but the last
    """Return True for rows of padding: in self-attention by key_lengths, of a written softmax those without keys."""
    if isinstance(problem, WrittenSoftmax):
        return problem.hidden.all(-1)
    n, lengths = problem.query.shape[2], problem.key_lengths
    if lengths is None or n != problem.key.shape[2]:
        return None
    i = torch.arange(n, device=problem.query.device)
    return (i >= lengths.to(i.device)[:, None])[:, None]


def finite_statistics(call: AttentionCall, num_heads: int) -> RowStatistics:
    """Return the statistics of a call's rows; raise ConversionError if one that counts is not finite."""
    rows = row_statistics(call.problem, num_heads)
    if not (rows.lse.isfinite() | ~rows.counted).all():
        raise ConversionError(f"the attention logits of {call.name!r} are not finite: check weights and batches")
    return rows


class BiasFit:
    """Least-squares fit of the bias, for each of ``num_heads`` heads of one layer."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads: int = num_heads
        # by head: number of rows, Σ x, Σ x², Σ y, Σ x y, Σ y² of x = log visible and y = -lse
        self.sums: Tensor = torch.zeros(6, num_heads, dtype=torch.float64, device="cpu")
        self.visible_keys: tuple[int, int] = (sys.maxsize, 0)  # least and largest number of a row

    def update(self, rows: RowStatistics) -> None:
        counted = rows.counted.double().cpu()
        x = rows.visible.double().cpu().log() * counted
        y = torch.where(rows.counted, -rows.lse, 0).double().cpu()
        self.sums += torch.stack([t.expand(y.shape).sum((0, 2)) for t in (counted, x, x * x, y, x * y, y * y)])
        if (visible := rows.visible.masked_select(rows.counted)).numel():
            least, largest = (int(t) for t in visible.aminmax())
            self.visible_keys = min(self.visible_keys[0], least), max(self.visible_keys[1], largest)

    def solve(self) -> VisibleKeysLinearBias:
        """Return the fitted bias less the margin, in float32."""
        count = self.sums[0].clamp(min=1)
        x, xx, y, xy, yy = self.sums[1:] / count
        variance, covariance = xx - x * x, xy - x * y
        slope = (covariance - _SLOPE_RIDGE) / (variance + _SLOPE_RIDGE)
        missed = (yy - y * y - 2 * slope * covariance + slope * slope * variance).clamp(min=0).sqrt()
        with torch.no_grad(), torch.device("cpu"):
            bias = VisibleKeysLinearBias(self.num_heads).float()
            bias.slope.copy_(slope)
            bias.constant.copy_(y - slope * x - MARGIN - SPREAD * missed)
        return bias


def fit_biases(run: Callable[[Attend], object], names: Sequence[str]) -> dict[str, BiasFit]:
    """Fit the bias of each named layer; ``run`` runs the batches with a function that answers their attention calls."""
    fits: dict[str, BiasFit] = {}

    def observe(call: AttentionCall) -> object:
        fit = fits.setdefault(call.name, BiasFit(call.num_heads))
        if call.num_heads != fit.num_heads and isinstance(call.problem, WrittenSoftmax):
            # one bias for all heads: the dimension had the number of heads by chance
            fit.num_heads, fit.sums = 1, fit.sums.sum(1, keepdim=True)
        elif call.num_heads != fit.num_heads:
            raise ConversionError(
                f"{call.name!r} calls attention with {fit.num_heads} and with {call.num_heads} heads, so "
                "that no bias for each head fits it"
            )
        fit.update(finite_statistics(call, fit.num_heads))
        return call.softmax()

    run(observe)
    if missing := [name for name in names if name not in fits]:
        raise ConversionError(
            f"the batches do not reach the attention of {', '.join(map(repr, missing))}: pass batches that "
            "run every layer"
        )
    if empty := [name for name in names if not fits[name].sums[0].any()]:
        raise ConversionError(
            f"no query of the batches sees a key in {', '.join(map(repr, empty))}: check their attention masks"
        )
    return {name: fits[name] for name in names}
