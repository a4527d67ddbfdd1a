"""The launches: which kernels a problem needs, their outputs, and what is added up afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import Problem, VarlenProblem, new_output
from sigattn.ops.triton import fitting, kernel_args, launch_cache, tma, tuning
from sigattn.ops.triton.backward import bwd_dkdv_kernel, bwd_dq_kernel
from sigattn.ops.triton.forward import fwd_kernel
from sigattn.ops.triton.kernel_args import Launch, limit_strides, named, to_float32
from sigattn.ops.triton.tuning import Config

# Tensors whose rows the kernels read or write tile by tile.
_IN_ROWS = ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value")


def _run(kernel: Any, launch: Launch, name: str, tiles: Callable[[Config], int], **arguments: Any) -> None:
    """Launch one of the portable kernels.

    name: its name in the tables. tiles: the number of programs, given a configuration.
    """
    arguments = {**launch.arguments, **arguments}
    tensors = [arguments[key] for key in _IN_ROWS if key in arguments]
    arguments["UNIT"] = kernel_args.unit(*(t for t in tensors if t.dtype is launch.problem.query.dtype))

    def run(config: Config) -> launch_cache.Launched:
        own = {
            **arguments,
            "SIGMOID": kernel_args.form(arguments["SIGMOID"], config.sigmoid),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
        }
        described = tma.describe(own) if config.tma else None
        own |= {**(described or {}), "TMA": described is not None}
        options = {"num_warps": config.warps, "num_stages": config.stages}
        return launch_cache.launch(kernel, tiles(config), launch.problem.query.device, options, own)

    config = launch.config(name, mask_gradient=arguments.get("NEED_MASK", "none") != "none")
    if tiles(config):
        launch.launches.append(fitting.launch_fitting(kernel.__name__, lambda: _kind(launch, arguments), config, run))


def _kind(launch: Launch, arguments: dict[str, Any]) -> Hashable:
    """Return the device, the compile-time arguments and the dtypes: what a kernel's need of memory depends on."""
    return launch.problem.query.device, *(
        (name, x.dtype if isinstance(x, Tensor) else x)
        for name, x in arguments.items()
        if name.isupper() or isinstance(x, Tensor)
    )


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def forward(problem: Problem | VarlenProblem) -> Tensor:
    """The output, (B, Hq, N, Dv), or packed (T, Hq, Dv), where rows that belong to no sequence are 0."""
    kind = launch_cache.cache_key(problem)
    inputs = {"query": problem.query, "key": problem.key, "value": problem.value}
    if (again := launch_cache.lookup((tuning.FWD, kind))) is not None:
        return again(inputs)["out"]
    launch = kernel_args.prepare(problem)
    out = _forward(launch)
    if kind is not None:
        launch_cache.store((tuning.FWD, kind), launch.launches, inputs, {"out": out})
    return out


def _forward(launch: Launch) -> Tensor:
    p, s = launch.problem, launch.shape
    out = p.query.new_zeros(*p.query.shape[:2], s.dv) if s.packed else new_output(p.query, s.dv)
    if not out.numel():
        return out
    if _specialised(launch, tuning.FWD):
        from sigattn.ops.hopper import launch as launch_hopper

        return launch_hopper.forward(launch, out)
    _run(
        fwd_kernel,
        launch,
        tuning.FWD,
        lambda config: _tiles(s.n, config.block_m) * s.batch * s.heads,
        out=out,
        **named("o", "bhnd", s.strides(out)),
    )
    return out


def backward(problem: Problem | VarlenProblem, grad_out: Tensor, needs: NeedsGrad) -> Gradients:
    """The gradients that are asked for."""
    kind = launch_cache.cache_key(problem, grad_out) if not any(needs[3:]) else None
    inputs = {"query": problem.query, "key": problem.key, "value": problem.value, "grad_out": grad_out}
    if (again := launch_cache.lookup((needs, kind))) is not None:
        new = again(inputs)
        return Gradients(new.get("grad_query"), new.get("grad_key"), new.get("grad_value"), None, None, None)
    launch = kernel_args.prepare(problem)
    found = _backward(launch, limit_strides(grad_out), needs)
    if kind is not None:
        outputs = {"grad_query": found.query, "grad_key": found.key, "grad_value": found.value}
        launch_cache.store((needs, kind), launch.launches, inputs, outputs)
    return found


