"""Construction of problems from checked arguments, shared by the three operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.ops import settings
from sigattn.ops.autocast import is_autocast_enabled
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, P


def make_problem(
    kind: type[P],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    bias: float | Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **fields: Any,
) -> P:
    """Return the problem that backends receive: bias, mask, slopes and window in one form.

    Defaults that depend on a size (scale, bias) stay None and are computed inside the op, where sizes are numbers, so
    that a graph compiled for any length does not specialise on one.

    Args:
        kind: class of the operator's problems.
        query, key, value, …: as in the operators.
        precision: "accurate" or "fast"; None for the process-wide setting.
        deterministic: if True, gradients repeat bitwise.
        fields: fields of ``kind`` that are the same in the operator's arguments and in its problems.
    """
    left, right = combine_window(window, is_causal)
    precision = settings.current_precision if precision is None else settings.checked_precision(precision)
    for name, value_of_field in fields.items():
        if isinstance(value_of_field, Tensor):
            fields[name] = as_index(value_of_field)
    if kind is not KVCacheProblem:  # has neither dropout nor a gradient
        fields["seed"] = new_seed(query.device) if dropout_p else None
        fields["dropout_p"] = dropout_p
        fields["deterministic"] = deterministic or torch.are_deterministic_algorithms_enabled()
    return kind(
        query=query,
        key=key,
        value=value,
        bias=None if bias is None else bias_tensor(bias, query),  # type: ignore[arg-type]  # KVCacheProblem requires one
        attn_mask=None if attn_mask is None else at_least(attn_mask, 4),
        alibi_slopes=None if alibi_slopes is None else two_sided_slopes(alibi_slopes),
        left=left,
        right=right,
        fast=precision == "fast",
        **fields,
    )


def cast_operands(*operands: Any) -> tuple[Any, ...]:
    """Return operands in autocast's dtype if autocast is enabled on the device of the first, else unchanged."""
    if not torch._C._is_any_autocast_enabled():
        return operands
    first = operands[0]
    if not isinstance(first, Tensor) or not is_autocast_enabled(first.device.type):
        return operands
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in operands
    )


def as_index(t: Tensor) -> Tensor:
    """Return integers in int64, unless they are int32: operators of PyTorch take no others as indices."""
    is_other = not (t.is_floating_point() or t.dtype in (torch.bool, torch.int32, torch.int64))
    return t.long() if is_other else t


def combine_window(window: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    """Return the window (left, right) that combines ``window`` and ``is_causal``."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if is_causal:
        right = 0 if right == UNLIMITED else min(right, 0)
    return left, right


def new_seed(device: torch.device) -> Tensor:
    """Return the seed of a call's dropout, drawn from PyTorch's generator of a device."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


def bias_tensor(bias: Any, query: Tensor) -> Tensor:
    """Return the bias as an operand of an op, with at least four dimensions if it is a tensor.

    A number becomes a 0-d tensor on the CPU, so that backends read it without synchronising. In a graph compiled for
    another device it becomes a tensor on the query's device, because a CUDA graph would replay the number it was
    recorded with; in float32, or the query's dtype if that is wider.
    """
    if isinstance(bias, Tensor):
        return at_least(bias, 4)
    if not isinstance(bias, (float, int, torch.SymFloat, torch.SymInt)):  # another library's number
        bias = float(bias)
    if not torch.compiler.is_compiling():
        return torch.full((), bias, dtype=torch.float64, device="cpu")  # half the time of torch.tensor
    # a sum, because the compiler keeps a number symbolic in a sum
    if query.device.type == "cpu":
        return torch.zeros((), dtype=torch.float64, device="cpu") + bias
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros((1, 1, 1, 1), dtype=dtype, device=query.device) + bias


def at_least(t: Tensor, dimensions: int) -> Tensor:
    """Return t with leading dimensions of size 1, so that it has at least this number of dimensions."""
    return t if t.dim() >= dimensions else t[(None,) * (dimensions - t.dim())]


def two_sided_slopes(slopes: Tensor | None) -> Tensor | None:  # (B or 1, Hq, 2)
    """Return slopes of any allowed shape as one slope for keys before the query and one for keys after it."""
    if slopes is None or slopes.dim() == 3:
        return slopes
    slopes = at_least(slopes, 2)
    return slopes.unsqueeze(-1).expand(*slopes.shape, 2)
