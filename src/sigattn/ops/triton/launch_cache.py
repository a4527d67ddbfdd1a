"""Launches of plain calls, kept: a model calls attention with the same shapes again and again.

The second call of a kind is kept (a first may be the only one), and from the third on nobody works out what to tell
the kernels, only which tensors. Nothing that is kept holds a tensor. Plain is what has neither masks, ALiBi, key
lengths nor dropout, and a number as bias.

With ``tuning.DIRECT_LAUNCH`` a kept launch starts the compiled kernel itself, instead of through Triton, which binds
and specialises every argument again. The first such launch of each kernel still goes through Triton and is compared
with what a direct one would hand to the kernel's launcher; if they differ, Triton's way is kept.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.ops.problem import Problem, VarlenProblem
from sigattn.ops.triton import tuning

_MAX_ENTRIES = 512
_cache: dict[Hashable, CachedCall] = {}
_seen: set[Hashable] = set()


class Launched(NamedTuple):
    """A kernel as it was started: programs, and arguments by parameter; ``compiled`` is what Triton made of it."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]
    compiled: Any


def launch(
    kernel: Any, programs: int, device: torch.device, options: dict[str, int], arguments: dict[str, Any]
) -> Launched:
    """Launched a kernel."""
    with _on(device):
        compiled = kernel[(programs,)](**arguments, **options)
    return Launched(kernel, programs, arguments, options, compiled)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class TensorRef(NamedTuple):
    """A tensor by its name; ``described``: what else the copy engine is told of it."""

    name: str
    described: Any

    def among(self, tensors: dict[str, Tensor]) -> Any:
        """The tensor, or its descriptor."""
        if self.described is None:
            return tensors[self.name]
        found = copy.copy(self.described)
        found.base = tensors[self.name]
        return found


