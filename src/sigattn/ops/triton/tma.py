"""TMA descriptors of tensors: TMA loads whole tiles, with zeros for rows beyond the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sigattn.ops.triton.args import Options

# Tensors that the portable kernels load tiles of, and the sizes of these.
TILES = {
    "query": ("BLOCK_M", "BLOCK_D"),
    "key": ("BLOCK_N", "BLOCK_D"),
    "value": ("BLOCK_N", "BLOCK_DV"),
    "grad_out": ("BLOCK_M", "BLOCK_DV"),
}


def supports(t: Tensor) -> bool:
    """Return True if TMA can load a tensor (B, H, N, D).

    It requires dense rows, a start and strides of multiples of 16 bytes, and no dimension without a stride or an entry.
    """
    steps = [stride * t.element_size() % 16 for stride in t.stride()[:-1]]
    return t.stride(-1) == 1 and not any(steps) and t.data_ptr() % 16 == 0 and min(t.stride()) >= 1 and t.numel() > 0


def describe(arguments: dict[str, Any], options: Options) -> dict[str, Any] | None:
    """Return descriptors of the tensors that a portable kernel loads tiles of, or None if it must use pointers.

    A descriptor does not contain the ends of packed sequences or of a sample's keys.
    """
    loaded = {name: arguments[name] for name in TILES if name in arguments}
    if options.VARLEN or options.LENGTHS or not all(map(supports, loaded.values())):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    blocks = {name: [1, 1, *(getattr(options, size) for size in TILES[name])] for name in loaded}
    return {name: TensorDescriptor(t, list(t.shape), list(t.stride()), blocks[name]) for name, t in loaded.items()}
