"""Launches of the Hopper kernels: which problems they support, and their arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED, VarlenProblem
from sigattn.ops.triton import kernel_args, launch_cache, tma, tuning
from sigattn.ops.triton.kernel_args import Launch

WIDTH = 128  # of the tiles
WARP_GROUPS = {tuning.FWD: 3, tuning.DKDV: 2, tuning.DQ: 2}  # that compute, with 64 queries or keys each
_CACHE = 32 << 20  # bytes of K and V, or Q and dO, that the cache of 50 MB holds while they are walked


def unavailable(prepared: Launch, grad_out: Tensor | None = None) -> str | None:
    """Return why the kernels do not support a problem, or None."""
    p, s, o = prepared.problem, prepared.shape, prepared.options
    if kernel_args.architecture(p.query.device) != 90:
        return "they require compute capability 9.0"
    if isinstance(p, VarlenProblem) or o.MASK != "none" or o.SLOPES or o.LENGTHS or o.DROPOUT:
        return "they do not support packed sequences, masks, ALiBi, key lengths or dropout"
    if p.left != UNLIMITED or p.right not in (UNLIMITED, 0):
        return "they support no window but the causal one"
    if o.BIAS != "number" and (prepared.arguments["bias"].row_stride or p.query.dtype is torch.float16):
        return "they require one bias for each head, and a number in float16"
    if o.SOFTCAP or o.BLOCK_Q:
        return "they do not support softcap or a BlockMask"
    is_half = p.query.dtype in (torch.float16, torch.bfloat16)
    if not is_half or s.d != s.dv or not 64 < s.d <= WIDTH:
        return "they require 16 bits and heads of 65 to 128 for queries, keys and values"
    if not (s.n and s.m) or p.query_offset < 0:
        return "they do not support problems without queries or keys, or negative query offsets"
    if p.query.dtype is torch.float16 and o.SIGMOID == "fast":
        return "they do not support the fast form of σ in float16"
    if not all(tma.supports(t) for t in (p.query, p.key, p.value, grad_out) if t is not None):
        return "TMA requires dense rows, and strides of multiples of 16 bytes"
    return None


def descriptor(t: Tensor, rows: int) -> Any:
    """Return a TMA descriptor of (B, H, N, D), in tiles of some rows of one head, WIDTH wide: 0 behind the last."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, WIDTH], layout)


