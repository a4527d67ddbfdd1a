"""From a problem to the Hopper kernels: which they serve, their descriptors, the launches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED, VarlenProblem
from sigattn.ops.triton import kernel_args, launch_cache, tma, tuning
from sigattn.ops.triton.kernel_args import Launch

REGISTERS = 240  # of a thread that computes, beside the 24 of one that copies: what a multiprocessor has for 384


def unavailable(prepared: Launch, grad_out: Tensor | None = None) -> str | None:
    """Why the kernels cannot serve a problem, or None."""
    p, s, o = prepared.problem, prepared.shape, prepared.options
    if kernel_args.architecture(p.query.device) != 90:
        return "they are for compute capability 9.0"
    if isinstance(p, VarlenProblem) or o.MASK != "none" or o.SLOPES or o.LENGTHS or o.DROPOUT:
        return "they take neither packed sequences nor masks, ALiBi, key lengths or dropout"
    if o.BIAS != "number" or p.left != UNLIMITED or p.right not in (UNLIMITED, 0):
        return "they take a number as bias, and no window but the causal"
    if o.SOFTCAP or o.BLOCK_Q:
        return "they have neither softcap nor the blocks of a mask"
    if (
        p.query.dtype not in (torch.float16, torch.bfloat16)
        or s.d != s.dv
        or s.d not in tuning.HOPPER_CONFIGS[tuning.FWD]
    ):
        return "they are for 16 bits and heads of 64 or 128, values included"
    if not (s.n and s.m) or p.query_offset < 0:
        return "there is nothing to do, or nothing to see"
    if p.query.dtype is torch.float16 and o.SIGMOID == "fast":
        return "their fast form has no powers of two for float16"
    if not all(tma.supports(t) for t in (p.query, p.key, p.value, grad_out) if t is not None):
        return "TMA requires dense rows, and strides of multiples of 16 bytes"
    return None


def swizzle(kernel: str, name: str, head_dim: int) -> int:
    """Bytes of a row over which a tile's parts change places: 128, or what leaves half of the columns in one piece."""
    return 2 * head_dim // 2 if kernel == tuning.FUSED and name in ("key", "value", "grad_key", "grad_value") else 128


