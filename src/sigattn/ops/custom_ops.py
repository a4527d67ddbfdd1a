"""Registration of the operator with PyTorch: ops, fake implementations, autograd, vmap and FLOP counts.

There are two ops, ``sigattn::forward`` and ``sigattn::backward``; the second is registered as the derivative of the
first (``autograd.py``). ``torch.compile`` and ``torch.export`` therefore trace one node, which can be differentiated
afterwards, and ``jacrev`` and ``vmap`` have a rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigattn.ops import autograd, flops, onnx, triton
from sigattn.ops.cpu import blocked
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import Problem, VarlenProblem, new_output

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? attn_mask, Tensor? alibi_slopes"
_REST = (
    "Tensor? key_lengths, Tensor? seed, Tensor? mask_table, Tensor? mask_tiles, float? scale, int left, int right, "
    "float dropout_p"
)
_OPTIONS = "SymInt query_offset, bool fast, bool deterministic, float softcap, str backend"

_library = torch.library.Library("sigattn", "DEF")
_library.define(f"forward({_TENSORS}, {_REST}, {_OPTIONS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"backward(Tensor grad_out, {_TENSORS}, {_REST}, {_OPTIONS}, bool[] needs_grad) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_DIFFERENTIABLE = 6  # the leading tensors of both ops, in the order of NeedsGrad


@dataclass(frozen=True, slots=True)
class Kernels:
    """Implementation of the operator by a fast backend.

    Attributes:
        forward: returns the output of a problem. backward: returns the gradients of a problem.
        unavailable: returns the reason why a problem is not supported, or None. It must not read the values of tensors,
            because it is called outside the op, where a compiler may be tracing.
        device_types: devices on which the backend can be the default; None for all.
    """

    forward: Callable[[Any], Tensor]
    backward: Callable[[Any, Tensor, NeedsGrad], Gradients]
    unavailable: Callable[[Any], str | None]
    device_types: tuple[str, ...] | None = None

    def is_default_for(self, problem: Problem | VarlenProblem) -> bool:
        """Return True if the backend supports the problem and can be the default on its device."""
        of_device = self.device_types is None or problem.query.device.type in self.device_types
        return of_device and self.unavailable(problem) is None


# in order of speed: the first that supports a problem is the default
KERNELS = {
    "triton": Kernels(triton.forward, triton.backward, triton.unavailable, device_types=("cuda",)),
    "blocked": Kernels(blocked.forward, blocked.backward, blocked.unavailable),
}


def check_lengths(problem: Problem) -> None:
    """Raise ValueError unless key_lengths, if on a CPU, lie in 0…M.

    Called when the op runs, because a traced graph has no values. On an accelerator reading them would synchronise.
    """
    lengths, m = problem.key_lengths, problem.key.shape[2]
    if lengths is not None and lengths.device.type == "cpu" and lengths.numel():
        least, most = lengths.aminmax()
        if least < 0 or most > m:
            raise ValueError(
                f"sigmoid_attention: key_lengths must lie in 0…{m} (key has {m} keys), got {lengths.tolist()}"
            )


def _problem(args: Sequence[Any]) -> tuple[Problem, Kernels]:
    problem = Problem(*args[:-1])
    check_lengths(problem)
    return problem, KERNELS[args[-1]]


def _forward(*args: Any) -> Tensor:
    problem, kernels = _problem(args)
    return _run_forward(problem, kernels)


def _run_forward(problem: Problem, kernels: Kernels) -> Tensor:
    if not is_autocast_enabled(problem.query.device.type):
        return kernels.forward(problem)
    with without_autocast(problem):
        return kernels.forward(problem)


def _backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    problem, kernels = _problem(args[:-1])
    with without_autocast(problem):
        gradients = kernels.backward(problem, grad_out, NeedsGrad(*args[-1]))
    return tuple(g if g is not None else absent(grad_out) for g in gradients)


def is_autocast_enabled(device_type: str) -> bool:
    """Return True if autocast is enabled for a device type; False for devices that do not support it."""
    if torch.compiler.is_compiling():  # torch.compile of PyTorch 2.11 cannot trace is_autocast_available
        return device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(problem: Problem | VarlenProblem) -> Any:
    """Return a context that disables autocast, because the operands have been cast before."""
    device = problem.query.device.type
    return torch.autocast(device, enabled=False) if is_autocast_enabled(device) else contextlib.nullcontext()


def absent(like: Tensor) -> Tensor:
    """Return an empty tensor, which stands for a gradient that is not needed, because ops cannot return None."""
    return like.new_empty(0)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    if rest[-1] == "triton":
        return new_output(query, value.shape[-1])
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _fake_backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    def new(t: Tensor, at: int) -> Tensor:
        return torch.empty_like(t) if args[-2] == "triton" and at < 3 else t.new_empty(t.shape)

    return tuple(
        new(t, at) if t is not None and needed else absent(grad_out)
        for at, (t, needed) in enumerate(zip(args[:_DIFFERENTIABLE], args[-1], strict=True))
    )


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sigattn::forward", _fake_forward, lib=_library)
torch.library.register_fake("sigattn::backward", _fake_backward, lib=_library)
autograd.register(
    _library,
    torch.ops.sigattn.forward.default,
    torch.ops.sigattn.backward.default,
    differentiable=_DIFFERENTIABLE,
    onnx_formula=onnx.formula,
)
flops.register("forward", "backward")


def choose(problem: Problem | VarlenProblem, backend: str | None) -> str:
    """Return ``backend``, or if it is None the fastest backend that supports the problem.

    Raises:
        ValueError: if ``backend`` does not support the problem.
    """
    if backend is None:
        return next(name for name, kernels in KERNELS.items() if kernels.is_default_for(problem))
    reason = KERNELS[backend].unavailable(problem)
    if reason is not None:
        raise ValueError(f"sigmoid_attention: backend {backend!r} does not support this call: {reason}")
    return backend


def call(problem: Problem, backend: str) -> Tensor:
    """Return the output of a problem, computed by a fast backend; differentiable."""
    p = problem
    differentiable = (p.query, p.key, p.value, p.bias, p.attn_mask, p.alibi_slopes)
    tensors = (*differentiable, p.key_lengths, p.seed, p.mask_table, p.mask_tiles)
    if can_bypass_dispatcher(tensors):
        check_lengths(problem)
        return _run_forward(problem, KERNELS[backend])
    numbers = (p.scale, p.left, p.right, p.dropout_p, p.query_offset, p.fast, p.deterministic, p.softcap)
    out: Tensor = torch.ops.sigattn.forward.default(*tensors, *numbers, backend)
    return out


def can_bypass_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if the op can be bypassed (saves 4 µs): no tracing, dispatch mode, transform or gradient active."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if torch._C._is_tracing():  # torch.jit.trace would record the sizes that the kernels read
        return False
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    plain = all(t is None or ((type(t) is Tensor or type(t) is torch.nn.Parameter) and not t.is_meta) for t in tensors)
    return plain and not recorded and torch._C._len_torch_dispatch_stack() == 0


# -- vmap -------------------------------------------------------------------------------------------------------------


def _fold_batches(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Merge the mapped dimension into the batch, size · B, for tensors (query, …, bias, mask, slopes, key_lengths).

    A bias, mask or slopes that broadcast along both dimensions are returned unchanged.
    """
    moved = [
        t if t is None or d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims[: len(tensors)], strict=True)
    ]
    query, query_dim = moved[0], in_dims[0]
    assert query is not None
    batch = query.shape[0 if query_dim is None else 1]
    may_broadcast = range(len(tensors) - 4, len(tensors) - 1)
    folded: list[Tensor | None] = []
    for at, (t, d) in enumerate(zip(moved, in_dims, strict=False)):
        if t is None or (d is None and at in may_broadcast and (t.dim() == 0 or t.shape[0] == 1)):
            folded.append(t)
            continue
        t = t.unsqueeze(0) if d is None else t  # (size or 1, B or 1, …)
        folded.append(t.expand(size, batch, *t.shape[2:]).reshape(size * batch, *t.shape[2:]))
    return folded


