"""Cache of launches of plain calls: a model calls attention with the same shapes again and again.

The second call with a key is stored (a first may be the only one). From the third on, only the tensors are put into the
stored arguments. Entries hold no tensors. Plain calls have a number as bias, and neither masks, ALiBi, key lengths nor
dropout.

With ``tuning.DIRECT_LAUNCH`` a cached launch starts the compiled kernel itself, instead of through Triton, which binds
and specialises every argument again (30 µs). That is done with the versions of Triton for which
``tests/ops/compiled/test_direct_launch.py`` has shown that both pass the same arguments; others launch through Triton.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.ops.problem import Problem, VarlenProblem
from sigattn.ops.triton import tuning

_MAX_ENTRIES = 512
_cache: dict[Hashable, CachedCall] = {}
_seen: set[Hashable] = set()


class Launched(NamedTuple):
    """A launch: grid, arguments by parameter, options, and the kernel that Triton compiled for it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]
    compiled: Any


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, options: dict[str, int], arguments: dict[str, Any]
) -> Launched:
    """Launch a kernel through Triton."""
    options = {**options, "enable_fp_fusion": True}  # Triton 3.9 warns that its default will change
    with _on(device):
        compiled = kernel[grid](**arguments, **options)
    return Launched(kernel, grid, arguments, options, compiled)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class TensorRef(NamedTuple):
    """Placeholder of a tensor: its name, and its TMA descriptor without the tensor, if it is passed as one."""

    name: str
    descriptor: Any

    def resolve(self, tensors: dict[str, Tensor]) -> Any:
        """Return the tensor, or a descriptor of it."""
        if self.descriptor is None:
            return tensors[self.name]
        descriptor = copy.copy(self.descriptor)
        descriptor.base = tensors[self.name]
        return descriptor


class CachedLaunch:
    """A launch with placeholders for tensors."""

    def __init__(self, first: Launched, tensors: dict[str, TensorRef]) -> None:
        self.first: Launched = first._replace(arguments={k: x for k, x in first.arguments.items() if k not in tensors})
        self.tensors = tensors
        order = first.kernel.arg_names
        self.ordered: list[Any | None] = [self.first.arguments.get(name) for name in order]
        self.positions: list[tuple[Any, TensorRef]] = [(order.index(name), tensor) for name, tensor in tensors.items()]

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        kernel, grid, arguments, options, compiled = self.first
        if not tuning.DIRECT_LAUNCH or compiled is None:  # None in Triton's interpreter
            kernel[grid](**arguments, **{k: x.resolve(tensors) for k, x in self.tensors.items()}, **options)
            return
        ordered = self.ordered.copy()
        for position, tensor in self.positions:
            ordered[position] = tensor.resolve(tensors)
        compiled[(*grid, 1, 1)](*ordered)


class CachedCall(NamedTuple):
    """Launches of a call, and size, strides and dtype of its outputs."""

    launches: list[CachedLaunch]
    outputs: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the kernels on other tensors with the same key and return the outputs."""
        device = inputs["query"].device
        new = {
            name: torch.empty_strided(size, stride, dtype=dtype, device=device)
            for name, (size, stride, dtype) in self.outputs.items()
        }
        tensors = inputs | new
        with _on(device):
            for cached in self.launches:
                cached(tensors)
        return new


def cache_key(problem: Problem | VarlenProblem, *others: Tensor) -> Hashable:
    """Return what determines the launches of a plain problem, or None if it is not plain.

    others: tensors besides Q, K and V.
    """
    p = problem
    if isinstance(p, VarlenProblem) or p.normalize or (p.bias is not None and p.bias.dim()):
        return None
    if any(x is not None for x in (p.attn_mask, p.alibi_slopes, p.key_lengths, p.mask_table, p.seed)):
        return None
    q = p.query
    # Kernels are compiled for dtypes, and for addresses that are a multiple of 16 or are not.
    tensors = tuple((t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in (q, p.key, p.value, *others))
    numbers = (p.scale, None if p.bias is None else p.bias.item(), p.left, p.right, p.query_offset, p.fast, p.softcap)
    tables = (tuning.kernel_config, tuning.WARP_SPECIALIZED)
    hopper = tuple(tuning.HOPPER_CONFIGS[kernel].get(q.shape[-1]) for kernel in tuning.WARP_SPECIALIZED)
    precision = None
    if q.dtype is torch.float32:
        precision = (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)  # type: ignore[attr-defined]
    return tensors, q.device, numbers, p.deterministic, tables, hopper, precision


def lookup(key: Hashable) -> CachedCall | None:
    """Return the cached call with a key, or None."""
    return _cache.get(key)


def clear() -> None:
    """Clear the cache."""
    _cache.clear()
    _seen.clear()


def store(
    key: Hashable, launches: list[Launched], inputs: dict[str, Tensor], outputs: dict[str, Tensor | None]
) -> None:
    """Store the launches of a call, unless it is the first with its key or the kernels used other tensors."""
    if key not in _seen:
        if len(_seen) >= 4 * _MAX_ENTRIES:
            _seen.clear()
        _seen.add(key)
        return
    new = {name: t for name, t in outputs.items() if t is not None}
    cached = []
    for launched in launches:
        refs = {parameter: _refer(parameter, x, inputs | new) for parameter, x in launched.arguments.items()}
        if _UNKNOWN in refs.values():
            return
        cached.append(CachedLaunch(launched, {parameter: x for parameter, x in refs.items() if x is not None}))
    if not new.keys() <= {x.name for launched in cached for x in launched.tensors.values()}:
        return
    if len(_cache) >= _MAX_ENTRIES:
        _cache.clear()
    _cache[key] = CachedCall(cached, {name: (t.shape, t.stride(), t.dtype) for name, t in new.items()})


_UNKNOWN = TensorRef("", None)


def _refer(parameter: str, x: Any, tensors: dict[str, Tensor]) -> TensorRef | None:
    """Return a placeholder for an argument's tensor; None if it has none, ``_UNKNOWN`` if that is not in ``tensors``.

    Prefers the parameter's own name, because one tensor may be query, key and value.
    """
    if isinstance(x, tuple):
        return _UNKNOWN if any(_refer("", field, {}) for field in x) else None
    t = x if isinstance(x, Tensor) else getattr(x, "base", None)
    if not isinstance(t, Tensor):
        return None
    names = [name for name, other in tensors.items() if other is t]
    if not names:
        return _UNKNOWN
    descriptor = None
    if t is not x:
        descriptor = copy.copy(x)
        descriptor.base = None
    return TensorRef(parameter if parameter in names else names[0], descriptor)
