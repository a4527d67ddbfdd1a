"""From a canonical problem to what all its kernels are told.

A dense problem and a packed one differ in one thing: a packed one has no batch dimension (its stride is 0) and
``starts`` that say where each sequence's rows begin.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED, Problem, VarlenProblem
from sigattn.ops.triton import fitting, launch_cache, tuning
from sigattn.ops.triton.forward import fwd_kernel

LOG2E = math.log2(math.e)
_LONGEST_TILE = 256  # rows
INTERPRETED = not hasattr(fwd_kernel, "cache_key")  # TRITON_INTERPRET=1: kernels run as Python, on a CPU


@dataclass
class Shape:
    """A problem as the kernels see it: B samples or sequences, Hq query heads, at most N queries and M keys of each."""

    batch: int
    heads: int
    kv_heads: int
    n: int
    m: int
    d: int
    dv: int
    packed: bool

    def strides(self, t: Tensor) -> tuple[int, int, int, int]:
        """(batch, head, row, column) of (B, H, N, E), or of a packed (T, H, E)."""
        if self.packed:
            row, head, column = t.stride()
            return 0, head, row, column
        b, h, n, e = t.stride()
        return b, h, n, e


@dataclass
class Launch:
    """What all kernels of a problem are told."""

    problem: Problem | VarlenProblem
    shape: Shape
    arguments: dict[str, Any] = field(default_factory=dict)
    launches: list[launch_cache.Launched] = field(default_factory=list)

    def config(self, kernel: str, *, mask_gradient: bool = False) -> tuning.Config:
        """Return the tile shape of a kernel, small enough for its options."""
        a, itemsize = self.arguments, self.problem.query.element_size()
        own = architecture(self.problem.query.device)
        config = tuning.kernel_config(kernel, own, max(self.shape.d, self.shape.dv), itemsize)
        if a["MASK"] != "none" or a["SLOPES"] or a["BLOCKS"] or a["SOFTCAP"] or a["DROPOUT"]:
            for _ in range(1 + mask_gradient):
                config = tuning.WITH_OPTIONS.get((kernel, config), config)
        if a["MASK"] == "none" or not own:
            return config
        mask: Tensor = a["mask"]
        operands = fitting.Operands(a["BLOCK_D"], a["BLOCK_DV"], itemsize, mask.element_size(), mask_gradient)
        return fitting.fit(kernel, config, operands, own)


def architecture(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 where there is none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def prepare(problem: Problem | VarlenProblem) -> Launch:
    """Everything but the outputs and the tile shapes."""
    query, key, value = (limit_strides(t) for t in (problem.query, problem.key, problem.value))
    p = problem._replace(query=query, key=key, value=value)
    packed = isinstance(p, VarlenProblem)
    if isinstance(p, VarlenProblem):
        (_, heads, d), (_, kv_heads, dv) = p.query.shape, p.value.shape
        shape = Shape(p.sequences, heads, kv_heads, p.max_seqlen_q, p.max_seqlen_k, d, dv, True)
    else:
        (b, heads, n, d), (_, kv_heads, m, dv) = p.query.shape, p.value.shape
        shape = Shape(b, heads, kv_heads, n, m, d, dv, False)
    dropout = p.seed is not None
    arguments: dict[str, Any] = {
        "query": p.query,
        "key": p.key,
        "value": p.value,
        **named("q", "bhnd", shape.strides(p.query)),
        **named("k", "bhnd", shape.strides(p.key)),
        **named("v", "bhnd", shape.strides(p.value)),
        "n": shape.n,
        "keys": shape.m,
        "heads": heads,
        "GROUP": heads // max(kv_heads, 1),
        "left": p.left,
        "right": p.right,
        "seed": p.seed if p.seed is not None else p.query,
        "threshold": round(p.dropout_p * (1 << 32)) - (1 << 31) if dropout else 0,
        **scales(p),
        "out_scale": to_float32(p.keep_scale),
        "D": d,
        "DV": dv,
        "BLOCK_D": tuning.padded_head_dim(d),
        "BLOCK_DV": tuning.padded_head_dim(dv),
        "HAS_LEFT": p.left != UNLIMITED,
        "HAS_RIGHT": p.right != UNLIMITED,
        "DROPOUT": dropout,
        "VARLEN": packed,
        "SIGMOID": sigmoid_form(p),
        "PRECISION": precision(p.query),
        "WGMMA": architecture(p.query.device) == 90,
    }
    arguments |= _bias(p, shape) | _mask(p, shape) | _slopes(p, shape) | _blocks(p, shape)
    if isinstance(p, VarlenProblem):
        arguments |= {
            "starts_q": p.cu_seqlens_q,
            "starts_k": p.cu_seqlens_k,
            "key_lengths": p.query,
            "LENGTHS": False,
            "query_offset": 0,
            "BOTTOM_RIGHT": True,
        }
    else:
        lengths = p.key_lengths
        arguments |= {
            "starts_q": p.query,
            "starts_k": p.query,
            "key_lengths": p.query if lengths is None else lengths.to(p.query.device),
            "LENGTHS": lengths is not None,
            "query_offset": p.query_offset,
            "BOTTOM_RIGHT": False,
        }
    return Launch(p, shape, arguments)


def limit_strides(t: Tensor) -> Tensor:
    """Return the tensor, or a dense copy if neighbouring rows or columns are so far apart that a tile would span 2^31.

    The copy keeps the order of strides if that suffices, as the fakes expect of gradients.
    """
    if not _spans_too_much(t):
        return t
    near = t.clone()
    return near if not _spans_too_much(near) else t.contiguous()


def _spans_too_much(t: Tensor) -> bool:
    rows = t.stride(-3 if t.dim() == 3 else -2) * _LONGEST_TILE
    return max(t.stride(-1) * t.shape[-1], rows, 0) >= 2**31


def unit(*tensors: Tensor) -> int:
    """Return the entries of 16 bytes if the kernels have to be told that all rows start at multiples of that, else 1.

    Triton itself finds out which addresses are multiples of 16 bytes and which strides of 16 entries; heads of 8, 24,
    40, 56, 72 or 88 have strides that are multiples of 8. If the compiler does not know, it copies 2 bytes at a time.
    """
    size = 16 // tensors[0].element_size()
    strides = [stride for t in tensors for stride in t.stride()[:-1]]
    if all(stride % 16 == 0 for stride in strides) or any(stride % size for stride in strides):
        return 1
    return size if all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in tensors) else 1


def named(name: str, axes: str, strides: tuple[int, ...]) -> dict[str, int]:
    """A tensor's strides as kernels name them: q_b, q_h, …"""
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def sigmoid_form(p: Any) -> str:
    """The form of σ (activation.py) that a problem asks for."""
    if p.fast and not INTERPRETED and torch.version.hip is None:
        return "fast"
    return "exact" if p.query.dtype is torch.float32 else "accurate"


