"""Compilation of the Hopper kernels, for ``python -m benchmarks static`` and the tests."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from benchmarks import machine_code
from benchmarks.compiled_kernel import CompiledKernel, summarize
from sigattn.ops.hopper.launch import HELD, ROWS, WARP_GROUPS, WIDTHS
from sigattn.ops.triton import tuning
from sigattn.ops.triton.kernel_args import IN_ROWS


def compile_all() -> list[CompiledKernel]:
    """Compile every kernel of the tables, full and causal."""
    return [
        compile_kernel(kernel, causal, config, normalize)
        for kernel, config in tuning.HOPPER_CONFIGS.items()
        for causal, normalize in ((False, False), (True, False), (True, True))
        if not (normalize and kernel in (tuning.DKDV, tuning.FUSED, tuning.FWD_64))
    ]


def compile_kernel(kernel: str, causal: bool, config: tuning.HopperConfig, normalize: bool = False) -> CompiledKernel:
    """Compile one kernel as ``launch_hopper`` would start it, in bfloat16, and read its machine code.

    Raises:
        RuntimeError: if the tensor cores or TMA may read shared memory written by warps without a fence and a barrier
            in between.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    from sigattn.ops.hopper import backward, backward_fused, forward

    functions: dict[str, Any] = {
        tuning.FWD: forward.hopper_fwd_kernel,
        tuning.FWD_64: forward.hopper_fwd_kernel,
        tuning.DKDV: backward.hopper_bwd_dkdv_kernel,
        tuning.DQ: backward.hopper_bwd_dq_kernel,
        tuning.FUSED: backward_fused.hopper_bwd_fused_kernel,
    }
    signature, constants = _signature(functions[kernel], kernel, causal, config, normalize)
    source = GluonASTSource(functions[kernel], signature, constants)
    compiled, log = machine_code.compile_with_log(source, 90, {"num_warps": 4, "enable_fp_fusion": True})
    if line := missing_fence(compiled.asm["ptx"]):
        raise RuntimeError(f"{kernel}, {config}: no fence and barrier before {line}")
    scores = ROWS * config.block / 128  # of a thread of a group of four warps
    shape = (ROWS, config.block) if kernel in (tuning.FWD, tuning.FWD_64, tuning.DQ) else (config.block, ROWS)
    tile = tuning.Config(*shape, 4 + 4 * WARP_GROUPS[kernel], config.stages, config.sigmoid)
    name = f"{kernel}, Gluon" + (", normalize" if normalize else "")
    described = {"kernel": name, "dtype": "bfloat16", "head_dim": WIDTHS[kernel], "causal": causal}
    found = summarize(compiled, log, scores, 90, tile, **described)
    # tiles inside the border skip the branch of the loop that applies the mask: two instructions per score
    loops = [replace(x, all=x.all - x.selects, selects=0.0) for x in found.loops]
    return replace(found, loops=tuple(loops))


def _signature(
    function: Any, kernel: str, causal: bool, config: tuning.HopperConfig, normalize: bool
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any]]:
    from triton.experimental.gluon import language as gl

    from sigattn.ops.hopper.common import HopperOptions, Scales

    options = HopperOptions(
        WIDTHS[kernel],
        config.block,
        config.stages,
        CAUSAL=causal,
        SIGMOID=config.sigmoid,
        NORMALIZE=normalize,
        WARP_GROUPS=WARP_GROUPS[kernel],
    )
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    for at, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[(at,)] = "constexpr", options
        elif name in IN_ROWS:
            rows = ROWS if name in HELD[kernel] else config.block
            dtype, bits = ("fp32", 32) if kernel == tuning.FUSED and name == "grad_query" else ("bf16", 16)
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=4)
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows}, {WIDTHS[kernel]}],{layout!r}>"
        elif normalize and name in ("row_sums", "row_terms"):
            signature[name] = "*fp32"
        elif name in ("bias", "row_sums", "row_terms"):
            signature[name], constants[(at,)] = "constexpr", None
        else:
            signature[name] = Scales(*["fp32"] * 7) if name == "scales" else "i32"  # type: ignore[arg-type]
    return signature, constants


def missing_fence(ptx: str) -> str:
    """Return the first line that passes shared memory on before all warps that wrote it are done; "" if none does.

    Each warp must fence its own writes for the asynchronous units, then all must meet at a barrier, then one thread may
    signal.
    """
    fenced = synchronized = True
    for line in ptx.splitlines():
        if "stmatrix" in line:
            fenced = synchronized = False
        elif "fence.proxy.async" in line:
            fenced = True
        elif fenced and re.search(r"\b(bar|barrier)\.sync", line):
            synchronized = True
        elif not synchronized and re.search(r"mbarrier\.arrive|cp\.async\.bulk|wgmma\.mma_async", line):
            return line.strip()
    return ""
