"""Launches of the Hopper kernels: which problems they support, and their arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED
from sigattn.ops.triton import launch_cache, tma, tuning
from sigattn.ops.triton.kernel_args import Launch

WIDTH = 128  # of the tiles
ROWS = 64  # queries or keys of a group of warps
WARP_GROUPS = {tuning.FWD: 3, tuning.DKDV: 2, tuning.DQ: 2}  # that compute
_CACHE = 32 << 20  # bytes of K and V, or Q and dO, that the cache of 50 MB holds while they are walked


def supports(prepared: Launch, grad_out: Tensor | None = None) -> bool:
    """Return True for plain problems of 16 bits with heads of 65 to 128 on Hopper: full or causal, one b for each head.

    TMA must be able to load the tensors; float16 has neither a tensor as bias nor the fast form of σ.
    """
    p, o = prepared.problem, prepared.options
    has_options = o.MASK != "none" or o.SLOPES or o.LENGTHS or o.VARLEN or o.DROPOUT or o.SOFTCAP or o.BLOCK_Q > 0
    is_windowed = p.left != UNLIMITED or p.right not in (UNLIMITED, 0) or prepared.arguments["query_offset"] < 0
    has_size = prepared.n > 0 < prepared.m and 64 < o.D == o.DV <= WIDTH
    if not (o.WGMMA and has_size) or has_options or is_windowed:
        return False
    has_bias = o.BIAS == "number" or not prepared.arguments["bias"].row_stride
    if p.query.dtype is torch.float16:
        has_bias = o.BIAS == "number" and o.SIGMOID != "fast"
    elif p.query.dtype is not torch.bfloat16:
        return False
    return has_bias and all(tma.supports(t) for t in (p.query, p.key, p.value, grad_out) if t is not None)


def descriptor(t: Tensor, rows: int) -> Any:
    """Return a TMA descriptor of (B, H, N, D), in tiles of some rows of one head, WIDTH wide: 0 behind the last."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, WIDTH], layout)


def _schedule(prepared: Launch, kernel: str) -> tuple[int, int, int]:
    """Return the heads of all samples, the programs, and the heads of a section (``common.head_and_tile``)."""
    p, s = prepared.problem, prepared
    heads, rows = (s.kv_heads, s.m) if kernel == tuning.DKDV else (s.heads, s.n)
    row_tiles = -(-rows // (ROWS * WARP_GROUPS[kernel]))
    programs = tiles = row_tiles * s.batch * heads
    is_causal = p.right == 0
    if not is_causal or s.m <= tuning.HOPPER_CONFIGS[kernel].persistent_keys:
        programs = min(tiles, multiprocessors(p.query.device))
    if not is_causal:
        return s.batch * heads, programs, 1
    group = prepared.options.GROUP
    entries = s.n * group if kernel == tuning.DKDV else s.m / group  # that a head walks, of two tensors
    section = max(1, int(_CACHE / (entries * prepared.options.D * 2 * p.query.element_size())))
    in_two_turns = max(1, 2 * programs // row_tiles)  # of which the second balances the first
    if section > in_two_turns:
        section -= section % in_two_turns
    return s.batch * heads, programs, section


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a GPU runs at a time: each takes the registers of a whole multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def run(prepared: Launch, kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel."""
    device = prepared.problem.query.device
    launch_cache.launch(kernel, (programs,), device, {"num_warps": 4}, arguments)


def _launch(
    prepared: Launch,
    name: str,
    kernel: Any,
    held: dict[str, Tensor],
    walked: dict[str, Tensor],
    **arguments: Any,
) -> None:
    """Launch a kernel, with the tensors whose tiles it holds, those that it walks, and arguments of its own.

    In float16, weights and dS are multiplied by powers of two as in triton/activation.py and triton/scores.py.
    """
    from sigattn.ops.hopper.common import HopperOptions, Scales

    o, bias, shared = prepared.options, prepared.arguments["bias"], prepared.arguments
    config = tuning.HOPPER_CONFIGS[name]
    grad_shift = min(bias.shift, 7.0)
    unit, lower = math.ldexp(1.0, -int(bias.shift)), 2.0 ** (grad_shift - bias.shift)
    out = 1.0 if o.NORMALIZE and name == tuning.FWD else unit
    logit = prepared.problem.scale_value * 2.0**-grad_shift
    batch_heads, programs, section = _schedule(prepared, name)
    options = HopperOptions(
        WIDTH,
        config.block,
        config.stages,
        o.GROUP,
        CAUSAL=prepared.problem.right == 0,
        SIGMOID=config.sigmoid if o.SIGMOID == "accurate" else o.SIGMOID,
        SHIFTED=o.SHIFT != "none",
        NORMALIZE=o.NORMALIZE,
        BIAS="number" if o.BIAS == "number" else "tensor",
        WARP_GROUPS=WARP_GROUPS[name],
    )
    arguments |= {key: descriptor(t, ROWS) for key, t in held.items()}
    arguments |= {key: descriptor(t, config.block) for key, t in walked.items()}
    arguments |= {key: shared[key] for key in ("bias_b", "bias_h", "len_q", "len_k", "heads", "query_offset")}
    run(
        prepared,
        kernel,
        programs,
        bias=bias.pointer,
        batch_heads=batch_heads,
        section=section,
        scales=Scales(shared["scales"].z, bias.value, unit, lower, out, logit, bias.shift * math.log(2)),
        OPT=options,
        **arguments,
    )


def forward(prepared: Launch, out: Tensor, row_sums: Tensor | None) -> None:
    """Compute the output, (B, Hq, N, Dv), into ``out``, and with ``normalize`` the sums of the rows."""
    from sigattn.ops.hopper.forward import hopper_fwd_kernel

    p = prepared.problem
    held, walked = {"query": p.query, "out": out}, {"key": p.key, "value": p.value}
    _launch(prepared, tuning.FWD, hopper_fwd_kernel, held, walked, row_sums=row_sums)


def dkdv(prepared: Launch, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of key and value, (B, Hkv, M, D)."""
    from sigattn.ops.hopper.backward import hopper_bwd_dkdv_kernel

    p = prepared.problem
    grad_key, grad_value = torch.empty_like(p.key), torch.empty_like(p.value)
    held = {"key": p.key, "value": p.value, "grad_key": grad_key, "grad_value": grad_value}
    _launch(prepared, tuning.DKDV, hopper_bwd_dkdv_kernel, held, {"query": p.query, "grad_out": grad_out})
    return grad_key, grad_value


def dq(prepared: Launch, grad_out: Tensor) -> Tensor:
    """Return the gradient of query, (B, Hq, N, D)."""
    from sigattn.ops.hopper.backward import hopper_bwd_dq_kernel

    p = prepared.problem
    grad_query = torch.empty_like(p.query)
    held = {"query": p.query, "grad_out": grad_out, "grad_query": grad_query}
    terms = {name: prepared.arguments[name] for name in ("row_terms", "pitch")}
    _launch(prepared, tuning.DQ, hopper_bwd_dq_kernel, held, {"key": p.key, "value": p.value}, **terms)
    return grad_query
