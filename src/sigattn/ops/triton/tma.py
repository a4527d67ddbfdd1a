"""TMA descriptors of tensors: TMA loads whole tiles, with zeros for rows beyond the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sigattn.ops.triton.args import Options, padded_head_dim


def tile_sizes(options: Options) -> dict[str, tuple[int, int]]:
    """Return the tensors that the portable kernels load tiles of, and the rows and columns of these."""
    width, value_width = padded_head_dim(options.D), padded_head_dim(options.DV)
    key, value = (options.BLOCK_N, width), (options.BLOCK_N, value_width)
    return {"query": (options.BLOCK_M, width), "key": key, "value": value, "grad_out": (options.BLOCK_M, value_width)}


def supports(t: Tensor) -> bool:
    """Return True if TMA can load a tensor (B, H, N, D).

    It requires dense rows, a start and strides of multiples of 16 bytes, and no dimension without a stride or an entry.
    """
    steps = [stride * t.element_size() % 16 for stride in t.stride()[:-1]]
    return t.stride(-1) == 1 and not any(steps) and t.data_ptr() % 16 == 0 and min(t.stride()) >= 1 and t.numel() > 0


def is_available(arguments: dict[str, Any], options: Options) -> bool:
    """Return True if TMA can load the tensors that a portable kernel loads tiles of.

    A descriptor does not contain the ends of packed sequences or of a sample's keys. A mask of keys hides those beyond.
    """
    if options.VARLEN or (options.LENGTHS and options.MASK != "keys"):
        return False
    return all(supports(arguments[name]) for name in tile_sizes(options) if name in arguments)


def describe(arguments: dict[str, Any], options: Options) -> dict[str, Any] | None:
    """Return descriptors of the tensors that a portable kernel loads tiles of, or None if it must use pointers."""
    if not is_available(arguments, options):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensors = {name: (arguments[name], size) for name, size in tile_sizes(options).items() if name in arguments}
    return {
        name: TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, *size]) for name, (t, size) in tensors.items()
    }
