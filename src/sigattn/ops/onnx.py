"""Export to ONNX: the dense op is replaced by the plain formula, in operators of ONNX.

``torch.onnx.export`` traces the registered ops again when it decomposes an exported program. The autograd kernels,
which every such call passes, call ``exporting`` and, if True, return the formula instead of calling the op.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import torch


def exporting() -> bool:
    """Return True while ``torch.onnx.export`` traces a call (without importing ``torch.onnx``, which takes 0.1 s)."""
    tracing = torch._C._len_torch_dispatch_stack() > 0
    return tracing and "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def refuse(name: str) -> NoReturn:
    """Raise RuntimeError for an op that cannot be exported to ONNX."""
    raise RuntimeError(
        f"{name} cannot be exported to ONNX: packed sequences and caches written in place are not supported; use "
        "sigmoid_attention with key_lengths or a mask"
    )
