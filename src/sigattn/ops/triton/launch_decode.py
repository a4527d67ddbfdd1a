"""Attention of new queries to a cache: arguments of the decoding kernel, its launch, and the sum of its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.ops.gradients import Result, without_saved
from sigattn.ops.normalization import add_parts
from sigattn.ops.problem import UNLIMITED, KVCacheProblem
from sigattn.ops.triton import fitting, kernel_args, launch_cache, tuning
from sigattn.ops.triton.args import Strides
from sigattn.ops.triton.decode import decode_kernel

_MAX_SPLITS = 128
_MAX_GRID_Y = 65535
_INTERPRETED_PROCESSORS = 4  # so that the interpreter splits keys as well


def forward(problem: KVCacheProblem) -> Result:
    """Return the output, (B, N, Hq, Dv), and with ``normalize`` the sums of rows."""
    p = problem._replace(query=kernel_args.limit_strides(problem.query))
    (batch, n, heads, d), (kv_heads, dv) = p.query.shape, p.value.shape[2:]
    out = p.query.new_empty(batch, n, heads, dv)
    if not out.numel():
        return without_saved(out)
    call_arguments = arguments(p)
    config = tuning.decode_config(max(d, dv), p.query.element_size(), n * (heads // kv_heads))
    options, device = call_arguments["OPT"], p.query.device
    if architecture := kernel_args.architecture(device):
        operands = kernel_args.operand_sizes(options, p.query.element_size(), p.attn_mask)
        config = fitting.fit(tuning.DECODE, config, operands, architecture)
    kind = (device, options, p.query.dtype, None if p.attn_mask is None else p.attn_mask.dtype)
    return fitting.launch_fitting(decode_kernel.__name__, kind, config, lambda c: _run(p, call_arguments, out, c))


def _run(p: KVCacheProblem, call_arguments: dict[str, Any], out: Tensor, config: tuning.Config) -> Result:
    """Launch the kernel and return the result, whose output is ``out`` unless the keys were split."""
    batch, n, heads, _ = p.query.shape
    kv_heads = p.value.shape[2]
    programs = batch * kv_heads * -(-n * (heads // kv_heads) // config.block_m)
    # The most keys that a query may see. Lengths are not read, because that would synchronise with the GPU.
    keys = p.capacity if p.left == UNLIMITED else min(p.capacity, p.left + n)
    splits = min(p.num_splits or _splits(p, programs), _MAX_GRID_Y, max(1, -(-keys // config.block_n)))
    parts = out.new_empty(splits, *out.shape, dtype=torch.float32) if splits > 1 else out.unsqueeze(0)
    sums = out.new_empty(*parts.shape[:-1], 2, dtype=torch.float32) if p.normalize else None
    launch_arguments = {
        "out": parts,
        "row_sums": sums,
        "o_strides": _strides(parts[0]),
        "o_split": parts.stride(0),
        "splits": splits,
        "OPT": call_arguments["OPT"]._replace(BLOCK_M=config.block_m, BLOCK_N=config.block_n),
    }
    settings = {"num_warps": config.warps, "num_stages": config.stages}
    launch_cache.launch(decode_kernel, (programs, splits), p.query.device, settings, call_arguments | launch_arguments)
    if sums is None:
        return without_saved(parts.sum(0).to(out.dtype) if splits > 1 else out)
    nothing = out.new_empty(0)
    if splits == 1:
        return Result(out, nothing, sums[0])
    result = Result(out, nothing, torch.empty_like(sums[0]))
    add_parts([Result(part, nothing, s) for part, s in zip(parts, sums, strict=True)], result)
    return result


def _splits(p: KVCacheProblem, programs: int) -> int:
    """Return the number of parts of the keys that gives every multiprocessor two programs."""
    processors = _INTERPRETED_PROCESSORS
    if p.query.device.type == "cuda":
        processors = torch.cuda.get_device_properties(p.query.device).multi_processor_count
    return max(1, min(2 * processors // programs, _MAX_SPLITS))


def arguments(p: KVCacheProblem) -> dict[str, Any]:
    """Return all arguments of the kernel but the output, and but the tile shape in its options."""
    (batch, n, heads, _), (pages, page_size, kv_heads, _) = p.query.shape, p.value.shape
    number_or_tensor = p.bias.to(p.query.device) if p.bias.dim() else p.bias
    bias, bias_strides, bias_kind = kernel_args.bias_arg(number_or_tensor, p.query.dtype, batch, heads, n)
    table = p.block_table if p.block_table is None or p.block_table.stride(1) == 1 else p.block_table.contiguous()
    mask_keys = 0 if p.attn_mask is None else p.attn_mask.shape[3]
    options = kernel_args.common_options(p, heads // kv_heads, bias_kind)
    return kernel_args.common_arguments(p, _strides, batch, heads) | {
        "seqlens": p.seqlens.contiguous(),
        "query_ends": None if p.query_ends is None else p.query_ends.contiguous(),
        "left_padding": None if p.left_padding is None else p.left_padding.contiguous(),
        "block_table": table,
        "table_b": 0 if table is None else table.stride(0),
        "bias": bias._replace(row_stride=0),  # for one kernel: bias_n is not specialised
        "bias_b": bias_strides[0],
        "bias_h": bias_strides[1],
        "bias_n": bias_strides[2],
        "mask": kernel_args.mask_arg(p.attn_mask, batch, heads, n, mask_keys),
        "mask_keys": mask_keys,
        "n": n,
        "kv_heads": kv_heads,
        "pages": pages,
        "page_size": page_size,
        "table_width": 1 if table is None else table.shape[1],
        "OPT": options._replace(UNIT=kernel_args.unit(p.query, p.key, p.value)),
    }


def _strides(t: Tensor) -> Strides:
    """Return the strides of (B, N, H, D)."""
    b, n, h, d = t.stride()
    return Strides(b, h, n, d)