def form(asked: str, tuned: str) -> str:
    """The form of σ: what is tuned is one of the accurate ones; who asks for another gets that."""
    return tuned if asked == "accurate" else asked


def precision(t: Tensor) -> str:
    """Of the products of a tensor: "tf32" where PyTorch is told so, else "ieee"."""
    return "tf32" if t.dtype is torch.float32 and t.is_cuda and tf32_is_allowed() else "ieee"


def tf32_is_allowed() -> bool:
    """What PyTorch is told of its own float32 products on a GPU, by whichever of its settings."""
    own = torch.backends.cuda.matmul.fp32_precision
    everywhere: str = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return (everywhere if own == "none" else own) == "tf32"


def _bias(p: Problem | VarlenProblem, shape: Shape) -> dict[str, Any]:
    """Return the arguments of the bias, and of the power of two that float16 weights need for it (activation.py)."""
    kind, tensor, number = "number", p.query, 0.0
    strides: tuple[int, ...] = (0, 0, 0)
    if p.bias is not None and p.bias.dim() == 0:
        number = p.bias.item()
    elif p.bias is not None and p.bias.numel() == 1:
        kind, tensor = "scalar", p.bias
    elif p.bias is not None:
        kind, tensor = "tensor", p.bias
        full = p.bias[..., None, None] if shape.packed else p.bias  # (B, Hq) or (B, Hq, N, 1)
        strides = full.expand(shape.batch, shape.heads, 1 if shape.packed else shape.n, 1).stride()[:3]
        strides = (*strides[:2], 0) if shape.packed else strides
    elif shape.packed or (isinstance(p, Problem) and p.key_lengths is not None):
        kind = "length"
    else:
        number = -math.log(max(shape.m, 1))
    shift, shift_pointer = 0.0, p.query
    if p.query.dtype is torch.float16 and kind == "number" and math.isfinite(number):
        shift = float(min(max(math.floor(-number * LOG2E), 0), 15))
    elif kind == "scalar":
        shift_pointer = tensor
    elif p.query.dtype is torch.float16 and kind == "tensor":
        most = tensor.amax() if tensor.numel() else tensor.new_zeros(())
        shift_pointer = (most.float() * -LOG2E).floor().nan_to_num(0.0).clamp(0, 15)
    return {
        "bias": tensor,
        "bias_value": to_float32(-number * LOG2E),
        "BIAS": kind,
        **named("bias", "bhn", strides),
        "shift_pointer": shift_pointer,
        "shift_value": shift,
        "SHIFT": kind if p.query.dtype is torch.float16 else "none",
    }