def _backward(launch: Launch, grad_out: Tensor, needs: NeedsGrad) -> Gradients:
    p, s = launch.problem, launch.shape
    launch.arguments |= {
        "grad_out": grad_out,
        **named("o", "bhnd", s.strides(grad_out)),
        "logit_scale": to_float32(p.scale_value * p.keep_scale),
    }
    sums = needs.bias or needs.attn_mask or needs.alibi_slopes
    architecture = kernel_args.architecture(p.query.device)
    at_least = tuning.ATOMIC_DQ_MIN_QUERIES.get(architecture)
    atomic = at_least is not None and s.n >= at_least and needs.query and not (sums or p.deterministic)
    if atomic and all(needs[:3]) and _specialised(launch, tuning.FUSED, grad_out):
        from sigattn.ops.hopper import launch as launch_hopper

        return Gradients(*launch_hopper.fused(launch, grad_out), None, None, None)
    atomic = atomic and tuning.supports_atomic_dq(launch.config(tuning.DKDV), architecture)
    query = torch.zeros_like(p.query, dtype=torch.float32) if atomic else None
    key: Tensor | None
    value: Tensor | None
    if needs.key and needs.value and query is None and _specialised(launch, tuning.DKDV, grad_out):
        from sigattn.ops.hopper import launch as launch_hopper

        key, value = launch_hopper.keys(launch, grad_out)
    else:
        key, value = _of_keys(launch, needs, query)
    if query is not None:
        return Gradients(query.to(p.query.dtype), key, value, None, None, None)
    if needs.query and not sums and _specialised(launch, tuning.DQ, grad_out):
        from sigattn.ops.hopper import launch as launch_hopper

        return Gradients(launch_hopper.queries(launch, grad_out), key, value, None, None, None)
    query, bias, mask, slopes = _of_queries(launch, needs)
    return Gradients(query, key, value, bias, mask, slopes)


def _specialised(launch: Launch, kernel: str, grad_out: Tensor | None = None) -> bool:
    """Whether a Hopper kernel takes this on."""
    if kernel not in tuning.WARP_SPECIALIZED:
        return False
    from sigattn.ops.hopper import launch as launch_hopper

    return launch_hopper.unavailable(launch, grad_out) is None


