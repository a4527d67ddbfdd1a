"""Packed sequences of different lengths: the registered ops, their autograd, and the "blocked" implementation.

As in ``library.py`` there are two ops, the second of which is the derivative of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sigattn.ops import autograd, custom_ops, flops, triton
from sigattn.ops.cpu import blocked
from sigattn.ops.custom_ops import Kernels, absent
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import VarlenProblem

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? attn_mask, Tensor? alibi_slopes"
_REST = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, "
    "int left, int right, float dropout_p, bool fast, bool deterministic, float softcap, str backend"
)
_DIFFERENTIABLE = 6  # the leading tensors of both ops

_library = torch.library.Library("sigattn", "FRAGMENT")
_library.define(f"varlen_forward({_TENSORS}, {_REST}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"varlen_backward(Tensor grad_out, {_TENSORS}, {_REST}, bool[] needs_grad) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# -- the "blocked" implementation: one sequence after another ---------------------------------------------------------


def _sequences(problem: VarlenProblem) -> Iterator[tuple[int, slice, slice]]:
    starts_q, starts_k = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    for s in range(problem.sequences):
        yield s, slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])


def blocked_forward(problem: VarlenProblem) -> Tensor:  # (Tq, Hq, Dv)
    """Return the output of sigmoid attention; rows that belong to no sequence are 0."""
    p = problem
    out = p.query.new_zeros(*p.query.shape[:2], p.value.shape[2])
    for s, rows, keys in _sequences(p):
        out[rows] = blocked.forward(p.sequence(s, rows, keys))[0].transpose(0, 1)
    return out


def blocked_backward(problem: VarlenProblem, grad_out: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``; rows that belong to no sequence are 0."""
    p = problem
    query, key, value = (
        torch.zeros_like(t) if needed else None
        for t, needed in zip((p.query, p.key, p.value), needs_grad[:3], strict=True)
    )
    wide = torch.promote_types(p.query.dtype, torch.float32)
    bias, mask, slopes = (
        torch.zeros(t.shape, dtype=wide, device=t.device) if needed and t is not None else None
        for t, needed in (
            (p.bias, needs_grad.bias),
            (p.attn_mask, needs_grad.attn_mask),
            (p.alibi_slopes, needs_grad.alibi_slopes),
        )
    )
    for s, rows, keys in _sequences(p):
        sequence = p.sequence(s, rows, keys)
        g = blocked.backward(sequence, grad_out[rows].transpose(0, 1).unsqueeze(0), needs_grad)
        for total, part, at in ((query, g.query, rows), (key, g.key, keys), (value, g.value, keys)):
            if total is not None and part is not None:
                total[at] = part[0].transpose(0, 1)
        for total, part in ((bias, g.bias), (slopes, g.alibi_slopes)):
            if total is not None and part is not None:
                own = total if total.dim() == 0 or len(total) == 1 else total[s : s + 1]
                own += part.view(own.shape)
        if mask is not None and g.attn_mask is not None:
            own = p.mask_of(mask if len(mask) == 1 else mask[s : s + 1], sequence.query.shape[2], sequence.key.shape[2])
            own += g.attn_mask
    return Gradients(
        query,
        key,
        value,
        None if bias is None or p.bias is None else bias.to(p.bias.dtype),
        None if mask is None or p.attn_mask is None else mask.to(p.attn_mask.dtype),
        None if slopes is None or p.alibi_slopes is None else slopes.to(p.alibi_slopes.dtype),
    )


KERNELS = {
    "triton": Kernels(triton.forward, triton.backward, triton.unavailable, device_types=("cuda",)),
    "blocked": Kernels(blocked_forward, blocked_backward, blocked.unavailable),
}


# -- the ops ----------------------------------------------------------------------------------------------------------


def check_mask(problem: VarlenProblem) -> None:
    """Raise ValueError unless the mask fits the longest sequences; called when the op runs and lengths are numbers."""
    p = problem
    longest = (p.max_seqlen_q, p.max_seqlen_k)
    if p.attn_mask is not None and any(a not in (1, b) for a, b in zip(p.attn_mask.shape[2:], longest, strict=True)):
        raise ValueError(
            "attn_mask must be broadcastable to (B, Hq, max_seqlen_q, max_seqlen_k), whose last two are "
            f"{longest}; got {tuple(p.attn_mask.shape)}"
        )


def check_starts(problem: VarlenProblem) -> None:
    """Raise ValueError unless cu_seqlens, if on a CPU, ascend from 0 and fit the rows and the longest sequence.

    Called when the op runs, because a traced graph has no values. On an accelerator reading them would synchronise.
    """
    p = problem
    for side, starts, total, most in (
        ("q", p.cu_seqlens_q, len(p.query), p.max_seqlen_q),
        ("k", p.cu_seqlens_k, len(p.key), p.max_seqlen_k),
    ):
        if starts.device.type != "cpu":
            continue
        lengths = starts.diff()
        if starts[0] != 0 or (lengths < 0).any() or starts[-1] > total:
            raise ValueError(
                f"cu_seqlens_{side} must begin at 0, never descend and end at most at {total}, the number of rows; "
                f"got {starts.tolist()}"
            )
        if len(lengths) and lengths.max() > most:
            raise ValueError(f"max_seqlen_{side} is {most}, but cu_seqlens_{side} has a sequence of {lengths.max()}")


def _problem(args: Sequence[Any]) -> tuple[VarlenProblem, Kernels]:
    problem = VarlenProblem(*args[:-1])
    check_mask(problem)
    check_starts(problem)
    return problem, KERNELS[args[-1]]


def _forward(*args: Any) -> Tensor:
    problem, kernels = _problem(args)
    with custom_ops.without_autocast(problem):
        return kernels.forward(problem)


def _backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    problem, kernels = _problem(args[:-1])
    with custom_ops.without_autocast(problem):
        gradients = kernels.backward(problem, grad_out, NeedsGrad(*args[-1]))
    return tuple(t if t is not None else absent(grad_out) for t in gradients)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def _fake_backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(
        (torch.empty_like(t) if at < 3 else t.new_empty(t.shape)) if t is not None and needed else absent(grad_out)
        for at, (t, needed) in enumerate(zip(args[:_DIFFERENTIABLE], args[-1], strict=True))
    )


_library.impl("varlen_forward", _forward, "CompositeExplicitAutograd")
_library.impl("varlen_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sigattn::varlen_forward", _fake_forward, lib=_library)
torch.library.register_fake("sigattn::varlen_backward", _fake_backward, lib=_library)
autograd.register(
    _library,
    torch.ops.sigattn.varlen_forward.default,
    torch.ops.sigattn.varlen_backward.default,
    differentiable=_DIFFERENTIABLE,
)
for _op in (torch.ops.sigattn.varlen_forward.default, torch.ops.sigattn.varlen_backward.default):
    custom_ops.register_vmap_by_slices(_library, _op)
flops.register("varlen_forward", "varlen_backward")


def call(problem: VarlenProblem, backend: str) -> Tensor:
    """Return the output of a packed problem, computed by a backend; differentiable."""
    out: Tensor = torch.ops.sigattn.varlen_forward.default(*problem, backend)
    return out
