"""Backend "llvm": kernels for a CPU's vector units, compiled at their first call by llvmlite, without a C compiler."""

import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

from sigattn.ops import packed
from sigattn.ops.gradients import Result
from sigattn.ops.llvm import calls
from sigattn.ops.llvm.calls import backward, forward, saved_weights
from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem

__all__ = [
    "backward", "can_be_default", "forward", "kvcache_can_be_default", "kvcache_forward", "machine_unavailable",
    "saved_weights", "unavailable", "varlen_backward", "varlen_forward",
]  # fmt: skip

_MINIMUM = (0, 45)  # of llvmlite, as in pyproject.toml; before, its pointers have the types of what they point to
# Features of processors, and whether the kernels are the default there. For each dtype the first row whose feature the
# processor has decides; without one they are not. The comments say what was executed and measured (docs/log.md).
_DEFAULTS = (
    (torch.float32, "avx2", True),  # executed on Zen 3, Zen 4, Zen 5: faster than "blocked" at every length
    (torch.float32, "neon", True),  # ARM: executed in emulation, 0.99 of the peak in a model of its cores
    (torch.bfloat16, "amx_bf16", False),  # not executed; oneDNN's products use matrix units, which vectors cannot match
    (torch.bfloat16, "avx512_bf16", True),  # executed on Zen 4 and Zen 5: faster than "blocked"
    (torch.bfloat16, "avx512_f", False),  # not at hand, and not measured since its sums stay in registers
    (torch.bfloat16, "avx2", True),  # executed on Zen 3: faster than "blocked" at every length
    (torch.bfloat16, "neon", False),  # ARM: as above, executed in emulation; its matrix units (BFMMLA) are oneDNN's
)


def defaults(features: Mapping[str, Any]) -> dict[torch.dtype, bool]:
    """Return for each dtype whether the kernels are the default on a processor with some features."""
    return {
        dtype: sys.platform == "linux"  # elsewhere the kernels have not been executed
        and next((fast for kind, feature, fast in _DEFAULTS if kind is dtype and features.get(feature)), False)
        for dtype in (torch.float32, torch.bfloat16)
    }


_FAST = defaults(torch.cpu.get_capabilities())


def _attend(problem: Problem, result: Result) -> None:
    forward(problem, None, {}, result)


varlen_forward = functools.partial(packed.varlen_forward, _attend)
varlen_backward = functools.partial(packed.varlen_backward, calls.differentiate)
kvcache_forward = functools.partial(packed.kvcache_forward, _attend, None)


def can_be_default(problem: Problem | VarlenProblem | KVCacheProblem) -> bool:
    """Return True if the kernels were measured as faster, unless the call is recorded for other machines."""
    if not _FAST.get(problem.query.dtype):
        return False
    mask = problem.attn_mask
    if mask is not None and mask.is_floating_point() and torch._C._are_functorch_transforms_active():
        return False  # of a mapped tensor it is not known whether its gradient is needed
    return not (torch.compiler.is_exporting() if torch.compiler.is_compiling() else torch._C._is_tracing())


def kvcache_can_be_default(problem: KVCacheProblem) -> bool:
    """Return True if decoding was measured as faster, which it was in float32 with a key head for each thread."""
    if problem.query.dtype is not torch.float32 or not can_be_default(problem):
        return False
    if torch.compiler.is_compiling():  # which cannot trace a number of threads
        return True
    return problem.query.shape[0] * problem.key.shape[2] >= torch.get_num_threads()


def unavailable(problem: Problem | VarlenProblem | KVCacheProblem) -> str | None:
    """Return why the kernels do not support a problem, or None."""
    p = problem
    if p.query.device.type != "cpu":
        return f"it is for CPUs, not for {p.query.device.type}"
    if (reason := machine_unavailable()) is not None:
        return reason
    if p.query.dtype not in (torch.float32, torch.bfloat16):
        return f"it is for float32 and bfloat16, not for {str(p.query.dtype).removeprefix('torch.')}"
    if p.attn_mask is not None and p.attn_mask.requires_grad:
        return calls.NO_GRADIENT_OF_MASK
    blocks = p.mask_table if isinstance(p, Problem) else None
    if blocks is None and not p.softcap:
        return None
    unsupported = {"a BlockMask": blocks, "softcap": p.softcap or None}
    return f"it does not support {' and '.join(name for name, value in unsupported.items() if value is not None)}"


def machine_unavailable() -> str | None:
    """Return why no problem is supported on this machine, or None. The first call imports llvmlite."""
    return _machine_unavailable()


# as torch.compiler.assume_constant_result does, which imports the compiler; dynamo does not trace imports
machine_unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _machine_unavailable() -> str | None:
    try:
        import llvmlite

        version = llvmlite.__version__
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _MINIMUM:
            minimum = ".".join(map(str, _MINIMUM))
            return f"it needs llvmlite {minimum} or later, not {version} (pip install --upgrade llvmlite)"
        from llvmlite import binding, ir  # noqa: F401
    except Exception as error:  # an OSError if the process may not have enough memory for LLVM
        if isinstance(error, ModuleNotFoundError) and error.name == "llvmlite":
            return "it needs llvmlite, which is not installed (pip install llvmlite)"
        return f"llvmlite cannot be imported: {type(error).__name__}: {error}"
    from sigattn.ops.llvm.processor import host_processor

    if host_processor() is None:
        return "it needs AVX2 and FMA, or a 64-bit ARM processor"
    return "it needs GOMP_parallel, which PyTorch's OpenMP lacks here" if calls.parallel() is None else None