def _of_keys(launch: Launch, needs: NeedsGrad, query: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """DK and dV, and dQ added to ``query`` where it is given."""
    p, s = launch.problem, launch.shape
    some = s.packed or launch.arguments["LENGTHS"]  # keys that belong to no sequence have gradient 0
    new = torch.zeros_like if some else torch.empty_like
    key, value = new(p.key) if needs.key else None, new(p.value) if needs.value else None
    if key is None and value is None and query is None:
        return None, None
    parts = [(key, value, query)]
    if launch.config(tuning.DKDV).split_dkdv and key is not None and value is not None:
        parts = [(key, None, query), (None, value, None)]
    for k, v, q in parts:
        _run(
            bwd_dkdv_kernel,
            launch,
            tuning.DKDV,
            lambda config: _tiles(s.m, config.block_n) * s.batch * s.kv_heads,
            grad_query=p.query if q is None else q,
            grad_key=p.key if k is None else k,
            grad_value=p.value if v is None else v,
            **named("gq", "bhnd", s.strides(p.query if q is None else q)),
            **named("gk", "bhnd", s.strides(p.key if k is None else k)),
            **named("gv", "bhnd", s.strides(p.value if v is None else v)),
            NEED_KEY=k is not None,
            NEED_VALUE=v is not None,
            ATOMIC_DQ=q is not None,
        )
    return key, value


def _of_queries(launch: Launch, needs: NeedsGrad) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dQ, and the gradients of bias, mask and slopes."""
    p, s = launch.problem, launch.shape
    if not (needs.query or needs.bias or needs.attn_mask or needs.alibi_slopes):
        return None, None, None, None
    rows = (s.heads, len(p.query)) if s.packed else (s.batch, s.heads, s.n)

    def per_row(needed: bool, *columns: int) -> Tensor | None:
        """A sum of each row, and of what is not visited 0."""
        new = torch.zeros if s.packed else torch.empty
        return new((*rows, *columns), dtype=torch.float32, device=p.query.device) if needed else None

    new = torch.zeros_like if s.packed else torch.empty_like
    query = new(p.query) if needs.query else None
    bias, slopes = per_row(needs.bias), per_row(needs.alibi_slopes, 2)
    mask, mask_arguments = _mask_gradient(launch, needs)
    row_strides = (0, len(p.query), 1) if s.packed else (s.heads * s.n, s.n, 1)
    _run(
        bwd_dq_kernel,
        launch,
        tuning.DQ,
        lambda config: _tiles(s.n, config.block_m) * s.batch * s.heads,
        grad_query=p.query if query is None else query,
        grad_bias=p.query if bias is None else bias,
        grad_slopes=p.query if slopes is None else slopes,
        **named("gq", "bhnd", s.strides(p.query if query is None else query)),
        **named("gb", "bhn", row_strides),
        **mask_arguments,
        NEED_QUERY=query is not None,
        NEED_BIAS=bias is not None,
        NEED_SLOPES=slopes is not None,
    )
    return (
        query,
        None if bias is None or p.bias is None else _summed(launch, bias, p.bias),
        None if mask is None or p.attn_mask is None else _like(mask, p.attn_mask),
        None if slopes is None or p.alibi_slopes is None else _summed(launch, slopes, p.alibi_slopes),
    )


def _summed(launch: Launch, per_row: Tensor, like: Tensor) -> Tensor:
    """Sum what was gathered per row into the gradient of a bias or of slopes."""
    p, s = launch.problem, launch.shape
    if isinstance(p, VarlenProblem):  # (Hq, T) or (Hq, T, 2) → (B, Hq) or (B, Hq, 2)
        per_row = p.sum_rows(per_row.transpose(0, 1))
        if like.dim() == 0:
            return per_row.sum().to(like.device, like.dtype)
        return _like(per_row, like)
    if per_row.dim() == 4:  # slopes: (B, Hq, N, 2) → (B, Hq, 2)
        return _like(per_row.sum(2), like)
    if like.dim() == 0:
        return per_row.sum().to(like.device, like.dtype)
    return _like(per_row.view(s.batch, s.heads, s.n, 1), like)


def _like(full: Tensor, like: Tensor) -> Tensor:
    return full.sum_to_size(like.shape).to(like.dtype).contiguous()


def _mask_gradient(launch: Launch, needs: NeedsGrad) -> tuple[Tensor | None, dict[str, Any]]:
    """Where the mask's gradient goes: a matrix of its own for each head where sums must repeat bitwise."""
    p, s = launch.problem, launch.shape
    if not needs.attn_mask or p.attn_mask is None:
        none = {"grad_mask": p.query, "NEED_MASK": "none", "SUM_ROWS": False, "SUM_COLUMNS": False}
        return None, {**none, **named("gm", "bhnm", (0, 0, 0, 0))}
    full = (s.batch, s.heads, s.n, s.m)
    size = full if p.deterministic else tuple(p.attn_mask.shape)
    grad = torch.zeros(size, dtype=torch.float32, device=p.query.device)
    return grad, {
        "grad_mask": grad,
        **named("gm", "bhnm", grad.expand(full).stride()),
        "NEED_MASK": "stored" if size == full else "added",
        "SUM_ROWS": size[2] == 1 and s.n > 1,
        "SUM_COLUMNS": size[3] == 1 and s.m > 1,
    }
