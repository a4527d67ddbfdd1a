"""Tensors as the copy engine (TMA) of Hopper is told of them: it brings whole tiles, and 0 for rows beyond the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# What the portable kernels load tiles of, and how large those are.
TILES = {
    "query": ("BLOCK_M", "BLOCK_D"),
    "key": ("BLOCK_N", "BLOCK_D"),
    "value": ("BLOCK_N", "BLOCK_DV"),
    "grad_out": ("BLOCK_M", "BLOCK_DV"),
}


def is_far(t: Tensor) -> bool:
    """Whether a tensor (B, H, N, D) lies so that the copy engine cannot serve it.

    It wants dense rows, a start and strides of multiples of 16 bytes, and no dimension without a stride or an entry.
    """
    steps = [stride * t.element_size() % 16 for stride in t.stride()[:-1]]
    return t.stride(-1) != 1 or any(steps) or t.data_ptr() % 16 != 0 or min(t.stride()) < 1 or not t.numel()


def describe(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The tensors that a portable kernel loads tiles of, as descriptors; None if it must use their addresses.

    Of packed sequences and key lengths a descriptor does not know the ends.
    """
    loaded = {name: arguments[name] for name in TILES if name in arguments}
    if arguments["VARLEN"] or arguments["LENGTHS"] or any(is_far(t) for t in loaded.values()):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    blocks = {name: [1, 1, *(arguments[size] for size in TILES[name])] for name in loaded}
    return {name: TensorDescriptor(t, list(t.shape), list(t.stride()), blocks[name]) for name, t in loaded.items()}
