"""Backend "triton": FlashSigmoid in Triton, which is imported with the first problem that it may support."""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from sigattn.ops.gradients import Gradients, NeedsGrad, Prepared, Result, Saved
from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 256
_MAX_TILE = 128  # rows or columns of any tile in tuning's tables
_INSTALLED = importlib.util.find_spec("triton") is not None


def unavailable(problem: Problem | VarlenProblem | KVCacheProblem) -> str | None:
    """Return why the kernels do not support a problem, or None."""
    q, v = problem.query, problem.value
    if (reason := _device_unavailable(q.device)) is not None:
        return reason
    if isinstance(problem, Problem) and problem.blocks is not None:
        size = problem.blocks.size
        if size[0] % _MAX_TILE or size[1] % _MAX_TILE:
            return f"it is for a BlockMask whose block sizes are multiples of {_MAX_TILE}, not {size}"
    if q.dtype not in _DTYPES:
        return f"it is for {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}, not for {q.dtype}"
    if not (1 <= q.shape[-1] <= _MAX_HEAD_DIM and 1 <= v.shape[-1] <= _MAX_HEAD_DIM):
        return f"it is for heads of 1 to {_MAX_HEAD_DIM}, not of {q.shape[-1]} (query, key) and {v.shape[-1]} (value)"
    return None


def _device_unavailable(device: torch.device) -> str | None:
    """Return why a device cannot run the kernels, or None. Traceable by torch.compile: no values."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it is for CUDA and ROCm devices, not for {device.type}"
    if not _INSTALLED:
        return "Triton is not installed; it comes with PyTorch for CUDA and ROCm, or by pip install triton"
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    compute_capability = torch.cuda.get_device_capability if torch.compiler.is_compiling() else _compute_capability
    major, minor = compute_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0, and this GPU has {major}.{minor}"


_compute_capability = functools.cache(torch.cuda.get_device_capability)


def forward(problem: Problem | VarlenProblem, saved: Saved | None, prepared: Prepared) -> Result:
    """Return the output, (B, Hq, N, Dv) or packed (T, Hq, Dv); no weights are saved."""
    from sigattn.ops.triton import launch, launch_cache

    return launch_cache.run(prepared, launch.forward, problem)


def kvcache_forward(problem: KVCacheProblem, saved: Saved | None, prepared: Prepared) -> Result:
    """Return the output of queries against a cache, (B, N, Hq, Dv)."""
    from sigattn.ops.triton import launch, launch_cache

    return launch_cache.run(prepared, launch.kvcache_forward, problem)


def backward(
    problem: Problem | VarlenProblem, grad_out: Tensor, result: Result, needs_grad: NeedsGrad,
    prepared: Prepared,
) -> Gradients:  # fmt: skip
    """Return the gradients that are needed."""
    from sigattn.ops.triton import launch, launch_cache

    return launch_cache.run(
        prepared, launch.backward, problem, grad_out, needs_grad, *(result if problem.normalize else ())
    )