def descriptor(t: Tensor, rows: int, swizzled: int = 128) -> Any:
    """A tensor (B, H, N, D) for the copy engine, in tiles of some rows of one head."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=16, rank=4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, t.shape[-1]], layout)


def scalars(prepared: Launch) -> dict[str, float]:
    """Numbers of all kernels. In float16, powers of two for weights and dS as in activation.py and tile.py."""
    bias = prepared.arguments["bias"]
    return {
        "z_scale": prepared.arguments["scales"].z,
        "z_bias": bias.value,
        "unit": math.ldexp(1.0, -int(bias.shift)),
        "shift": bias.shift,
        "own_shift": min(bias.shift, 7.0),
    }


def _shared(prepared: Launch, config: tuning.HopperConfig) -> dict[str, Any]:
    s, o, numbers = prepared.shape, prepared.options, scalars(prepared)
    return {
        **{name: numbers[name] for name in ("z_scale", "z_bias", "unit")},
        "n": s.n,
        "keys": s.m,
        "heads": s.heads,
        "query_offset": prepared.arguments["query_offset"],
        "GROUP": o.GROUP,
        "D": s.d,
        "STAGES": config.stages,
        "CAUSAL": prepared.problem.right == 0,
        "SHIFTED": o.SHIFT != "none",
        "SIGMOID": kernel_args.tuned_form(o.SIGMOID, config.sigmoid),
        "ROWS": 64,
        "REGISTERS": REGISTERS,
    }


def run(prepared: Launch, kernel: Any, programs: int, **arguments: Any) -> None:
    """Start a kernel."""
    device = prepared.problem.query.device
    prepared.launches.append(launch_cache.launch(kernel, (programs,), device, {"num_warps": 4}, arguments))


def multiprocessors(device: torch.device) -> int:
    """How many programs a GPU runs at a time: these take a whole multiprocessor's registers."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _grid(prepared: Launch, config: tuning.HopperConfig, of_keys: bool) -> dict[str, int]:
    """Programs: one for each 128 rows of each head, or no more than the GPU runs at a time."""
    s = prepared.shape
    rows, heads = (s.m, s.batch * s.kv_heads) if of_keys else (s.n, s.batch * s.heads)
    tiles = -(-rows // 128) * heads
    most = multiprocessors(prepared.problem.query.device) if config.persistent else tiles
    return {"programs": min(tiles, most), "batch_heads": heads}


def forward(prepared: Launch, out: Tensor) -> Tensor:  # (B, Hq, N, Dv)
    """Compute the output, into ``out``."""
    from sigattn.ops.hopper.forward import hopper_fwd_kernel

    p, config = prepared.problem, tuning.HOPPER_CONFIGS[tuning.FWD][prepared.shape.d]
    run(
        prepared,
        hopper_fwd_kernel,
        query=descriptor(p.query, 64),
        key=descriptor(p.key, config.block),
        value=descriptor(p.value, config.block),
        out=descriptor(out, 64),
        **_shared(prepared, config),
        **_grid(prepared, config, False),
        out_scale=scalars(prepared)["unit"],
        BLOCK_N=config.block,
        PREFETCH=config.prefetch,
    )
    return out


def _backward(prepared: Launch, grad_out: Tensor, kernel: str) -> dict[str, Any]:
    config, p, numbers = tuning.HOPPER_CONFIGS[kernel][prepared.shape.d], prepared.problem, scalars(prepared)
    own = {"query", "grad_out"} if kernel == tuning.DQ else {"key", "value"}
    tensors = {"query": p.query, "key": p.key, "value": p.value, "grad_out": grad_out}
    return {
        **{
            name: descriptor(t, 64 if name in own else config.block, swizzle(kernel, name, prepared.shape.d))
            for name, t in tensors.items()
        },
        **_shared(prepared, config),
        "lower": 2.0 ** (numbers["own_shift"] - numbers["shift"]),
        "logit_scale": p.scale_value * 2.0 ** -numbers["own_shift"],
        "BLOCK": config.block,
        **_grid(prepared, config, kernel != tuning.DQ),
    }


def keys(prepared: Launch, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of key and value, (B, Hkv, M, D)."""
    from sigattn.ops.hopper.backward import hopper_bwd_dkdv_kernel

    return _of_keys(prepared, grad_out, hopper_bwd_dkdv_kernel, tuning.DKDV)


def _of_keys(prepared: Launch, grad_out: Tensor, kernel: Any, name: str, **more: Any) -> tuple[Tensor, Tensor]:
    p, s = prepared.problem, prepared.shape
    grad_key, grad_value = torch.empty_like(p.key), torch.empty_like(p.value)
    run(
        prepared,
        kernel,
        **_backward(prepared, grad_out, name),
        grad_key=descriptor(grad_key, 64, swizzle(name, "grad_key", s.d)),
        grad_value=descriptor(grad_value, 64, swizzle(name, "grad_value", s.d)),
        out_scale=scalars(prepared)["unit"],
        **more,
    )
    return grad_key, grad_value


def fused(prepared: Launch, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; that of query is added in an order that differs from run to run."""
    from sigattn.ops.hopper.backward_fused import hopper_bwd_fused_kernel

    p, s = prepared.problem, prepared.shape
    block = tuning.HOPPER_CONFIGS[tuning.FUSED][s.d].block
    padded = -(-s.n // block) * block
    sums = torch.zeros(s.batch, s.heads, padded, s.d, dtype=torch.float32, device=p.query.device)
    grad_key, grad_value = _of_keys(prepared, grad_out, hopper_bwd_fused_kernel, tuning.FUSED, grad_query=sums)
    factor = p.scale_value * 2.0 ** -scalars(prepared)["own_shift"]
    grad_query = torch.empty_like(p.query)
    torch.mul(sums[:, :, : s.n], factor, out=grad_query)  # in one pass
    return grad_query, grad_key, grad_value


def queries(prepared: Launch, grad_out: Tensor) -> Tensor:
    """The gradient of query, (B, Hq, N, D)."""
    from sigattn.ops.hopper.backward import hopper_bwd_dq_kernel

    p = prepared.problem
    grad_query = torch.empty_like(p.query)
    run(
        prepared,
        hopper_bwd_dq_kernel,
        **_backward(prepared, grad_out, tuning.DQ),
        grad_query=descriptor(grad_query, 64),
    )
    return grad_query