def _schedule(prepared: Launch, kernel: str) -> tuple[int, int, int]:
    """Return the heads of a sample, the programs, and the heads of a section (``common.head_and_tile``)."""
    p, s = prepared.problem, prepared.shape
    heads, rows = (s.kv_heads, s.m) if kernel == tuning.DKDV else (s.heads, s.n)
    row_tiles = -(-rows // (64 * WARP_GROUPS[kernel]))
    programs = tiles = row_tiles * s.batch * heads
    is_causal = p.right == 0
    if not is_causal or s.m <= tuning.HOPPER_CONFIGS[kernel].persistent_keys:
        programs = min(tiles, multiprocessors(p.query.device))
    if not is_causal:
        return heads, programs, 1
    group = prepared.options.GROUP
    entries = s.n * group if kernel == tuning.DKDV else s.m / group  # that a head walks, of two tensors
    section = max(1, int(_CACHE / (entries * s.d * 2 * p.query.element_size())))
    in_two_turns = max(1, 2 * programs // row_tiles)  # of which the second balances the first
    if section > in_two_turns:
        section -= section % in_two_turns
    return heads, programs, section


def _shared(prepared: Launch, kernel: str, logit_scale: float = 0.0) -> dict[str, Any]:
    """Return arguments that all kernels have.

    A bias of "length" is not possible here: those problems have packed sequences or key lengths.
    In float16, weights and dS are multiplied by powers of two as in triton/activation.py and triton/tile.py.
    """
    from sigattn.ops.hopper.common import HopperOptions, Scales

    p, s, o, bias = prepared.problem, prepared.shape, prepared.options, prepared.arguments["bias"]
    config = tuning.HOPPER_CONFIGS[kernel]
    own_shift = min(bias.shift, 7.0)
    unit = math.ldexp(1.0, -int(bias.shift))
    lower, logit = 2.0 ** (own_shift - bias.shift), logit_scale * 2.0**-own_shift
    out = 1.0 if o.NORMALIZE and kernel == tuning.FWD else unit
    heads, programs, section = _schedule(prepared, kernel)
    return {
        "bias": None if o.BIAS == "number" else bias.pointer,
        "bias_b": prepared.arguments["bias_b"],
        "bias_h": prepared.arguments["bias_h"],
        "len_q": s.n,
        "len_k": s.m,
        "heads": s.heads,
        "batch_heads": s.batch * heads,
        "section": section,
        "query_offset": prepared.arguments["query_offset"],
        "scales": Scales(prepared.arguments["scales"].z, bias.value, unit, lower, out, logit, bias.shift * math.log(2)),
        "OPT": HopperOptions(
            WIDTH,
            config.block,
            config.stages,
            o.GROUP,
            CAUSAL=p.right == 0,
            SIGMOID=kernel_args.tuned_form(o.SIGMOID, config.sigmoid),
            SHIFTED=o.SHIFT != "none",
            NORMALIZE=o.NORMALIZE,
            BIAS="number" if o.BIAS == "number" else "tensor",
            WARP_GROUPS=WARP_GROUPS[kernel],
        ),
        "programs": programs,
    }


def run(prepared: Launch, kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel."""
    device = prepared.problem.query.device
    launch_cache.launch(kernel, (programs,), device, {"num_warps": 4}, arguments)


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a GPU runs at a time: each takes the registers of a whole multiprocessor."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def forward(prepared: Launch, out: Tensor, row_sums: Tensor | None) -> None:
    """Compute the output, (B, Hq, N, Dv), into ``out``, and with ``normalize`` the sums of the rows."""
    from sigattn.ops.hopper.forward import hopper_fwd_kernel

    p, block = prepared.problem, tuning.HOPPER_CONFIGS[tuning.FWD].block
    run(
        prepared,
        hopper_fwd_kernel,
        query=descriptor(p.query, 64),
        key=descriptor(p.key, block),
        value=descriptor(p.value, block),
        out=descriptor(out, 64),
        row_sums=row_sums,
        **_shared(prepared, tuning.FWD),
    )


def _backward(prepared: Launch, grad_out: Tensor, kernel: str) -> dict[str, Any]:
    """Return arguments that all backward kernels have."""
    p = prepared.problem
    loaded_once = {"query", "grad_out"} if kernel == tuning.DQ else {"key", "value"}
    tensors = {"query": p.query, "key": p.key, "value": p.value, "grad_out": grad_out}
    block = tuning.HOPPER_CONFIGS[kernel].block
    described = {name: descriptor(t, 64 if name in loaded_once else block) for name, t in tensors.items()}
    return {**described, **_shared(prepared, kernel, p.scale_value)}


def dkdv(prepared: Launch, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of key and value, (B, Hkv, M, D)."""
    from sigattn.ops.hopper.backward import hopper_bwd_dkdv_kernel

    p = prepared.problem
    grad_key, grad_value = torch.empty_like(p.key), torch.empty_like(p.value)
    run(
        prepared,
        hopper_bwd_dkdv_kernel,
        **_backward(prepared, grad_out, tuning.DKDV),
        grad_key=descriptor(grad_key, 64),
        grad_value=descriptor(grad_value, 64),
    )
    return grad_key, grad_value


def dq(prepared: Launch, grad_out: Tensor) -> Tensor:
    """Return the gradient of query, (B, Hq, N, D)."""
    from sigattn.ops.hopper.backward import hopper_bwd_dq_kernel

    p = prepared.problem
    grad_query = torch.empty_like(p.query)
    arguments = _backward(prepared, grad_out, tuning.DQ)
    arguments |= {name: prepared.arguments[name] for name in ("row_terms", "pitch")}
    run(prepared, hopper_bwd_dq_kernel, **arguments, grad_query=descriptor(grad_query, 64))
    return grad_query
