"""Passes by the kernels: which of them a problem needs, their outputs, and sums over them."""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from sigattn.ops.dropout import keep_scale
from sigattn.ops.gradients import Gradients, NeedsGrad, Result, without_saved
from sigattn.ops.hopper import launch as launch_hopper
from sigattn.ops.normalization import add_parts
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, Problem, VarlenProblem, new_output, new_row_sums, scale_of
from sigattn.ops.triton import kernel_args, launch_cache, tuning
from sigattn.ops.triton.backward import bwd_dkdv_kernel, bwd_dq_kernel
from sigattn.ops.triton.decode import decode_kernel
from sigattn.ops.triton.forward import fwd_kernel
from sigattn.ops.triton.kernel_args import IN_ROWS, Launch, limit_strides, strides, to_float32
from sigattn.ops.triton.tuning import Config

_MAX_SPLITS = 128
_MAX_GRID_Y = 65535
_INTERPRETED_PROCESSORS = 4  # so that the interpreter splits keys as well
# Tiles of ``bwd_dkdv_kernel`` are (keys, queries). A copy of attn_mask in that order, made if it has at most this many
# entries per weight, saves 1.1 of 6.2 ms (H100, float mask, n = 4,096, B = 4, 32 heads of 64).
_LARGEST_COPY = 1 / 8


def _run(launch: Launch, name: str, **arguments: Any) -> None:
    """Launch a portable kernel, by its name in the tables. arguments: of this kernel; upper-case names are options."""
    kernel = {tuning.FWD: fwd_kernel, tuning.DKDV: bwd_dkdv_kernel, tuning.DQ: bwd_dq_kernel}[name]
    arguments = {**launch.arguments, **arguments}
    options = launch.options._replace(**{name: arguments.pop(name) for name in list(arguments) if name.isupper()})
    p, fits_tma = launch.problem, kernel_args.can_use_tma(arguments, options)
    tensors = {name: arguments[name] for name in IN_ROWS if name in arguments}
    arguments |= {f"{name}_strides": strides(t) for name, t in tensors.items()}
    unit = kernel_args.unit(*(t for t in tensors.values() if t is not None and t.dtype is p.query.dtype))

    def programs(config: Config) -> int:
        if name == tuning.DKDV:
            return triton.cdiv(launch.m, config.block_n) * launch.batch * launch.kv_heads
        return triton.cdiv(launch.n, config.block_m) * launch.batch * launch.heads

    def run(config: Config) -> None:
        tiled = options._replace(
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, UNIT=unit, TMA=config.tma and fits_tma,
            SIGMOID=config.sigmoid if options.SIGMOID == "accurate" else options.SIGMOID,
        )  # fmt: skip
        described = kernel_args.descriptors(arguments, tiled) if tiled.TMA else {}
        settings = kernel_args.compiler_settings(name, config, tiled)
        launch_cache.launch(
            kernel, (programs(config),), p.query.device, settings, {**arguments, **described, "OPT": tiled}
        )

    config = launch.config(name, options, fits_tma and launch.may_use_tma)
    if programs(config):
        tuning.launch_fitting(kernel.__name__, p, options, config, run)


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
    hopper_kernel = tuning.FWD if o.D > 64 else tuning.FWD_64
    on_hopper = _use_hopper(launch, hopper_kernel)
    if on_hopper:
        launch_hopper.run(launch, hopper_kernel, out=out, row_sums=row_sums)
    if p.normalize or not on_hopper:
        _run(launch, tuning.FWD, out=out, row_sums=row_sums, REPAIR=on_hopper)
    return result


def backward(problem: Problem | VarlenProblem, grad_out: Tensor, needs_grad: NeedsGrad, *result: Tensor) -> Gradients:
    """Return the gradients that are needed. result: that of the forward pass, if the problem normalises."""
    launch = kernel_args.prepare(problem)
    p, grad_out = launch.problem, limit_strides(grad_out)
    scales = launch.arguments["scales"]._replace(logit=to_float32(scale_of(p) * keep_scale(p.dropout_p)))
    launch.arguments |= {"grad_out": grad_out, "scales": scales, "row_terms": None, "pitch": 0}
    out = row_sums = None
    if result:  # the kernel for dQ writes what that for dK and dV needs of each row
        out, row_sums = limit_strides(result[0]), result[2].contiguous()
        packed = launch.options.VARLEN
        pitch = p.query.shape[0] if packed else launch.n
        terms = row_sums.new_empty(launch.heads if packed else launch.batch * launch.heads, pitch, 4)
        launch.arguments |= {"row_terms": terms, "pitch": pitch}
    sums = needs_grad.bias or needs_grad.attn_mask or needs_grad.alibi_slopes
    needs_all = needs_grad.query and needs_grad.key and needs_grad.value and not sums
    if needs_all and not (p.normalize or p.deterministic) and _use_hopper(launch, tuning.FUSED, grad_out):
        return Gradients(*launch_hopper.run_fused(launch), None, None, None)
    dq_on_hopper = needs_grad.query and not sums and _use_hopper(launch, tuning.DQ, grad_out)
    gradients = _dq(launch, needs_grad._replace(query=needs_grad.query and not dq_on_hopper), out, row_sums)
    if dq_on_hopper:
        gradients = gradients._replace(query=torch.empty_like(p.query))
        launch_hopper.run(launch, tuning.DQ, grad_query=gradients.query)
    key, value = _dkdv(launch, needs_grad)
    return gradients._replace(key=key, value=value)


