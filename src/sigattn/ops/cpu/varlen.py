"""Packed sequences on any device: each sequence is computed by ``cpu.blocked``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sigattn.ops.cpu import blocked
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import VarlenProblem


def _sequences(problem: VarlenProblem) -> Iterator[tuple[int, slice, slice]]:
    starts_q, starts_k = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    for s in range(problem.sequences):
        yield s, slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])


def forward(problem: VarlenProblem) -> Tensor:  # (Tq, Hq, Dv)
    """Return the output of sigmoid attention; rows that belong to no sequence are 0."""
    p = problem
    out = p.query.new_zeros(*p.query.shape[:2], p.value.shape[2])
    for s, query_rows, key_rows in _sequences(p):
        out[query_rows] = blocked.forward(p.sequence(s, query_rows, key_rows))[0].transpose(0, 1)
    return out


def backward(problem: VarlenProblem, grad_out: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``; rows that belong to no sequence are 0."""
    p = problem
    sums = blocked.GradientSums(p, needs_grad)
    for s, query_rows, key_rows in _sequences(p):
        sequence = p.sequence(s, query_rows, key_rows)
        g = blocked.backward(sequence, grad_out[query_rows].transpose(0, 1).unsqueeze(0), needs_grad)
        rows = (query_rows, key_rows, key_rows)
        for total, part, at in zip((sums.query, sums.key, sums.value), g[:3], rows, strict=True):
            if total is not None and part is not None:
                total[at] = part[0].transpose(0, 1)
        for total, part in ((sums.bias, g.bias), (sums.alibi_slopes, g.alibi_slopes)):
            if total is not None and part is not None:
                own = total if total.dim() == 0 else p.of_sequence(total, s)
                own += part.view(own.shape)
        if sums.attn_mask is not None and g.attn_mask is not None:
            own = p.mask_of_sequence(sums.attn_mask, s, sequence.query.shape[2], sequence.key.shape[2])
            own += g.attn_mask
    return sums.result(p)