def _mask(p: Problem | VarlenProblem, shape: Shape) -> dict[str, Any]:
    mask = p.attn_mask
    if mask is None:
        return {"mask": p.query, "MASK": "none", **named("mask", "bhnm", (0, 0, 0, 0))}
    kind = "bool" if mask.dtype is torch.bool else "added"
    full = mask.expand(shape.batch, shape.heads, shape.n, shape.m)
    return {
        "mask": mask.view(torch.uint8) if kind == "bool" else mask,
        "MASK": kind,
        **named("mask", "bhnm", full.stride()),
    }


def _blocks(p: Problem | VarlenProblem, shape: Shape) -> dict[str, Any]:
    blocks = p.blocks if isinstance(p, Problem) else None
    if blocks is None:
        off = {"block_table": p.query, "block_tiles": p.query, "BLOCKS": False, "BLOCK_Q": 1, "BLOCK_K": 1}
        return {**off, **named("blocks", "bhn", (0, 0, 0))}
    table = blocks.table.contiguous()
    return {
        "block_table": table,
        "block_tiles": blocks.tiles.contiguous().view(torch.uint8),
        "BLOCKS": True,
        "BLOCK_Q": blocks.size[0],
        "BLOCK_K": blocks.size[1],
        **named("blocks", "bhn", table.expand(shape.batch, shape.heads, -1, -1).stride()[:3]),
    }


def _slopes(p: Problem | VarlenProblem, shape: Shape) -> dict[str, Any]:
    if p.alibi_slopes is None:
        return {"slopes": p.query, "SLOPES": False, **named("slopes", "bhs", (0, 0, 0))}
    strides = p.alibi_slopes.expand(shape.batch, shape.heads, 2).stride()
    return {"slopes": p.alibi_slopes, "SLOPES": True, **named("slopes", "bhs", strides)}


def scales(p: Any) -> dict[str, Any]:
    """The factors that take Q Kᵀ to a term of z, with a soft cap in between or not.

    Without: z = z_scale · Q Kᵀ + …; with: z = z_scale · tanh(cap_scale · Q Kᵀ) + ….
    """
    if not p.softcap:
        return {"z_scale": to_float32(-p.scale_value * LOG2E), "cap_scale": 0.0, "SOFTCAP": False}
    return {
        "z_scale": to_float32(-p.softcap * LOG2E),
        "cap_scale": to_float32(p.scale_value / p.softcap),
        "SOFTCAP": True,
    }


def to_float32(x: float) -> float:
    """A number as float32 has it, which is how kernels take it; what is less than normal there is 0."""
    x = ctypes.c_float(x).value
    return 0.0 if abs(x) < torch.finfo(torch.float32).smallest_normal else x
