"""Launches of the Hopper kernels: which problems they support, and their arguments."""

import math
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED, scale_of
from sigattn.ops.triton import kernel_args, launch_cache, tuning
from sigattn.ops.triton.kernel_args import IN_ROWS, Launch

WIDTHS = {tuning.FWD: 128, tuning.FWD_64: 64, tuning.DKDV: 128, tuning.DQ: 128, tuning.FUSED: 64}  # of the tiles
ROWS = 64  # queries or keys of a group of warps
# with rows of their own
WARP_GROUPS = {tuning.FWD: 3, tuning.FWD_64: 4, tuning.DKDV: 2, tuning.DQ: 2, tuning.FUSED: 2}
HELD = {  # tensors of which a group holds a tile, in which its results may be stored; tiles of the others are walked
    tuning.FWD: ("query", "out"),
    tuning.FWD_64: ("query", "out"),
    tuning.DKDV: ("key", "value", "grad_key", "grad_value"),
    tuning.DQ: ("query", "grad_out", "grad_query"),
    tuning.FUSED: ("key", "value", "grad_key", "grad_value"),
}
_MANY_TURNS = 16
_CACHE = 32 << 20  # bytes of K and V, or Q and dO, that the cache of 50 MB holds while they are walked


def supports(prepared: Launch, name: str, grad_out: Tensor | None = None) -> bool:
    """Return True if a kernel supports a problem: on Hopper, 16 bits, full or causal, one b for each head.

    Heads fill more than half of the tiles' width. TMA must be able to load the tensors; float16 has neither a tensor as
    bias nor the fast form of σ.
    """
    p, o = prepared.problem, prepared.options
    has_options = o.SLOPES or o.LENGTHS or o.VARLEN or o.DROPOUT or o.BLOCK_Q > 0
    has_options |= o.MASK != "none" or o.SOFTCAP != "none"
    is_windowed = p.left != UNLIMITED or p.right not in (UNLIMITED, 0) or prepared.arguments["query_offset"] < 0
    has_size = prepared.n > 0 < prepared.m and WIDTHS[name] // 2 < o.D == o.DV <= WIDTHS[name]
    has_bias = {
        torch.bfloat16: o.BIAS == "number" or not prepared.arguments["bias"].row_stride,
        torch.float16: o.BIAS == "number" and o.SIGMOID != "fast",
    }
    # only these were measured
    if name == tuning.FWD_64 and (o.NORMALIZE or o.SIGMOID != "accurate" or p.query.dtype is not torch.bfloat16):
        return False
    if not (o.WGMMA and has_size and has_bias.get(p.query.dtype, False)) or has_options or is_windowed:
        return False
    return all(kernel_args.fits_tma(t) for t in (p.query, p.key, p.value, grad_out) if t is not None)


