"""Backend "llvm": kernels for a CPU's vector units, compiled at their first call by llvmlite, without a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import Problem

_INSTALLED = importlib.util.find_spec("llvmlite") is not None
_PROCESSOR = torch.cpu.get_capabilities()
# AMD's processors with AVX512-BF16, Zen 4 and Zen 5: faster than PyTorch (docs/log.md)
_MEASURED = bool(_PROCESSOR.get("sse4a") and _PROCESSOR.get("avx512_bf16"))
_ROW_MULTIPLE = 16  # features that are whole vectors of AVX-512 in float32
_NO_GRADIENT_OF_MASK = "it does not compute the gradient of attn_mask, as 'blocked' does"
_HAS_THREADS = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def can_be_default(problem: Problem) -> bool:
    """Return True if the kernels were measured as faster, unless the call is recorded for other machines."""
    recorded = torch.compiler.is_exporting() if torch.compiler.is_compiling() else torch._C._is_tracing()
    mask = problem.attn_mask
    if mask is not None and mask.is_floating_point() and torch._C._are_functorch_transforms_active():
        return False  # of a mapped tensor it is not known whether its gradient is needed
    return _MEASURED and not recorded and is_long_enough(problem.query, problem.value)


def is_long_enough(query: Tensor, value: Tensor, *, is_plain: bool = False) -> bool:
    """Return True if products of PyTorch take more time for so many keys than the kernels, whose tiles have 64.

    The numbers of keys were measured on Zen 4 and Zen 5 (docs/log.md). Heads of bfloat16 that are not whole vectors
    are copied.

    Args:
        is_plain: True for a call whose only options are a bias that is a number and causality, which needs fewer
            operations of PyTorch.
    """
    m, (d, dv) = value.shape[2], (query.shape[3], value.shape[3])
    if query.dtype is torch.float32:
        return bool(m >= 32)
    fewest = 64 if d % 32 or dv % 32 else 16
    return query.dtype is torch.bfloat16 and bool(m >= (4 * fewest if is_plain else fewest))


def has_row_kernels(rows: Tensor) -> bool:
    """Return True if the kernels of ``row_kernels`` support the rows of a tensor and were measured as faster."""
    if not (_MEASURED and _INSTALLED and _HAS_THREADS) or rows.device.type != "cpu" or rows.dim() != 4:
        return False
    return rows.dtype in (torch.float32, torch.bfloat16) and not rows.shape[3] % _ROW_MULTIPLE and rows.numel() > 0


def unavailable(problem: Problem) -> str | None:
    """Return why the kernels do not support a problem, or None."""
    p = problem
    if p.query.device.type != "cpu":
        return f"it is for CPUs, not for {p.query.device.type}"
    if not _HAS_THREADS:
        return "it needs Linux, and a PyTorch that uses OpenMP"
    if not _INSTALLED:
        return "it needs llvmlite, which is not installed (pip install 'sigattn[cpu]')"
    if p.query.dtype not in (torch.float32, torch.bfloat16):
        return f"it is for float32 and bfloat16, not for {str(p.query.dtype).removeprefix('torch.')}"
    if p.attn_mask is not None and p.attn_mask.requires_grad:
        return _NO_GRADIENT_OF_MASK
    if p.mask_table is None and not p.softcap:
        return None
    given = {"a BlockMask": p.mask_table, "softcap": p.softcap or None}
    return f"it does not support {' and '.join(name for name, value in given.items() if value is not None)}"


def forward(problem: Problem, saved: list[Tensor] | None = None) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention; append the weights to ``saved``, for ``backward``."""
    from sigattn.ops.llvm import calls

    return calls.forward(problem, saved)


def backward(
    problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad, saved: Sequence[Tensor] | None = None
) -> Gradients:
    """Return the gradients in ``needs_grad``.

    Args:
        saved: what ``forward`` has saved; None computes the weights again.
    """
    from sigattn.ops.llvm import calls

    if needs_grad.attn_mask:
        raise RuntimeError(f"sigmoid_attention: backend 'llvm': {_NO_GRADIENT_OF_MASK}")
    return calls.backward(problem, grad_out, needs_grad, saved)
