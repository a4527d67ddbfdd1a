"""Launches of the Hopper kernels: which problems they support, and their arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED
from sigattn.ops.triton import kernel_args, launch_cache, tuning
from sigattn.ops.triton.kernel_args import IN_ROWS, Launch

WIDTH = 128  # of the tiles
ROWS = 64  # queries or keys of a group of warps
WARP_GROUPS = {tuning.FWD: 3, tuning.DKDV: 2, tuning.DQ: 2}  # that compute
HELD = {  # tensors of which a group holds a tile, in which its results may be stored; tiles of the others are walked
    tuning.FWD: ("query", "out"),
    tuning.DKDV: ("key", "value", "grad_key", "grad_value"),
    tuning.DQ: ("query", "grad_out", "grad_query"),
}
_CACHE = 32 << 20  # bytes of K and V, or Q and dO, that the cache of 50 MB holds while they are walked


def supports(prepared: Launch, grad_out: Tensor | None = None) -> bool:
    """Return True for plain problems of 16 bits with heads of 65 to 128 on Hopper: full or causal, one b for each head.

    TMA must be able to load the tensors; float16 has neither a tensor as bias nor the fast form of σ.
    """
    p, o = prepared.problem, prepared.options
    has_options = o.SLOPES or o.LENGTHS or o.VARLEN or o.DROPOUT or o.BLOCK_Q > 0
    has_options |= o.MASK != "none" or o.SOFTCAP != "none"
    is_windowed = p.left != UNLIMITED or p.right not in (UNLIMITED, 0) or prepared.arguments["query_offset"] < 0
    has_size = prepared.n > 0 < prepared.m and 64 < o.D == o.DV <= WIDTH
    has_bias = {
        torch.bfloat16: o.BIAS == "number" or not prepared.arguments["bias"].row_stride,
        torch.float16: o.BIAS == "number" and o.SIGMOID != "fast",
    }
    if not (o.WGMMA and has_size and has_bias.get(p.query.dtype, False)) or has_options or is_windowed:
        return False
    return all(kernel_args.fits_tma(t) for t in (p.query, p.key, p.value, grad_out) if t is not None)


def descriptor(t: Tensor, rows: int) -> Any:
    """Return a TMA descriptor of (B, H, N, D), in tiles of some rows of one head, WIDTH wide."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, WIDTH], layout)


def _schedule(prepared: Launch, name: str) -> tuple[int, int, int]:
    """Return the heads of all samples, the programs, and the heads of a section (``common.head_and_tile``)."""
    p, s = prepared.problem, prepared
    heads, rows = (s.kv_heads, s.m) if name == tuning.DKDV else (s.heads, s.n)
    row_tiles = -(-rows // (ROWS * WARP_GROUPS[name]))
    programs = tiles = row_tiles * s.batch * heads
    is_causal = p.right == 0
    if not is_causal or s.m <= tuning.HOPPER_CONFIGS[name].persistent_keys:
        programs = min(tiles, multiprocessors(p.query.device))
    if not is_causal:
        return s.batch * heads, programs, 1
    group = prepared.options.GROUP
    entries = s.n * group if name == tuning.DKDV else s.m / group  # that a head walks, of two tensors
    section = max(1, int(_CACHE / (entries * prepared.options.D * 2 * p.query.element_size())))
    in_two_turns = max(1, 2 * programs // row_tiles)  # of which the second balances the first
    if section > in_two_turns:
        section -= section % in_two_turns
    return s.batch * heads, programs, section


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a GPU runs at a time: each takes the registers of a whole multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def run(prepared: Launch, name: str, **own: Any) -> None:
    """Launch a kernel, by its name in the tables. own: its results, and other arguments of its own.

    In float16, weights and dS are multiplied by powers of two as in triton/activation.py and triton/scores.py.
    """
    from sigattn.ops.hopper import backward, common, forward

    dkdv, dq = backward.hopper_bwd_dkdv_kernel, backward.hopper_bwd_dq_kernel
    kernel = {tuning.FWD: forward.hopper_fwd_kernel, tuning.DKDV: dkdv, tuning.DQ: dq}[name]
    config, o = tuning.HOPPER_CONFIGS[name], prepared.options
    arguments = {key: prepared.arguments[key] for key in kernel.arg_names if key in prepared.arguments} | own
    for key in (key for key in IN_ROWS if key in arguments):
        arguments[key] = descriptor(arguments[key], ROWS if key in HELD[name] else config.block)
    bias = arguments["bias"]
    grad_shift, unit = min(bias.shift, 7.0), math.ldexp(1.0, -int(bias.shift))
    batch_heads, programs, section = _schedule(prepared, name)
    arguments |= {
        "bias": bias.pointer, "batch_heads": batch_heads, "section": section,
        "scales": common.Scales(
            z=arguments["scales"].z, bias=bias.value, unit=unit, lower=2.0 ** (grad_shift - bias.shift),
            out=1.0 if o.NORMALIZE and name == tuning.FWD else unit,
            logit=prepared.problem.scale_value * 2.0**-grad_shift, lift=bias.shift * math.log(2),
        ),
        "OPT": common.HopperOptions(
            WIDTH, config.block, config.stages, o.GROUP, CAUSAL=prepared.problem.right == 0,
            SIGMOID=config.sigmoid if o.SIGMOID == "accurate" else o.SIGMOID, SHIFTED=o.SHIFT != "none",
            NORMALIZE=o.NORMALIZE, BIAS="number" if o.BIAS == "number" else "tensor", WARP_GROUPS=WARP_GROUPS[name],
        ),
    }  # fmt: skip
    launch_cache.launch(kernel, (programs,), prepared.problem.query.device, {"num_warps": 4}, arguments)