class CachedLaunch:
    """A start with names in the place of tensors."""

    def __init__(self, first: Launched, tensors: dict[str, TensorRef]) -> None:
        self.first = first._replace(arguments={k: x for k, x in first.arguments.items() if k not in tensors})
        self.tensors = tensors
        order = first.kernel.arg_names
        self.ordered = [self.first.arguments.get(name) for name in order]
        self.places = [(order.index(name), tensor) for name, tensor in tensors.items()]
        self.agrees: bool | None = None  # with Triton's own launch; None before they have been compared

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        if not tuning.DIRECT_LAUNCH or self.first.compiled is None or self.agrees is False:
            self._launch_through_triton(tensors)
        elif self.agrees:
            self._launch_directly(tensors)
        else:
            self.agrees = self._compare(tensors)

    def _launch_through_triton(self, tensors: dict[str, Tensor]) -> None:
        kernel, programs, arguments, options, _ = self.first
        kernel[(programs,)](**arguments, **{k: x.among(tensors) for k, x in self.tensors.items()}, **options)

    def _launch_directly(self, tensors: dict[str, Tensor]) -> None:
        ordered = self.ordered.copy()
        for at, tensor in self.places:
            ordered[at] = tensor.among(tensors)
        self.first.compiled[(self.first.programs, 1, 1)](*ordered)

    def _compare(self, tensors: dict[str, Tensor]) -> bool:
        """Launch through Triton, and return True if a direct launch would pass the same arguments to the launcher."""
        compiled = self.first.compiled
        expected, found = [], []
        if not hasattr(compiled, _LAUNCHER):
            self._launch_through_triton(tensors)
        else:
            with _lock:
                expected = _received(compiled, lambda: self._launch_through_triton(tensors), launches=True)
                with contextlib.suppress(Exception):  # of a version of Triton that launches in another way
                    found = _received(compiled, lambda: self._launch_directly(tensors), launches=False)
        if len(found) == len(expected) == 1 and _same(found[0], expected[0]):
            return True
        warnings.warn(
            f"sigattn: {self.first.kernel.__name__} is launched through Triton each time (some 30 µs more of the "
            "CPU's time), because a direct launch would pass other arguments than Triton does. Please report this, "
            "with the version of Triton.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


_lock = threading.Lock()
_LAUNCHER = "_run"  # the attribute of Triton's CompiledKernel that is called to launch it


def _received(compiled: Any, call: Callable[[], None], *, launches: bool) -> list[tuple[Any, ...]]:
    """Return what a call passes to the launcher of a compiled kernel; without ``launches`` the kernel does not run.

    What other threads launch meanwhile is neither recorded nor held back.
    """
    launcher, thread = getattr(compiled, _LAUNCHER), threading.get_ident()
    seen: list[tuple[Any, ...]] = []

    def record(*given: Any) -> None:
        own = threading.get_ident() == thread
        if own:
            hooks = 6  # the position of the metadata for Triton's launch hooks, made anew for each launch
            seen.append((*given[:hooks], *given[hooks + 1 :]))
        if launches or not own:
            launcher(*given)

    setattr(compiled, _LAUNCHER, record)
    try:
        call()
    finally:
        setattr(compiled, _LAUNCHER, launcher)
    return seen


def _same(a: Any, b: Any) -> bool:
    """Return True if two arguments are the same: tensors by identity, descriptors by their fields, others by value."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "base"):
        return all(map(_same, vars(a).values(), vars(b).values()))
    return bool(a is b or a == b)


class OutputSpec(NamedTuple):
    """An output to make memory for."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class CachedCall(NamedTuple):
    """How a call is made again."""

    launches: list[CachedLaunch]
    outputs: dict[str, OutputSpec]

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the kernels on other tensors of the same kind; gives the outputs."""
        device = inputs["query"].device
        new = {
            name: torch.empty_strided(size, stride, dtype=dtype, device=device)
            for name, (size, stride, dtype) in self.outputs.items()
        }
        tensors = inputs | new
        with _on(device):
            for again in self.launches:
                again(tensors)
        return new


def cache_key(problem: Problem | VarlenProblem, *more: Tensor) -> Hashable:
    """What decides how a plain problem's kernels are started; None if it is not plain.

    more: tensors beside Q, K and V.
    """
    p = problem
    if isinstance(p, VarlenProblem) or p.attn_mask is not None or p.alibi_slopes is not None:
        return None
    if (
        p.key_lengths is not None
        or p.mask_table is not None
        or p.seed is not None
        or (p.bias is not None and p.bias.dim())
    ):
        return None
    q = p.query
    # Kernels are compiled for dtypes, and for addresses that are a multiple of 16 or are not.
    tensors = tuple((t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in (q, p.key, p.value, *more))
    numbers = (p.scale, None if p.bias is None else p.bias.item(), p.left, p.right, p.query_offset, p.fast, p.softcap)
    tables = (tuning.kernel_config, tuple(tuning.ATOMIC_DQ_MIN_QUERIES.items()), tuning.WARP_SPECIALIZED)
    special = tuple(tuning.HOPPER_CONFIGS[kernel].get(q.shape[-1]) for kernel in tuning.WARP_SPECIALIZED)
    precision = None
    if q.dtype is torch.float32:
        precision = (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)  # type: ignore[attr-defined]
    return tensors, q.device, numbers, p.deterministic, tables, special, precision


def lookup(key: Hashable) -> CachedCall | None:
    """How a call is repeated."""
    return _cache.get(key)


def clear() -> None:
    """As if no call had been made before."""
    _cache.clear()
    _seen.clear()


def store(
    key: Hashable, launches: list[Launched], inputs: dict[str, Tensor], outputs: dict[str, Tensor | None]
) -> None:
    """Remember a call by what it started, if it is not the first of its kind and no other tensors were part of it."""
    if key not in _seen:
        if len(_seen) >= 4 * _MAX_ENTRIES:
            _seen.clear()
        _seen.add(key)
        return
    new = {name: t for name, t in outputs.items() if t is not None}
    tensors = inputs | new
    found = []
    for s in launches:
        named = {
            parameter: _named(parameter, x, tensors) for parameter, x in s.arguments.items() if _tensor(x) is not None
        }
        if None in named.values():
            return
        found.append(CachedLaunch(s, {parameter: x for parameter, x in named.items() if x is not None}))
    if not new.keys() <= {x.name for again in found for x in again.tensors.values()}:
        return
    if len(_cache) >= _MAX_ENTRIES:
        _cache.clear()
    _cache[key] = CachedCall(found, {name: OutputSpec(t.shape, t.stride(), t.dtype) for name, t in new.items()})


def _tensor(x: Any) -> Tensor | None:
    """The tensor that an argument is, or is the descriptor of."""
    x = getattr(x, "base", x) if not isinstance(x, Tensor) else x
    return x if isinstance(x, Tensor) else None


def _named(parameter: str, x: Any, tensors: dict[str, Tensor]) -> TensorRef | None:
    """The name of an argument's tensor: the parameter's own, for one tensor may be query, key and value."""
    t = _tensor(x)
    names = [name for name, other in tensors.items() if other is t]
    if not names:
        return None
    described = None
    if t is not x:
        described = copy.copy(x)
        described.base = None
    return TensorRef(parameter if parameter in names else names[0], described)
