"""Weights divided by their row's sum, W = σ(S) / Σ σ(S), for every S, by kernels of the plain sigmoid.

The sum of a row far below 0 underflows. But where every weight of a row is tiny, σ(S) = e^S up to rounding: W is the
softmax of the row, which is the same for S + c. Such rows are rare. They are computed again with a "lift" c, added to
their bias in both passes; that of other rows is 0.

The backward pass is that of the plain sigmoid, with dO / t for dO and dP - δ / t for dP, where t is the sum of a row
and δ = dO · O:

    dS = W (1 - σ(S)) (dP - δ)        dV = Wᵀ dO
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sigattn.ops import reference
from sigattn.ops.gradients import Result
from sigattn.ops.problem import Problem

SMALLEST_SUM = 2.0**-80  # of a row that is not lifted; weights that underflow are less than 2^-46 of it
LEVEL = -40.0  # largest logit of a lifted row, where σ(S) = e^S (1 - 4e-18)
_ROWS = 8192  # of a head whose product dO ∘ O is in memory at a time


def find_lifts(problem: Problem, row_sums: Tensor) -> Tensor | None:  # (B, Hq, N)
    """Return the lifts of rows whose sum, ``row_sums[..., 0]``, is below ``SMALLEST_SUM``; None if no row needs one."""
    is_small = row_sums.select(-1, 0) < SMALLEST_SUM
    largest = reference.largest_logits(problem, is_small)
    lifts = torch.where(is_small & largest.isfinite(), LEVEL - largest, 0)  # -inf if a row sees no key
    return lifts if lifts.any() else None


def add_parts(parts: Sequence[Result], total: Result) -> None:
    """Write the result over all keys, given those over disjoint parts of the keys."""
    outs = torch.stack([part.out for part in parts])
    if not total.row_sums.numel():
        total.out.copy_(outs.sum(0))
        return
    sums, lifts = torch.stack([part.row_sums for part in parts]).unbind(-1)
    # with the lift of the part that has the largest logits; next to a lift of 1e9 the logarithm of a sum would be lost
    lift = torch.where(sums == 0, torch.inf, lifts).amin(0)
    sums = torch.where(sums == 0, 0, sums * torch.exp(lift - lifts))
    total_sums = sums.sum(0)
    shares = torch.where(sums == 0, 0, sums / total_sums)
    total.out.copy_((outs * shares.unsqueeze(-1)).sum(0))
    total.row_sums.copy_(torch.stack([total_sums, torch.where(total_sums == 0, 0, lift)], -1))


def backward_operands(problem: Problem, grad_out: Tensor, result: Result) -> tuple[Problem, Tensor, Tensor]:
    """Return what the backward pass of the plain sigmoid needs for the gradients of a problem that normalises.

    That is the problem with the bias of lifted rows; dO / t, (B, Hq, N, Dv), in float32 for float16, where it may be
    infinite; and δ / t, (B, Hq, N, 1) in float32 or better, which is subtracted from each row of dP.
    """
    sums, lifts = result.row_sums.unbind(-1)
    if lifts.any():
        problem = lifted(problem, lifts)
    dtype = sums.dtype if grad_out.dtype is torch.float16 else grad_out.dtype
    scaled = (torch.where(sums == 0, 0, 1 / sums).unsqueeze(-1) * grad_out).to(dtype)
    # δ of the rounded dO / t, as dP is: where one key has nearly all weight, they cancel
    rows = zip(scaled.split(_ROWS, 2), result.out.split(_ROWS, 2), strict=True)
    row_terms = torch.cat([(d_out.to(sums.dtype) * out).sum(-1, keepdim=True) for d_out, out in rows], 2)
    return problem, scaled, row_terms


def lifted(problem: Problem, lifts: Tensor) -> Problem:
    """Return a problem with the lifts of its rows, (B, Hq, N), added to the bias."""
    return problem._replace(bias=problem.bias_value() + lifts.unsqueeze(-1))
