"""From a problem with a cache to the decoding kernel's arguments, its launch, and the sum of its parts."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED, KVCacheProblem
from sigattn.ops.triton import fitting, kernel_args, tuning
from sigattn.ops.triton.decode import decode_kernel
from sigattn.ops.triton.kernel_args import LOG2E, limit_strides, named, precision, scales, sigmoid_form, to_float32

_MOST_SPLITS = 128
_MOST_PROGRAMS = 65535  # of a grid's second dimension
_INTERPRETED_PROCESSORS = 4  # so that the interpreter has parts to add as well


def forward(problem: KVCacheProblem) -> Tensor:  # (B, N, Hq, Dv)
    """The output."""
    p = problem._replace(query=limit_strides(problem.query))
    (batch, n, heads, d), (kv_heads, dv) = p.query.shape, p.value.shape[2:]
    out = p.query.new_empty(batch, n, heads, dv)
    if not out.numel():
        return out
    group = heads // kv_heads
    kind = (p.query.dtype, d, dv, group, p.block_table is None, None if p.attn_mask is None else p.attn_mask.dtype)
    config = tuning.decode_config(max(d, dv), p.query.element_size(), n * group)
    if architecture := kernel_args.architecture(p.query.device):
        mask = 0 if p.attn_mask is None else p.attn_mask.element_size()
        operands = fitting.Operands(
            tuning.padded_head_dim(d), tuning.padded_head_dim(dv), p.query.element_size(), mask, False
        )
        config = fitting.fit(tuning.DECODE, config, operands, architecture)
    return fitting.launch_fitting(
        decode_kernel.__name__, lambda: (p.query.device, *kind), config, lambda c: _run(p, out, c)
    )


def _run(p: KVCacheProblem, out: Tensor, config: tuning.Config) -> Tensor:
    """Launch the kernel and return the output, which is ``out`` unless the keys were split."""
    batch, n, heads, _ = p.query.shape
    kv_heads = p.value.shape[2]
    programs = batch * kv_heads * -(-n * (heads // kv_heads) // config.block_m)
    splits = min(p.num_splits or _splits(p, programs), _MOST_PROGRAMS, max(1, -(-_keys(p) // config.block_n)))
    parts = out.new_empty(splits, *out.shape, dtype=torch.float32) if splits > 1 else out.unsqueeze(0)
    device = p.query.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        decode_kernel[(programs, splits)](
            **arguments(p),
            out=parts,
            **named("o", "sbnhd", parts.stride()),
            splits=splits,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return parts.sum(0).to(out.dtype) if splits > 1 else out


def _keys(p: KVCacheProblem) -> int:
    """Return the most keys that a query may see. Lengths are not read, because that would synchronise with the GPU."""
    return p.capacity if p.left == UNLIMITED else min(p.capacity, p.left + p.query.shape[1])


def _splits(p: KVCacheProblem, programs: int) -> int:
    """Return into how many parts keys are cut so that every multiprocessor has two programs."""
    processors = _INTERPRETED_PROCESSORS
    if p.query.device.type == "cuda":
        processors = torch.cuda.get_device_properties(p.query.device).multi_processor_count
    return max(1, min(2 * processors // programs, _MOST_SPLITS))


def arguments(p: KVCacheProblem) -> dict[str, Any]:
    """Everything but the output and the tile shapes."""
    (n, heads, d), (pages, page, kv_heads, dv) = p.query.shape[1:], p.value.shape
    return {
        "query": p.query,
        "key": p.key,
        "value": p.value,
        "lengths": p.seqlens,
        "ends": p.seqlens if p.query_ends is None else p.query_ends,
        "first": p.seqlens if p.left_padding is None else p.left_padding,
        "table": p.seqlens if p.block_table is None else p.block_table,
        **named("q", "bnhd", p.query.stride()),
        **named("k", "pnhd", p.key.stride()),
        **named("v", "pnhd", p.value.stride()),
        "table_b": 0 if p.block_table is None else p.block_table.stride(0),
        "n": n,
        "kv_heads": kv_heads,
        "pages": pages,
        "page_size": page,
        "table_width": 1 if p.block_table is None else p.block_table.shape[1],
        "left": p.left,
        "right": p.right,
        **scales(p),
        "GROUP": heads // kv_heads,
        "D": d,
        "DV": dv,
        "BLOCK_D": tuning.padded_head_dim(d),
        "BLOCK_DV": tuning.padded_head_dim(dv),
        "FIRST": p.left_padding is not None,
        "ENDS": p.query_ends is not None,
        "TABLE": p.block_table is not None,
        "HAS_LEFT": p.left != UNLIMITED,
        "HAS_RIGHT": p.right != UNLIMITED,
        "SIGMOID": sigmoid_form(p),
        "PRECISION": precision(p.query),
        "UNIT": kernel_args.unit(p.query, p.key, p.value),
        "WGMMA": kernel_args.architecture(p.query.device) == 90,
        **_bias(p),
        **_slopes(p),
        **_mask(p),
    }


def _bias(p: KVCacheProblem) -> dict[str, Any]:
    """Return the arguments of the bias, and of the power of two that float16 weights need for it (activation.py)."""
    batch, n, heads, _ = p.query.shape
    half = p.query.dtype is torch.float16
    kind, tensor, pointer, number, shift = "number", p.query, p.query, 0.0, 0.0
    strides: tuple[int, ...] = (0, 0, 0)
    if not p.bias.dim():
        number = p.bias.item()
        shift = float(min(max(math.floor(-number * LOG2E), 0), 15)) if half and math.isfinite(number) else 0.0
    elif p.bias.numel() == 1:
        kind, tensor = "scalar", p.bias.to(p.query.device)
        pointer = tensor
    else:
        kind, tensor = "tensor", p.bias.to(p.query.device)
        strides = tensor.expand(batch, heads, n).stride()
        if half:
            pointer = (tensor.amax().float() * -LOG2E).floor().nan_to_num(0.0).clamp(0, 15)
    return {
        "bias": tensor,
        "bias_value": to_float32(-number * LOG2E),
        "BIAS": kind,
        **named("bias", "bhn", strides),
        "shift_pointer": pointer,
        "shift_value": shift,
        "SHIFT": kind if half else "none",
    }


def _mask(p: KVCacheProblem) -> dict[str, Any]:
    mask = p.attn_mask
    if mask is None:
        return {"mask": p.query, "MASK": "none", "mask_keys": 0, **named("mask", "bhnm", (0, 0, 0, 0))}
    (batch, n, heads, _), keys = p.query.shape, mask.shape[3]
    is_bool = mask.dtype is torch.bool
    return {
        "mask": mask.view(torch.uint8) if is_bool else mask,
        "MASK": "bool" if is_bool else "added",
        "mask_keys": keys,
        **named("mask", "bhnm", mask.expand(batch, heads, n, keys).stride()),
    }


def _slopes(p: KVCacheProblem) -> dict[str, Any]:
    if p.alibi_slopes is None:
        return {"slopes": p.query, "SLOPES": False, **named("slopes", "bhs", (0, 0, 0))}
    strides = p.alibi_slopes.expand(p.query.shape[0], p.query.shape[2], 2).stride()
    return {"slopes": p.alibi_slopes, "SLOPES": True, **named("slopes", "bhs", strides)}
