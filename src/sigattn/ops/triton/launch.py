"""Forward and backward pass by the kernels: which of them a problem needs, their outputs, and sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from sigattn.ops.gradients import Gradients, NeedsGrad, Result, without_saved
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.problem import Problem, VarlenProblem, new_output, new_row_sums
from sigattn.ops.triton import fitting, kernel_args, launch_cache, tma, tuning
from sigattn.ops.triton.backward import bwd_dkdv_kernel, bwd_dq_kernel
from sigattn.ops.triton.forward import fwd_kernel
from sigattn.ops.triton.kernel_args import Launch, limit_strides, strides, to_float32
from sigattn.ops.triton.tuning import Config

# Tensors whose rows the kernels read or write tile by tile.
_IN_ROWS = ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value")
# Tiles of ``bwd_dkdv_kernel`` are (keys, queries). A copy of attn_mask in that order, made if it has at most this many
# entries per weight, saves 1.1 of 6.2 ms (H100, float mask, n = 4,096, B = 4, 32 heads of 64).
_LARGEST_COPY = 1 / 8
_FourGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _run(kernel: Any, launch: Launch, name: str, programs: Callable[[Config], int], **arguments: Any) -> None:
    """Launch a portable kernel, by its name in the tables. arguments: of this kernel; upper-case names are options."""
    arguments = {**launch.arguments, **arguments}
    options = launch.options._replace(**{name: arguments.pop(name) for name in list(arguments) if name.isupper()})
    tensors = [x for x in (arguments.get(key) for key in _IN_ROWS) if x is not None]
    unit = kernel_args.unit(*(t for t in tensors if t.dtype is launch.problem.query.dtype))

    def run(config: Config) -> None:
        tiled_options = options._replace(
            SIGMOID=config.sigmoid if options.SIGMOID == "accurate" else options.SIGMOID,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            UNIT=unit,
        )
        described = tma.describe(arguments, tiled_options) if config.tma else None
        all_arguments = {**arguments, **(described or {}), "OPT": tiled_options._replace(TMA=described is not None)}
        settings = kernel_args.compiler_settings(name, config, tiled_options)
        launch_cache.launch(kernel, (programs(config),), launch.problem.query.device, settings, all_arguments)

    uses_tma = launch.may_use_tma and tma.is_available(arguments, options)
    config = launch.config(name, mask_gradient=options.NEED_MASK != "none", tma=uses_tma)
    if programs(config):
        mask = launch.problem.attn_mask
        kind = (launch.problem.query.device, options, launch.problem.query.dtype, None if mask is None else mask.dtype)
        fitting.launch_fitting(kernel.__name__, kind, config, run)


def forward(problem: Problem | VarlenProblem) -> Result:
    """Return the output, (B, Hq, N, Dv), or packed (T, Hq, Dv), where rows that belong to no sequence are 0."""
    launch = kernel_args.prepare(problem)
    p, o = launch.problem, launch.options
    out = p.query.new_zeros(*p.query.shape[:2], o.DV) if o.VARLEN else new_output(p.query, o.DV)
    result = Result(out, out.new_empty(0), new_row_sums(p.query)) if p.normalize else without_saved(out)
    row_sums = result.row_sums if p.normalize else None
    if row_sums is not None and o.VARLEN:
        row_sums.zero_()  # rows of no sequence have no program
    if not out.numel():
        return result
    on_hopper = _use_hopper(launch, tuning.FWD)
    if on_hopper:
        launch_hopper.forward(launch, out, row_sums)
    if p.normalize or not on_hopper:
        _run(
            fwd_kernel,
            launch,
            tuning.FWD,
            lambda config: triton.cdiv(launch.n, config.block_m) * launch.batch * launch.heads,
            out=out,
            row_sums=row_sums,
            o_strides=strides(out),
            REPAIR=on_hopper,
        )
    return result


def backward(problem: Problem | VarlenProblem, grad_out: Tensor, needs_grad: NeedsGrad, *result: Tensor) -> Gradients:
    """Return the gradients that are needed. result: that of the forward pass, if the problem normalises."""
    launch = kernel_args.prepare(problem)
    p, grad_out = launch.problem, limit_strides(grad_out)
    launch.arguments |= {
        "grad_out": grad_out,
        "o_strides": strides(grad_out),
        "scales": launch.arguments["scales"]._replace(logit=to_float32(p.scale_value * p.keep_scale)),
        "row_terms": None,
        "pitch": 0,
    }
    forward_results = dict.fromkeys(("out", "out_strides", "row_sums"))
    if result:  # the kernel for dQ writes what that for dK and dV needs of each row
        out, row_sums = limit_strides(result[0]), result[2].contiguous()
        forward_results = {"out": out, "out_strides": strides(out), "row_sums": row_sums}
        packed = isinstance(p, VarlenProblem)
        pitch = p.query.shape[0] if packed else launch.n
        terms = row_sums.new_empty(launch.heads if packed else launch.batch * launch.heads, pitch, 4)
        launch.arguments |= {"row_terms": terms, "pitch": pitch}
    sums = needs_grad.bias or needs_grad.attn_mask or needs_grad.alibi_slopes
    if needs_grad.query and not sums and _use_hopper(launch, tuning.DQ, grad_out):
        if p.normalize:
            _dq(launch, NeedsGrad(False, False, False), forward_results)
        of_queries: _FourGradients = launch_hopper.dq(launch, grad_out), None, None, None
    else:
        of_queries = _dq(launch, needs_grad, forward_results)
    if needs_grad.key and needs_grad.value and _use_hopper(launch, tuning.DKDV, grad_out):
        of_keys: tuple[Tensor | None, Tensor | None] = launch_hopper.dkdv(launch, grad_out)
    else:
        of_keys = _dkdv(launch, needs_grad)
    return Gradients(of_queries[0], *of_keys, *of_queries[1:])


def _use_hopper(launch: Launch, kernel: str, grad_out: Tensor | None = None) -> bool:
    """Return True if a kernel of ``ops.hopper`` is in use and supports the problem."""
    if kernel == tuning.DKDV and launch.problem.normalize:  # numbers of each row: too few registers for them in Gluon
        return False
    return kernel in tuning.HOPPER_CONFIGS and launch.may_use_tma and launch_hopper.supports(launch, grad_out)


def _dkdv(launch: Launch, needs_grad: NeedsGrad) -> tuple[Tensor | None, Tensor | None]:
    """Return dK and dV."""
    p, o = launch.problem, launch.options
    new = torch.zeros_like if o.VARLEN or o.LENGTHS else torch.empty_like  # keys of no sequence have gradient 0
    key, value = new(p.key) if needs_grad.key else None, new(p.value) if needs_grad.value else None
    if key is None and value is None:
        return None, None
    mask_arguments: dict[str, Any] = {}
    mask, size = p.attn_mask, (launch.batch, launch.heads, launch.n, launch.m)
    if mask is not None and o.MASK_ORDER == "queries, keys" and mask.numel() <= _LARGEST_COPY * math.prod(size):
        mask_arguments["mask"] = kernel_args.mask_arg(mask.mT.contiguous().mT, *size)
        mask_arguments["MASK_ORDER"] = "keys, queries"
    parts = [(key, value)]
    if launch.config(tuning.DKDV).split_dkdv and key is not None and value is not None:
        parts = [(key, None), (None, value)]
    for k, v in parts:
        _run(
            bwd_dkdv_kernel,
            launch,
            tuning.DKDV,
            lambda config: triton.cdiv(launch.m, config.block_n) * launch.batch * launch.kv_heads,
            grad_key=k,
            grad_value=v,
            gk_strides=None if k is None else strides(k),
            gv_strides=None if v is None else strides(v),
            **mask_arguments,
        )
    return key, value


def _dq(launch: Launch, needs_grad: NeedsGrad, forward_results: dict[str, Any]) -> _FourGradients:
    """Return dQ and the gradients of bias, mask and slopes. forward_results: not None with ``normalize``."""
    p, packed = launch.problem, launch.options.VARLEN
    sums = needs_grad.bias or needs_grad.attn_mask or needs_grad.alibi_slopes
    if not (needs_grad.query or sums or p.normalize):
        return None, None, None, None
    new, new_sums = torch.empty_like, p.query.new_empty
    rows: tuple[int, ...] = (launch.batch, launch.n, launch.heads)
    if packed:  # rows that belong to no sequence have 0
        new, new_sums, rows = torch.zeros_like, p.query.new_zeros, (len(p.query), launch.heads)
    query = new(p.query) if needs_grad.query else None
    bias = new_sums(*rows, dtype=torch.float32) if needs_grad.bias else None
    slopes = new_sums(*rows, 2, dtype=torch.float32) if needs_grad.alibi_slopes else None
    mask, mask_arguments = _mask_gradient(launch, needs_grad)
    _run(
        bwd_dq_kernel,
        launch,
        tuning.DQ,
        lambda config: triton.cdiv(launch.n, config.block_m) * launch.batch * launch.heads,
        grad_query=query,
        grad_bias=bias,
        grad_slopes=slopes,
        gq_strides=None if query is None else strides(query),
        **forward_results,
        **mask_arguments,
    )
    return (
        query,
        None if bias is None or p.bias is None else _summed(launch, bias, p.bias),
        None if mask is None or p.attn_mask is None else _like(mask, p.attn_mask),
        None if slopes is None or p.alibi_slopes is None else _summed(launch, slopes, p.alibi_slopes),
    )


def _summed(launch: Launch, per_row: Tensor, like: Tensor) -> Tensor:
    """Sum values per row, (B, N, Hq), (B, N, Hq, 2) or packed, to the gradient of a bias or of slopes."""
    p = launch.problem
    if isinstance(p, VarlenProblem):
        per_row = p.sum_rows(per_row)  # (T, Hq, …) → (B, Hq, …)
        per_row = per_row if per_row.dim() == 3 else per_row[..., None, None]
    elif per_row.dim() == 4:
        per_row = per_row.sum(1)
    else:
        per_row = per_row.transpose(1, 2).unsqueeze(3)  # (B, Hq, N, 1)
    return _like(per_row, like) if like.dim() else per_row.sum().to(like.device, like.dtype)


def _like(full: Tensor, like: Tensor) -> Tensor:
    return full.sum_to_size(like.shape).to(like.dtype).contiguous()


def _mask_gradient(launch: Launch, needs_grad: NeedsGrad) -> tuple[Tensor | None, dict[str, Any]]:
    """Return memory for the mask's gradient, a matrix for each head if results must repeat bitwise, and arguments."""
    p = launch.problem
    if not needs_grad.attn_mask or p.attn_mask is None:
        return None, {"grad_mask": None}
    full = (launch.batch, launch.heads, launch.n, launch.m)
    size = full if p.deterministic else tuple(p.attn_mask.shape)
    grad = torch.zeros(size, dtype=torch.float32, device=p.query.device)
    return grad, {
        "grad_mask": kernel_args.mask_arg(grad, *full),
        "NEED_MASK": "stored" if size == full else "added",
        "SUM_ROWS": size[2] == 1 and launch.n > 1,
        "SUM_COLUMNS": size[3] == 1 and launch.m > 1,
    }
