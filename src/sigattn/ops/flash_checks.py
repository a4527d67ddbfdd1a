"""What can be wrong with a call of ``sigattn.flash``, in terms of its own layouts; as ``checks`` does it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from sigattn.ops.checks import describe


def _wrong(caller: str, error: type[Exception], what: str, **arguments: Any) -> NoReturn:
    raise error(f"{caller}: {what}; got {describe(**arguments)}")


def dense(caller: str, q: Any, k: Any, v: Any) -> None:
    """Raise unless q (B, N, Hq, D), k (B, M, Hkv, D) and v (B, M, Hkv, Dv) fit together."""
    _together(caller, q, k, v, 4, "(batch, length, heads, head_dim)")
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        _wrong(caller, ValueError, "q, k and v must have the same batch size (dimension 0)", q=q, k=k, v=v)


def varlen(
    caller: str, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> None:
    """Raise unless q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) and the sequences fit together."""
    _together(caller, q, k, v, 3, "(total, heads, head_dim)")
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, t in starts.items():
        if not isinstance(t, Tensor) or t.is_floating_point() or t.is_complex() or t.dtype is torch.bool:
            _wrong(caller, TypeError, f"{name} must be a tensor of integers", **{name: t})
        if t.dim() != 1 or not len(t):
            _wrong(caller, ValueError, f"{name} must be (B + 1,): 0, then where each sequence ends", **{name: t})
        if t.device != q.device:
            _wrong(caller, ValueError, f"{name} must be on q's device: move it with .to(device)", q=q, **{name: t})
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        _wrong(caller, ValueError, "there must be as many sequences of queries as of keys", **starts)
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(most, bool) or not isinstance(most, (int, torch.SymInt)):
            _wrong(caller, TypeError, f"{name} must be an int: a length, not a tensor", **{name: most})
        if most < 0:
            _wrong(caller, ValueError, f"{name} is a length", **{name: most})


def packed_together(caller: str, name: str, t: Any, dimensions: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of (…, parts, heads, head_dim)."""
    if not isinstance(t, Tensor):
        _wrong(caller, TypeError, f"{name} must be a tensor", **{name: t})
    if t.dim() != dimensions or t.shape[-3] != parts:
        shape = "(batch, length, " if dimensions == 5 else "(total, "
        _wrong(caller, ValueError, f"{name} must be {shape}{parts}, heads, head_dim)", **{name: t})
    return t.unbind(-3)


def bias(caller: str, b: Any, q: Tensor, batch: int) -> None:
    """Raise unless this is a number or a tensor (), (B,) or (B or 1, Hq or 1)."""
    heads = q.shape[-2]
    if isinstance(b, bool) or not isinstance(b, (Tensor, float, int, torch.SymFloat, torch.SymInt)):
        _wrong(caller, TypeError, 'sigmoid_bias must be a number, "-log n" or a tensor', sigmoid_bias=b)
    if not isinstance(b, Tensor):
        return
    if not b.is_floating_point():
        _wrong(caller, TypeError, "sigmoid_bias must be floating point", sigmoid_bias=b)
    fits = b.dim() == 0 or tuple(b.shape) == (batch,) or (b.dim() == 2 and _broadcasts(b, batch, heads))
    if not fits:
        what = f"sigmoid_bias must be (), (B,) = ({batch},) or (B or 1, Hq or 1) = ({batch} or 1, {heads} or 1)"
        _wrong(caller, ValueError, what, sigmoid_bias=b)
    if b.device != q.device:
        _wrong(caller, ValueError, "sigmoid_bias must be on q's device: move it with .to(device)", q=q, sigmoid_bias=b)


def _broadcasts(b: Tensor, batch: int, heads: int) -> bool:
    return b.shape[0] in (1, batch) and b.shape[1] in (1, heads)


def slopes(caller: str, s: Any, q: Tensor, batch: int) -> None:
    """Raise unless these are (Hq,) or (B, Hq)."""
    heads = q.shape[-2]
    if not isinstance(s, Tensor) or not s.is_floating_point():
        _wrong(caller, TypeError, "alibi_slopes must be a floating-point tensor", alibi_slopes=s)
    if tuple(s.shape) not in {(heads,), (batch, heads)}:
        _wrong(caller, ValueError, f"alibi_slopes must be (Hq,) = ({heads},) or (B, Hq)", q=q, alibi_slopes=s)
    if s.device != q.device:
        _wrong(caller, ValueError, "alibi_slopes must be on q's device: move it with .to(device)", q=q, alibi_slopes=s)


def _together(caller: str, q: Any, k: Any, v: Any, dimensions: int, layout: str) -> None:
    given = {"q": q, "k": k, "v": v}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            _wrong(caller, TypeError, f"{name} must be a tensor", **{name: t})
        if t.is_nested or t.layout is not torch.strided:
            _wrong(caller, TypeError, f"{name} must be a dense tensor", **{name: t.layout})
    if not (q.dim() == k.dim() == v.dim() == dimensions):
        _wrong(caller, ValueError, f"q, k and v must have {dimensions} dimensions, {layout}", **given)
    if not q.is_floating_point():
        _wrong(caller, TypeError, "q, k and v must be floating point", **given)
    if not (q.dtype == k.dtype == v.dtype):
        _wrong(caller, TypeError, "q, k and v must have one dtype: convert with .to(dtype)", **given)
    if not (q.device == k.device == v.device):
        _wrong(caller, ValueError, "q, k and v must be on one device: move with .to(device)", **given)
    if q.shape[-1] != k.shape[-1]:
        _wrong(caller, ValueError, "q and k must have the same head_dim (the last dimension)", **given)
    if k.shape[:-1] != v.shape[:-1]:
        _wrong(caller, ValueError, "k and v must have the same batch size, length and heads", **given)
    if q.shape[-2] != k.shape[-2] and (not k.shape[-2] or q.shape[-2] % k.shape[-2]):
        _wrong(caller, ValueError, "the heads of q must be a multiple of those of k", **given)