def _use_hopper(launch: Launch, kernel: str, grad_out: Tensor | None = None) -> bool:
    """Return True if a kernel of ``ops.hopper`` is in use and supports the problem."""
    if kernel == tuning.DKDV and launch.problem.normalize:  # numbers of each row: too few registers for them in Gluon
        return False
    if kernel not in tuning.HOPPER_CONFIGS or not launch.may_use_tma:
        return False
    return launch_hopper.supports(launch, kernel, grad_out) and launch_hopper.is_worthwhile(launch, kernel)


def _dkdv(launch: Launch, needs_grad: NeedsGrad) -> tuple[Tensor | None, Tensor | None]:
    """Return dK and dV."""
    p, o = launch.problem, launch.options
    new = torch.zeros_like if o.VARLEN or o.LENGTHS else torch.empty_like  # keys of no sequence have gradient 0
    key, value = new(p.key) if needs_grad.key else None, new(p.value) if needs_grad.value else None
    if key is None and value is None:
        return None, None
    if key is not None and value is not None and _use_hopper(launch, tuning.DKDV, launch.arguments["grad_out"]):
        launch_hopper.run(launch, tuning.DKDV, grad_key=key, grad_value=value)
        return key, value
    mask_arguments: dict[str, Any] = {}
    mask, size = p.attn_mask, (launch.batch, launch.heads, launch.n, launch.m)
    if mask is not None and o.MASK_ORDER == "queries, keys" and mask.numel() <= _LARGEST_COPY * math.prod(size):
        mask_arguments["mask"] = kernel_args.mask_arg(mask.mT.contiguous().mT, *size)
        mask_arguments["MASK_ORDER"] = "keys, queries"
    parts = [(key, value)]
    if launch.config(tuning.DKDV, o).split_dkdv and key is not None and value is not None:
        parts = [(key, None), (None, value)]
    for k, v in parts:
        _run(launch, tuning.DKDV, grad_key=k, grad_value=v, **mask_arguments)
    return key, value


def _dq(launch: Launch, needs_grad: NeedsGrad, out: Tensor | None, row_sums: Tensor | None) -> Gradients:
    """Return the gradients of query, bias, mask and slopes. out, row_sums: not None with ``normalize``."""
    p = launch.problem
    query = bias = mask = slopes = None
    if needs_grad.query or needs_grad.bias or needs_grad.attn_mask or needs_grad.alibi_slopes or p.normalize:
        new, new_sums = torch.empty_like, p.query.new_empty
        rows: tuple[int, ...] = (launch.batch, launch.n, launch.heads)
        if launch.options.VARLEN:  # rows that belong to no sequence have 0
            new, new_sums, rows = torch.zeros_like, p.query.new_zeros, (len(p.query), launch.heads)
        query = new(p.query) if needs_grad.query else None
        bias = new_sums(*rows, dtype=torch.float32) if needs_grad.bias else None
        slopes = new_sums(*rows, 2, dtype=torch.float32) if needs_grad.alibi_slopes else None
        mask, mask_arguments = _mask_gradient(launch, needs_grad)
        results = {"grad_query": query, "grad_bias": bias, "grad_slopes": slopes}
        _run(launch, tuning.DQ, out=out, row_sums=row_sums, **results, **mask_arguments)
    bias = None if bias is None or p.bias is None else _summed(launch, bias, p.bias)
    mask = None if mask is None or p.attn_mask is None else _like(mask, p.attn_mask)
    slopes = None if slopes is None or p.alibi_slopes is None else _summed(launch, slopes, p.alibi_slopes)
    return Gradients(query, None, None, bias, mask, slopes)


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


# -- a cache of keys and values ---------------------------------------------------------------------------------------