def _one_by_one(op: Callable[..., Any], size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Return the results of applying the op to each slice."""
    return [
        op(
            *(
                a.select(d, i) if isinstance(a, Tensor) and d is not None else a
                for a, d in zip(args, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]


def register_vmap_by_slices(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Register a vmap rule that calls an op once for each slice."""

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        slices = _one_by_one(op, info.batch_size, _flat(in_dims), args)
        if isinstance(slices[0], Tensor):
            return torch.stack(slices), 0
        return tuple(torch.stack(s) for s in zip(*slices, strict=True)), (0,) * len(slices[0])

    torch.library.register_vmap(op, rule, lib=library)


def _flat(in_dims: Sequence[Any]) -> list[int | None]:
    return [d if isinstance(d, int) else None for d in in_dims]


def _vmap_forward(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Tensor, int]:
    dims = _flat(in_dims)
    # each slice must drop the same weights with a seed; block tables have a batch dimension
    separate = args[7] is not None or args[8] is not None
    if separate or (dims[3] is not None and args[3].dim() == 1):
        return torch.stack(_one_by_one(torch.ops.sigattn.forward.default, info.batch_size, dims, args)), 0
    tensors = _fold_batches(info.batch_size, dims, args[:7])
    out = torch.ops.sigattn.forward.default(*tensors, *args[7:])
    return out.unflatten(0, (info.batch_size, -1)), 0


def _vmap_backward(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    dims = _flat(in_dims)
    op = torch.ops.sigattn.backward.default
    small = any(args[-1][3:])  # gradients of bias, mask and slopes are summed over the batch, so not over slices
    if args[8] is not None or args[9] is not None or small or (dims[4] is not None and args[4].dim() == 1):
        slices = _one_by_one(op, info.batch_size, dims, args)
        return tuple(torch.stack(g) for g in zip(*slices, strict=True)), (0,) * _DIFFERENTIABLE
    query, *rest = [args[1], args[0], *args[2:8]]
    tensors = _fold_batches(info.batch_size, [dims[1], dims[0], *dims[2:8]], [query, *rest])
    gradients = op(tensors[1], tensors[0], *tensors[2:], *args[8:])
    per_slice = [
        g.unflatten(0, (info.batch_size, -1)) if g.dim() > 1 else g.expand(info.batch_size, 0) for g in gradients
    ]
    return tuple(per_slice), (0,) * _DIFFERENTIABLE


torch.library.register_vmap("sigattn::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("sigattn::backward", _vmap_backward, lib=_library)
