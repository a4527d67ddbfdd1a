"""Backend "llvm": kernels for a CPU's vector units, compiled at their first call by llvmlite, without a C compiler."""

from __future__ import annotations

import ctypes
import functools
import re
import sys

import torch
from torch import Tensor

from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import Problem

_MINIMUM = (0, 45)  # of llvmlite, as in pyproject.toml; before, its pointers have the types of what they point to
_PROCESSOR = torch.cpu.get_capabilities()
# AMD's processors with AVX512-BF16, Zen 4 and Zen 5: faster than PyTorch (docs/log.md)
_MEASURED = bool(_PROCESSOR.get("sse4a") and _PROCESSOR.get("avx512_bf16"))
MAX_SAVED = 3  # times the memory of query, key and value: the largest weights that are saved
_NO_GRADIENT_OF_MASK = "it does not compute the gradient of attn_mask, as 'blocked' does"
_HAS_THREADS = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def can_be_default(problem: Problem) -> bool:
    """Return True if the kernels were measured as faster, unless the call is recorded for other machines."""
    if not _MEASURED:
        return False
    recorded = torch.compiler.is_exporting() if torch.compiler.is_compiling() else torch._C._is_tracing()
    mask = problem.attn_mask
    if mask is not None and mask.is_floating_point() and torch._C._are_functorch_transforms_active():
        return False  # of a mapped tensor it is not known whether its gradient is needed
    return not recorded and is_long_enough(problem.query, problem.value)


def is_long_enough(query: Tensor, value: Tensor) -> bool:
    """Return True if products of PyTorch take more time for so many keys than the kernels, whose tiles have 64.

    The numbers of keys were measured on Zen 4 and Zen 5 (docs/log.md). Heads of bfloat16 that are not whole vectors
    are copied.
    """
    m, (d, dv) = value.shape[2], (query.shape[3], value.shape[3])
    if query.dtype is torch.float32:
        return bool(m >= 32)
    return query.dtype is torch.bfloat16 and bool(m >= (64 if d % 32 or dv % 32 else 16))


def unavailable(problem: Problem) -> str | None:
    """Return why the kernels do not support a problem, or None."""
    p = problem
    if p.query.device.type != "cpu":
        return f"it is for CPUs, not for {p.query.device.type}"
    if (reason := machine_unavailable()) is not None:
        return reason
    if p.query.dtype not in (torch.float32, torch.bfloat16):
        return f"it is for float32 and bfloat16, not for {str(p.query.dtype).removeprefix('torch.')}"
    if p.attn_mask is not None and p.attn_mask.requires_grad:
        return _NO_GRADIENT_OF_MASK
    if p.mask_table is None and not p.softcap:
        return None
    given = {"a BlockMask": p.mask_table, "softcap": p.softcap or None}
    return f"it does not support {' and '.join(name for name, value in given.items() if value is not None)}"


def machine_unavailable() -> str | None:
    """Return why no problem is supported on this machine, or None. The first call imports llvmlite."""
    return _machine_unavailable()


# as torch.compiler.assume_constant_result does, which imports the compiler; dynamo does not trace imports
machine_unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _machine_unavailable() -> str | None:
    if not _HAS_THREADS:
        return "it needs Linux, and a PyTorch that uses OpenMP"
    try:
        import llvmlite

        version = llvmlite.__version__
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _MINIMUM:
            minimum = ".".join(map(str, _MINIMUM))
            return f"it needs llvmlite {minimum} or later, not {version} (pip install --upgrade 'sigattn[cpu]')"
        from llvmlite import binding, ir  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "llvmlite":
            return "it needs llvmlite, which is not installed (pip install 'sigattn[cpu]')"
        return _not_imported(error)
    except Exception as error:  # an OSError if the process may not have enough memory for LLVM
        return _not_imported(error)
    from sigattn.ops.llvm.processor import host_processor

    return None if host_processor() is not None else "it needs AVX2 and FMA, or a 64-bit ARM processor"


def _not_imported(error: Exception) -> str:
    return f"llvmlite cannot be imported: {type(error).__name__}: {error}"


def saved_weights(problem: Problem) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return shape and dtype of the weights to save for the backward pass, or None if they are not saved.

    Saved weights spare the backward pass one of five products; with more memory, its page faults would cost more.
    """
    from sigattn.ops.llvm import calls

    p = problem
    (batch, heads, n, d), (_, key_heads, m, dv) = p.query.shape, p.value.shape
    inputs, columns = heads * n * d + key_heads * m * (d + dv), calls.columns_of_weights(p)
    if p.seed is not None or not batch * m or heads * n * columns > MAX_SAVED * inputs:
        return None
    return (batch, heads, n, columns), p.query.dtype


def forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor]:  # (B, Hq, N, Dv), and saved weights
    """Return the output of sigmoid attention, and the weights that ``saved_weights`` describes, or an empty tensor."""
    from sigattn.ops.llvm import calls

    return calls.forward(problem, save)


def backward(problem: Problem, grad_out: Tensor, weights: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``, from the saved weights; empty ones are computed again."""
    from sigattn.ops.llvm import calls

    if needs_grad.attn_mask:
        raise RuntimeError(f"sigmoid_attention: backend 'llvm': {_NO_GRADIENT_OF_MASK}")
    return calls.backward(problem, grad_out, weights, needs_grad)