def kvcache_forward(problem: KVCacheProblem) -> Result:
    """Return the output, (B, N, Hq, Dv), and with ``normalize`` the sums of rows."""
    p = problem._replace(query=limit_strides(problem.query))
    (batch, n, heads, d), (kv_heads, dv) = p.query.shape, p.value.shape[2:]
    out = p.query.new_empty(batch, n, heads, dv)
    if not out.numel():
        return without_saved(out)
    arguments, rows, itemsize = decode_arguments(p), n * (heads // kv_heads), p.query.element_size()
    options = arguments["OPT"]

    def run(config: Config) -> Result:
        programs = batch * kv_heads * triton.cdiv(rows, config.block_m)
        # The most keys that a query may see. Lengths are not read, because that would synchronise with the GPU.
        keys = p.capacity if p.left == UNLIMITED else min(p.capacity, p.left + n)
        splits = min(p.num_splits or _splits(p, programs), _MAX_GRID_Y, max(1, triton.cdiv(keys, config.block_n)))
        parts = out.new_empty(splits, *out.shape, dtype=torch.float32) if splits > 1 else out.unsqueeze(0)
        sums = out.new_empty(*parts.shape[:-1], 2, dtype=torch.float32) if p.normalize else None
        own = {
            "out": parts, "out_strides": strides(parts[0].transpose(1, 2)), "out_split": parts.stride(0),
            "row_sums": sums, "splits": splits, "OPT": options._replace(BLOCK_M=config.block_m, BLOCK_N=config.block_n),
        }  # fmt: skip
        settings = {"num_warps": config.warps, "num_stages": config.stages}
        launch_cache.launch(decode_kernel, (programs, splits), p.query.device, settings, arguments | own)
        if sums is None:
            return without_saved(parts.sum(0).to(out.dtype) if splits > 1 else out)
        nothing = out.new_empty(0)
        results = [Result(part, nothing, s) for part, s in zip(parts, sums, strict=True)]
        if splits == 1:
            return results[0]._replace(out=out)
        total = Result(out, nothing, torch.empty_like(sums[0]))
        add_parts(results, total)
        return total

    config = tuning.decode_config(max(d, dv), itemsize, rows)
    if architecture := kernel_args.architecture(p.query.device):
        mask_itemsize = 0 if p.attn_mask is None else p.attn_mask.element_size()
        config = tuning.fit(tuning.DECODE, config, options, itemsize, mask_itemsize, architecture)
    return tuning.launch_fitting(decode_kernel.__name__, p, options, config, run)


def _splits(p: KVCacheProblem, programs: int) -> int:
    """Return the number of parts of the keys that gives every multiprocessor two programs."""
    processors = _INTERPRETED_PROCESSORS
    if p.query.device.type == "cuda":
        processors = torch.cuda.get_device_properties(p.query.device).multi_processor_count
    return max(1, min(2 * processors // programs, _MAX_SPLITS))


def decode_arguments(p: KVCacheProblem) -> dict[str, Any]:
    """Return all arguments of the kernel but the output, and but the tile shape in its options."""
    (batch, n, heads, _), (pages, page_size, kv_heads, _) = p.query.shape, p.value.shape
    number_or_tensor = p.bias.to(p.query.device) if p.bias.dim() else p.bias
    bias, (bias_b, bias_h, bias_n), kind = kernel_args.bias_arg(number_or_tensor, p.query.dtype, batch, heads, n)
    table = p.block_table if p.block_table is None or p.block_table.stride(1) == 1 else p.block_table.contiguous()
    mask_keys = 0 if p.attn_mask is None else p.attn_mask.shape[3]
    integers = {name: getattr(p, name) for name in ("seqlens", "query_ends", "left_padding")}
    options = kernel_args.common_options(p, heads // kv_heads, kind)
    return kernel_args.common_arguments(p, batch, heads) | {
        **{f"{name}_strides": strides(getattr(p, name).transpose(1, 2)) for name in ("query", "key", "value")},
        **{name: None if t is None else t.contiguous() for name, t in integers.items()},
        "block_table": table, "table_b": 0 if table is None else table.stride(0),
        "table_width": 1 if table is None else table.shape[1],
        "bias": bias._replace(row_stride=0),  # for one kernel: bias_n is not specialised
        "bias_b": bias_b, "bias_h": bias_h, "bias_n": bias_n,
        "mask": kernel_args.mask_arg(p.attn_mask, batch, heads, n, mask_keys), "mask_keys": mask_keys,
        "n": n, "kv_heads": kv_heads, "pages": pages, "page_size": page_size,
        "OPT": options._replace(UNIT=kernel_args.unit(p.query, p.key, p.value)),
    }  # fmt: skip
