"""From a canonical problem to the kernels' arguments, and the launches.

A dense problem and a packed one differ in one thing: a packed one has no batch dimension (its stride is 0) and
``starts`` that say where each sequence's rows begin.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigattn.ops.gradients import Gradients, Needs
from sigattn.ops.problem import UNLIMITED, PackedProblem, Problem, new_output
from sigattn.ops.triton import descriptors, repeats, tuning
from sigattn.ops.triton.backward import keys_kernel, queries_kernel
from sigattn.ops.triton.forward import forward_kernel

_LOG2E = math.log2(math.e)
_LONGEST_TILE = 256  # rows
INTERPRETED = not hasattr(forward_kernel, "cache_key")  # TRITON_INTERPRET=1: kernels run as Python, on a CPU


@dataclass
class Shape:
    """A problem as the kernels see it: B samples or sequences, Hq query heads, at most N queries and M keys of each."""

    batch: int
    heads: int
    kv_heads: int
    n: int
    m: int
    d: int
    dv: int
    packed: bool

    def strides(self, t: Tensor) -> tuple[int, int, int, int]:
        """(batch, head, row, column) of (B, H, N, E), or of a packed (T, H, E)."""
        if self.packed:
            row, head, column = t.stride()
            return 0, head, row, column
        b, h, n, e = t.stride()
        return b, h, n, e


@dataclass
class Launch:
    """What all kernels of a problem are told."""

    problem: Problem | PackedProblem
    shape: Shape
    arguments: dict[str, Any] = field(default_factory=dict)
    starts: list[repeats.Start] = field(default_factory=list)

    def config(self, kernel: str) -> tuning.Config:
        t = self.problem.query
        width = max(self.shape.d, self.shape.dv)
        return tuning.configuration(kernel, architecture(t.device), width, t.element_size())


def architecture(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 where there is none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def prepare(problem: Problem | PackedProblem) -> Launch:
    """Everything but the outputs and the tile shapes."""
    query, key, value = (within_reach(t) for t in (problem.query, problem.key, problem.value))
    p = problem._replace(query=query, key=key, value=value)
    packed = isinstance(p, PackedProblem)
    if isinstance(p, PackedProblem):
        (_, heads, d), (_, kv_heads, dv) = p.query.shape, p.value.shape
        shape = Shape(p.sequences, heads, kv_heads, p.max_seqlen_q, p.max_seqlen_k, d, dv, True)
    else:
        (b, heads, n, d), (_, kv_heads, m, dv) = p.query.shape, p.value.shape
        shape = Shape(b, heads, kv_heads, n, m, d, dv, False)
    dropout = p.seed is not None
    arguments: dict[str, Any] = {
        "query": p.query,
        "key": p.key,
        "value": p.value,
        **_named("q", "bhnd", shape.strides(p.query)),
        **_named("k", "bhnd", shape.strides(p.key)),
        **_named("v", "bhnd", shape.strides(p.value)),
        "n": shape.n,
        "keys": shape.m,
        "heads": heads,
        "GROUP": heads // max(kv_heads, 1),
        "left": p.left,
        "right": p.right,
        "seed": int(p.seed) if p.seed is not None else 0,
        "threshold": round(p.dropout_p * (1 << 32)) - (1 << 31) if dropout else 0,
        "z_scale": _single(-p.scale_value * _LOG2E),
        "out_scale": _single(p.keep_scale),
        "D": d,
        "DV": dv,
        "BLOCK_D": tuning.padded(d),
        "BLOCK_DV": tuning.padded(dv),
        "HAS_LEFT": p.left != UNLIMITED,
        "HAS_RIGHT": p.right != UNLIMITED,
        "DROPOUT": dropout,
        "VARLEN": packed,
        "SIGMOID": _sigmoid(p),
        "PRECISION": _precision(p.query),
    }
    arguments |= _bias(p, shape) | _mask(p, shape) | _slopes(p, shape)
    if isinstance(p, PackedProblem):
        arguments |= {
            "starts_q": p.cu_seqlens_q,
            "starts_k": p.cu_seqlens_k,
            "key_lengths": p.query,
            "LENGTHS": False,
            "first_row": 0,
            "BOTTOM_RIGHT": True,
        }
    else:
        lengths = p.key_lengths
        arguments |= {
            "starts_q": p.query,
            "starts_k": p.query,
            "key_lengths": p.query if lengths is None else lengths.to(p.query.device),
            "LENGTHS": lengths is not None,
            "first_row": p.first_row,
            "BOTTOM_RIGHT": False,
        }
    return Launch(p, shape, arguments)


def within_reach(t: Tensor) -> Tensor:
    """The tensor, or a dense copy where neighbouring rows or columns lie so far apart that a tile would span 2^31."""
    far = max(t.stride(-1) * t.shape[-1], t.stride(-3 if t.dim() == 3 else -2) * _LONGEST_TILE, 0)
    return t if far < 2**31 else t.contiguous()


def _named(name: str, axes: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def _sigmoid(p: Any) -> str:
    if p.fast and not INTERPRETED and torch.version.hip is None:
        return "fast"
    return "exact" if p.query.dtype is torch.float32 else "accurate"


def form(asked: str, tuned: str) -> str:
    """The form of σ: what is tuned is one of the accurate ones; who asks for another gets that."""
    return tuned if asked == "accurate" else asked


def _precision(t: Tensor) -> str:
    return "tf32" if t.dtype is torch.float32 and t.is_cuda and tf32_is_allowed() else "ieee"


def tf32_is_allowed() -> bool:
    """What PyTorch is told of its own float32 products on a GPU, by whichever of its settings."""
    own = torch.backends.cuda.matmul.fp32_precision
    everywhere: str = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return (everywhere if own == "none" else own) == "tf32"


def _bias(p: Problem | PackedProblem, shape: Shape) -> dict[str, Any]:
    """The bias, and the power of two that float16 weights are scaled by on its account (activation.py)."""
    kind, tensor, number = "number", p.query, 0.0
    strides: tuple[int, ...] = (0, 0, 0)
    if p.bias is not None and p.bias.dim() == 0:
        number = p.bias.item()
    elif p.bias is not None:
        kind, tensor = "tensor", p.bias
        full = p.bias[..., None, None] if shape.packed else p.bias  # (B, Hq) or (B, Hq, N, 1)
        strides = full.expand(shape.batch, shape.heads, 1 if shape.packed else shape.n, 1).stride()[:3]
        strides = (*strides[:2], 0) if shape.packed else strides
    elif shape.packed or (isinstance(p, Problem) and p.key_lengths is not None):
        kind = "length"
    else:
        number = -math.log(max(shape.m, 1))
    shift, shift_pointer = 0.0, p.query
    if p.query.dtype is torch.float16 and kind == "number" and math.isfinite(number):
        shift = float(min(max(math.floor(-number * _LOG2E), 0), 15))
    elif p.query.dtype is torch.float16 and kind == "tensor":
        most = tensor.amax() if tensor.numel() else tensor.new_zeros(())
        shift_pointer = (most.float() * -_LOG2E).floor().nan_to_num(0.0).clamp(0, 15)
    return {
        "bias": tensor,
        "bias_value": _single(-number * _LOG2E),
        "BIAS": kind,
        **_named("bias", "bhn", strides),
        "shift_pointer": shift_pointer,
        "shift_value": shift,
        "SHIFT": kind if p.query.dtype is torch.float16 else "none",
    }


def _mask(p: Problem | PackedProblem, shape: Shape) -> dict[str, Any]:
    mask = p.attn_mask if isinstance(p, Problem) else None
    if mask is None:
        return {"mask": p.query, "MASK": "none", **_named("mask", "bhnm", (0, 0, 0, 0))}
    kind = "bool" if mask.dtype is torch.bool else "added"
    full = mask.expand(shape.batch, shape.heads, shape.n, shape.m)
    return {
        "mask": mask.view(torch.uint8) if kind == "bool" else mask,
        "MASK": kind,
        **_named("mask", "bhnm", full.stride()),
    }


def _slopes(p: Problem | PackedProblem, shape: Shape) -> dict[str, Any]:
    if p.alibi_slopes is None:
        return {"slopes": p.query, "SLOPES": False, **_named("slopes", "bhs", (0, 0, 0))}
    strides = p.alibi_slopes.expand(shape.batch, shape.heads, 2).stride()
    return {"slopes": p.alibi_slopes, "SLOPES": True, **_named("slopes", "bhs", strides)}


def _run(kernel: Any, launch: Launch, config: tuning.Config, programs: int, **arguments: Any) -> None:
    if not programs:
        return
    arguments = {
        **launch.arguments,
        **arguments,
        "SIGMOID": form(launch.arguments["SIGMOID"], config.sigmoid),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    described = descriptors.of_tiles(arguments) if config.tma else None
    arguments |= {**(described or {}), "TMA": described is not None}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    launch.starts.append(repeats.start(kernel, programs, launch.problem.query.device, options, arguments))


def _single(x: float) -> float:
    """A number as float32 has it, which is how kernels take it; what is less than normal there is 0."""
    x = ctypes.c_float(x).value
    return 0.0 if abs(x) < torch.finfo(torch.float32).smallest_normal else x


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def forward(problem: Problem | PackedProblem) -> Tensor:
    """The output, (B, Hq, N, Dv), or packed (T, Hq, Dv), where rows that belong to no sequence are 0."""
    kind = repeats.kind(problem)
    inputs = {"query": problem.query, "key": problem.key, "value": problem.value}
    if (again := repeats.known((tuning.FORWARD, kind))) is not None:
        return again(inputs)["out"]
    launch = prepare(problem)
    out = _forward(launch)
    if kind is not None:
        repeats.keep((tuning.FORWARD, kind), launch.starts, inputs, {"out": out})
    return out


def _forward(launch: Launch) -> Tensor:
    p, s = launch.problem, launch.shape
    out = p.query.new_zeros(*p.query.shape[:2], s.dv) if s.packed else new_output(p.query, s.dv)
    if not out.numel():
        return out
    if _specialised(launch, tuning.FORWARD):
        from sigattn.ops.triton import launch_hopper

        return launch_hopper.forward(launch, out)
    config = launch.config(tuning.FORWARD)
    programs = _tiles(s.n, config.block_m) * s.batch * s.heads
    _run(forward_kernel, launch, config, programs, out=out, **_named("o", "bhnd", s.strides(out)))
    return out


def backward(problem: Problem | PackedProblem, grad_out: Tensor, needs: Needs) -> Gradients:
    """The gradients that are asked for."""
    kind = repeats.kind(problem, grad_out) if not any(needs[3:]) else None
    inputs = {"query": problem.query, "key": problem.key, "value": problem.value, "grad_out": grad_out}
    if (again := repeats.known((needs, kind))) is not None:
        new = again(inputs)
        return Gradients(new.get("grad_query"), new.get("grad_key"), new.get("grad_value"), None, None, None)
    launch = prepare(problem)
    found = _backward(launch, within_reach(grad_out), needs)
    if kind is not None:
        outputs = {"grad_query": found.query, "grad_key": found.key, "grad_value": found.value}
        repeats.keep((needs, kind), launch.starts, inputs, outputs)
    return found


def _backward(launch: Launch, grad_out: Tensor, needs: Needs) -> Gradients:
    p, s = launch.problem, launch.shape
    launch.arguments |= {
        "grad_out": grad_out,
        **_named("o", "bhnd", s.strides(grad_out)),
        "logit_scale": _single(p.scale_value * p.keep_scale),
    }
    sums = needs.bias or needs.attn_mask or needs.alibi_slopes
    in_any_order = not (sums or p.deterministic)
    if in_any_order and all(needs[:3]) and _specialised(launch, tuning.FUSED, grad_out):
        from sigattn.ops.triton import launch_hopper

        return Gradients(*launch_hopper.fused(launch, grad_out), None, None, None)
    atomic = needs.query and in_any_order and architecture(p.query.device) in tuning.ADD_QUERY_ATOMICALLY
    query = torch.zeros_like(p.query, dtype=torch.float32) if atomic else None
    key: Tensor | None
    value: Tensor | None
    if needs.key and needs.value and query is None and _specialised(launch, tuning.KEYS, grad_out):
        from sigattn.ops.triton import launch_hopper

        key, value = launch_hopper.keys(launch, grad_out)
    else:
        key, value = _of_keys(launch, needs, query)
    if query is not None:
        return Gradients(query.to(p.query.dtype), key, value, None, None, None)
    if needs.query and not sums and _specialised(launch, tuning.QUERIES, grad_out):
        from sigattn.ops.triton import launch_hopper

        return Gradients(launch_hopper.queries(launch, grad_out), key, value, None, None, None)
    query, bias, mask, slopes = _of_queries(launch, needs)
    return Gradients(query, key, value, bias, mask, slopes)


def _specialised(launch: Launch, kernel: str, grad_out: Tensor | None = None) -> bool:
    """Whether a Hopper kernel takes this on."""
    if kernel not in tuning.SPECIALISED:
        return False
    from sigattn.ops.triton import launch_hopper

    return launch_hopper.unavailable(launch, grad_out) is None


def _of_keys(launch: Launch, needs: Needs, query: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """DK and dV, and dQ added to ``query`` where it is given."""
    p, s = launch.problem, launch.shape
    some = s.packed or launch.arguments["LENGTHS"]  # keys that belong to no sequence have gradient 0
    new = torch.zeros_like if some else torch.empty_like
    key, value = new(p.key) if needs.key else None, new(p.value) if needs.value else None
    if key is None and value is None and query is None:
        return None, None
    config = launch.config(tuning.KEYS)
    _run(
        keys_kernel,
        launch,
        config,
        _tiles(s.m, config.block_n) * s.batch * s.kv_heads,
        grad_query=p.query if query is None else query,
        grad_key=p.key if key is None else key,
        grad_value=p.value if value is None else value,
        **_named("gq", "bhnd", s.strides(p.query if query is None else query)),
        **_named("gk", "bhnd", s.strides(p.key if key is None else key)),
        **_named("gv", "bhnd", s.strides(p.value if value is None else value)),
        NEED_KEY=key is not None,
        NEED_VALUE=value is not None,
        ADD_QUERY=query is not None,
    )
    return key, value


def _of_queries(launch: Launch, needs: Needs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
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
    config = launch.config(tuning.QUERIES)
    row_strides = (0, len(p.query), 1) if s.packed else (s.heads * s.n, s.n, 1)
    _run(
        queries_kernel,
        launch,
        config,
        _tiles(s.n, config.block_m) * s.batch * s.heads,
        grad_query=p.query if query is None else query,
        grad_bias=p.query if bias is None else bias,
        grad_slopes=p.query if slopes is None else slopes,
        **_named("gq", "bhnd", s.strides(p.query if query is None else query)),
        **_named("gb", "bhn", row_strides),
        **mask_arguments,
        NEED_QUERY=query is not None,
        NEED_BIAS=bias is not None,
        NEED_SLOPES=slopes is not None,
    )
    return (
        query,
        None if bias is None or p.bias is None else _summed(launch, bias, p.bias),
        None if mask is None or not isinstance(p, Problem) or p.attn_mask is None else _like(mask, p.attn_mask),
        None if slopes is None or p.alibi_slopes is None else _summed(launch, slopes, p.alibi_slopes),
    )


def _summed(launch: Launch, per_row: Tensor, like: Tensor) -> Tensor:
    """Sum what was gathered per row into the gradient of a bias or of slopes."""
    p, s = launch.problem, launch.shape
    if isinstance(p, PackedProblem):  # (Hq, T) or (Hq, T, 2) → (B, Hq) or (B, Hq, 2)
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


def _mask_gradient(launch: Launch, needs: Needs) -> tuple[Tensor | None, dict[str, Any]]:
    """Where the mask's gradient goes: a matrix of its own for each head where sums must repeat bitwise."""
    p, s = launch.problem, launch.shape
    if not needs.attn_mask or not isinstance(p, Problem) or p.attn_mask is None:
        none = {"grad_mask": p.query, "NEED_MASK": "none", "SUM_ROWS": False, "SUM_COLUMNS": False}
        return None, {**none, **_named("gm", "bhnm", (0, 0, 0, 0))}
    full = (s.batch, s.heads, s.n, s.m)
    size = full if p.deterministic else tuple(p.attn_mask.shape)
    grad = torch.zeros(size, dtype=torch.float32, device=p.query.device)
    return grad, {
        "grad_mask": grad,
        **_named("gm", "bhnm", grad.expand(full).stride()),
        "NEED_MASK": "stored" if size == full else "added",
        "SUM_ROWS": size[2] == 1 and s.n > 1,
        "SUM_COLUMNS": size[3] == 1 and s.m > 1,
    }