def descriptor(t: Tensor, rows: int, width: int) -> Any:
    """Return a TMA descriptor of (B, H, N, D), in tiles of some rows of one head."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * t.element_size(), rank=4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, width], layout)


def _tiles(prepared: Launch, name: str) -> tuple[int, int]:
    """Return the tiles of a head, and the heads of all samples."""
    s = prepared
    heads, rows = (s.kv_heads, s.m) if name in (tuning.DKDV, tuning.FUSED) else (s.heads, s.n)
    return -(-rows // (ROWS * WARP_GROUPS[name])), s.batch * heads


def is_worthwhile(prepared: Launch, name: str) -> bool:
    """Return True if there are as many keys as the configuration demands, and tiles for most multiprocessors."""
    config, turns = tuning.HOPPER_CONFIGS[name], 0.0
    if config.min_fill:
        turns = math.prod(_tiles(prepared, name)) / multiprocessors(prepared.problem.query.device)
    if prepared.problem.right == 0:  # tiles of different length are balanced if there are two for each
        return prepared.m >= config.min_causal_keys and turns >= 2 * config.min_fill
    return prepared.m >= config.min_keys and turns >= config.min_fill * math.ceil(turns)


def _schedule(prepared: Launch, name: str) -> tuple[int, int, int]:
    """Return the heads of all samples, the programs, and the heads of a section (``common.head_and_tile``)."""
    p, s = prepared.problem, prepared
    row_tiles, batch_heads = _tiles(prepared, name)
    programs = tiles = row_tiles * batch_heads
    processors = multiprocessors(p.query.device)
    is_causal = p.right == 0
    is_persistent = not is_causal or s.m <= tuning.HOPPER_CONFIGS[name].persistent_keys
    # Persistent programs of the fused kernel, whose dQ needs the cache too, go head by head (1.5 ms; sections of 4
    # heads 1.6, of 8 2.4; handed out 1.6), which balances long and short tiles only over many turns.
    is_by_head = is_causal and name == tuning.FUSED
    if is_by_head and tiles < _MANY_TURNS * processors:
        is_persistent = False
    if is_persistent:
        programs = min(tiles, processors)
    if not is_causal or (is_persistent and is_by_head):
        return batch_heads, programs, 1
    group = prepared.options.GROUP
    walks_queries = name in (tuning.DKDV, tuning.FUSED)
    entries = s.n * group if walks_queries else s.m / group  # that a head walks, of two tensors
    section = max(1, int(_CACHE / (entries * prepared.options.D * 2 * p.query.element_size())))
    in_two_turns = max(1, 2 * programs // row_tiles)  # of which the second balances the first
    if section > in_two_turns:
        section -= section % in_two_turns
    return batch_heads, programs, section


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a GPU runs at a time: each takes the registers of a whole multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def run(prepared: Launch, name: str, **own: Any) -> None:
    """Launch a kernel, by its name in the tables. own: its results, and other arguments of its own.

    In float16, weights and dS are multiplied by powers of two as in triton/activation.py and triton/scores.py.
    """
    from sigattn.ops.hopper import backward, backward_fused, common, forward

    kernel = {
        tuning.FWD: forward.hopper_fwd_kernel,
        tuning.FWD_64: forward.hopper_fwd_kernel,
        tuning.DKDV: backward.hopper_bwd_dkdv_kernel,
        tuning.DQ: backward.hopper_bwd_dq_kernel,
        tuning.FUSED: backward_fused.hopper_bwd_fused_kernel,
    }[name]
    config, o = tuning.HOPPER_CONFIGS[name], prepared.options
    arguments = {key: prepared.arguments[key] for key in kernel.arg_names if key in prepared.arguments} | own
    for key in (key for key in IN_ROWS if key in arguments):
        arguments[key] = descriptor(arguments[key], ROWS if key in HELD[name] else config.block, WIDTHS[name])
    bias = arguments["bias"]
    grad_shift, unit = min(bias.shift, 7.0), math.ldexp(1.0, -int(bias.shift))
    batch_heads, programs, section = _schedule(prepared, name)
    arguments |= {
        "bias": bias.pointer, "batch_heads": batch_heads, "section": section,
        "scales": common.Scales(
            z=arguments["scales"].z, bias=bias.value, unit=unit, lower=2.0 ** (grad_shift - bias.shift),
            out=1.0 if o.NORMALIZE and name == tuning.FWD else unit,
            logit=scale_of(prepared.problem) * 2.0**-grad_shift, lift=bias.shift * math.log(2),
        ),
        "OPT": common.HopperOptions(
            WIDTHS[name], config.block, config.stages, o.GROUP, CAUSAL=prepared.problem.right == 0,
            SIGMOID=config.sigmoid if o.SIGMOID == "accurate" else o.SIGMOID, SHIFTED=o.SHIFT != "none",
            NORMALIZE=o.NORMALIZE, BIAS="number" if o.BIAS == "number" else "tensor", WARP_GROUPS=WARP_GROUPS[name],
        ),
    }  # fmt: skip
    launch_cache.launch(kernel, (programs,), prepared.problem.query.device, {"num_warps": 4}, arguments)


def run_fused(prepared: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV by the kernel that computes all of them, which adds to dQ in float32."""
    p = prepared.problem
    grad_query, grad_key, grad_value = (torch.empty_like(t) for t in (p.query, p.key, p.value))
    sums = torch.zeros_like(p.query, dtype=torch.float32)  # in the order of the result
    run(prepared, tuning.FUSED, grad_query=sums, grad_key=grad_key, grad_value=grad_value)
    torch.mul(sums, scale_of(p) * 2.0 ** -min(prepared.arguments["bias"].shift, 7.0), out=grad_query)
    return grad_query, grad_key, grad_value
