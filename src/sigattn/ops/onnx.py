"""Export to ONNX: the dense op is replaced by the plain formula, in operators of ONNX.

``torch.onnx.export`` traces the registered ops again when it decomposes an exported program. The autograd kernels,
which every such call passes, call ``exporting`` and, if True, return ``formula`` instead of calling the op.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from sigattn.ops import reference
from sigattn.ops.problem import Problem


def exporting() -> bool:
    """Return True while ``torch.onnx.export`` traces a call (without importing ``torch.onnx``, which takes 0.1 s)."""
    tracing = torch._C._len_torch_dispatch_stack() > 0
    return tracing and "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def formula(*args: Any) -> Tensor:
    """Return the output of ``sigattn::dense_forward`` by the plain formula, which exports with dynamic lengths.

    Raises:
        RuntimeError: with dropout.
    """
    problem = Problem(*args)
    if problem.seed is not None:
        raise RuntimeError("sigmoid_attention with dropout cannot be exported to ONNX: call eval() on the model first")
    return reference.attention(problem._replace(bias=_bias(problem)))


def _bias(p: Problem) -> Tensor | None:
    """Return the bias as a tensor, because a number would be fixed to the traced lengths."""
    dtype = torch.promote_types(p.query.dtype, torch.float32)
    if p.bias is not None:
        return p.bias.to(p.query.device, dtype).view(1, 1, 1, 1) if p.bias.dim() == 0 else p.bias
    if p.key_lengths is not None:
        return None  # the reference takes -log of each length
    num_keys = torch.full((1, 1, 1, 1), p.key.shape[2], dtype=dtype, device=p.query.device)
    return -num_keys.clamp(min=1).log()


def refuse(name: str) -> NoReturn:
    """Raise RuntimeError for an op that cannot be exported to ONNX."""
    raise RuntimeError(
        f"{name} cannot be exported to ONNX: packed sequences and caches written in place are not supported; use "
        "sigmoid_attention with key_lengths or a mask"
    )
