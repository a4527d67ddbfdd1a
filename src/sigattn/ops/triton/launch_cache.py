"""Cache of whole passes: a model calls attention with the same shapes again and again.

``run`` calls a function that prepares and launches the kernels of a pass. The second call with a key is recorded (a
first may be the only one): each operator of PyTorch and each launch is a step, a function and its arguments, in which a
slot stands for a tensor of the call or of an earlier step. From the third call on, only the steps are run, with other
tensors in the slots. The key has all else: dtype, sizes, strides, device and alignment of each tensor, the numbers and
flags of the problem, and settings. A pass that reads a tensor's values, or launches a kernel with a tensor of unknown
origin, is not stored. Entries hold no tensors.

With ``tuning.DIRECT_LAUNCH`` a step starts the compiled kernel itself, instead of through Triton, which binds and
specialises every argument again (30 µs). That is done with the versions of Triton for which
``tests/ops/compiled/test_direct_launch.py`` has shown that both pass the same arguments; others launch through Triton.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem
from sigattn.ops.triton import tuning

_MAX_ENTRIES = 512
_cache: dict[Hashable, Pass | None] = {}  # None: not to be stored
_seen: set[Hashable] = set()
_state = threading.local()  # .recording: that of a pass in this thread

R = TypeVar("R")
Fill = Callable[[list[Any]], Any]  # returns an argument, given the tensors in the slots


def run(function: Callable[..., R], problem: Problem | VarlenProblem | KVCacheProblem, *rest: Any) -> R:
    """Return ``function(problem, *rest)``, from the cache if the call has been recorded.

    function: returns a tensor, or a tuple of tensors and None; it depends on nothing but its arguments and settings.
    rest: tensors, or hashable values.
    """
    tensors: list[Tensor] = []
    kind: Any = type(problem)
    count = _num_tensors(kind)
    key: list[Any] = [function, kind, *problem[count:]]
    for x in (*problem[:count], *rest):
        if not isinstance(x, Tensor):
            key.append(x)
        elif x is problem.bias and not x.dim():  # a number
            key.append(x.item())
        else:
            tensors.append(x)
            # Kernels are compiled for dtypes, and for addresses that are a multiple of 16 or are not.
            key += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16)
    key += _settings(problem.query)
    found = tuple(key)
    if (stored := _cache.get(found)) is not None:
        return stored(tensors)
    if found in _cache or not _is_second(found):
        return function(problem, *rest)
    return _record(found, function, (problem, *rest))


@functools.cache
def _num_tensors(kind: Any) -> int:
    """Return the number of fields of a class of problems that are tensors or None, which come first."""
    return sum("Tensor" in field.__forward_arg__ for field in kind.__annotations__.values())


def clear() -> None:
    """Clear the cache."""
    _cache.clear()
    _seen.clear()


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, options: dict[str, int], arguments: dict[str, Any]
) -> None:
    """Launch a kernel through Triton, as a step of the pass that is recorded."""
    options = {**options, "enable_fp_fusion": True}  # Triton 3.9 warns that its default will change
    recording: Recording | None = getattr(_state, "recording", None)
    with _on(device), torch._C.DisableTorchFunction():
        compiled = kernel[grid](**arguments, **options)
    if recording is None:
        return
    if tuning.DIRECT_LAUNCH and compiled is not None:  # None in Triton's interpreter
        ordered = [arguments.get(name) for name in kernel.arg_names]
        recording.add(compiled[(*grid, *(1,) * (3 - len(grid)))], ordered, {}, None)
    else:
        recording.add(kernel[grid], (), {**arguments, **options}, None)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


def _settings(query: Tensor) -> tuple[Any, ...]:
    """Return what a pass depends on besides its arguments."""
    hopper = tuple(tuning.HOPPER_CONFIGS.items())
    precision = None
    if query.dtype is torch.float32:
        precision = (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)  # type: ignore[attr-defined]
    tables = tuning.kernel_config, tuning.decode_config, tuning.TMA_MIN_WEIGHTS, hopper
    return *tables, tuning.DIRECT_LAUNCH, precision


def _is_second(key: Hashable) -> bool:
    if key in _seen:
        return True
    if len(_seen) >= 4 * _MAX_ENTRIES:
        _seen.clear()
    _seen.add(key)
    return False


def _record(key: Hashable, function: Callable[..., R], arguments: Sequence[Any]) -> R:
    """Call a function, and store its steps."""
    problem, *rest = arguments
    used: set[int] = set()
    tensors: list[Tensor] = []

    def distinct(x: Any) -> Any:  # one tensor may be query, key and value: another call's are three
        if not isinstance(x, Tensor) or (x is problem.bias and not x.dim()):
            return x
        tensors.append(x.detach() if id(x) in used else x)
        used.add(id(x))
        return tensors[-1]

    problem = type(problem)(*map(distinct, problem))
    rest = [distinct(x) for x in rest]
    recording = Recording(tensors, problem.bias)
    _state.recording = recording
    try:
        with recording:
            result = function(problem, *rest)
    finally:
        _state.recording = None
    if len(_cache) >= _MAX_ENTRIES:
        _cache.clear()
    _cache[key] = recording.finish(result, problem.query.device)
    return result


class Step(NamedTuple):
    """Call of a function: its arguments, and the slot of its result, those of a tuple, or None."""

    function: Callable[..., Any]
    args: Fill
    kwargs: Fill
    slots: int | list[int | None] | None

    def __call__(self, values: list[Any]) -> None:
        result = self.function(*self.args(values), **self.kwargs(values))
        if isinstance(self.slots, int):
            values[self.slots] = result
        elif self.slots is not None:
            for slot, x in zip(self.slots, result, strict=True):
                if slot is not None:
                    values[slot] = x


class Pass(NamedTuple):
    """Steps of a pass, number of its slots, of which the first are the tensors of the call, and its result."""

    steps: list[Step]
    num_slots: int
    result: Fill
    device: torch.device

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Run the steps with other tensors, and return the result."""
        values = tensors + [None] * (self.num_slots - len(tensors))
        with _on(self.device):
            for step in self.steps:
                step(values)
        return self.result(values)


# What may be asked of a tensor without a result that depends on its values. (An address counts as its alignment.)
_METADATA = frozenset([
    "__get__", "__hash__", "__len__", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
])  # fmt: skip


class Recording(TorchFunctionMode):
    """Records the steps of a pass: operators of PyTorch by itself, launches by ``add``."""

    def __init__(self, tensors: list[Tensor], bias: Tensor | None) -> None:
        super().__init__()
        self.known = list(tensors)  # by slot; held, so that no other tensor gets the id of one of them
        self.slots: dict[int, int] = {id(t): slot for slot, t in enumerate(tensors)}
        self.number = bias if bias is not None and not bias.dim() else None
        self.steps: list[tuple[bool, set[int], Step]] = []  # whether it must be kept, the slots that it uses
        self.is_complete = True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, and record it if it returns or changes tensors."""
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if (isinstance(result, (Tensor, tuple, list)) and _tensors(result)) or name == "__setitem__":
            self.add(function, args, kwargs or {}, result, changes=name == "__setitem__" or _is_in_place(name, kwargs))
        elif name not in _METADATA and not (name == "item" and args[0] is self.number):
            self.is_complete &= not any(isinstance(x, (Tensor, tuple, list)) for x in args)
        return result

    def add(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, changes: bool = True
    ) -> None:
        """Record a call; changes: True if it does more than to return new tensors."""
        used: set[int] = set()
        fill_args, fill_kwargs = (self._template(x, used) or _constant(x) for x in (tuple(args), kwargs))
        new = [id(t) not in self.slots for t in _tensors(result)]
        if not changes and not any(new):
            return  # such as a contiguous tensor's ``contiguous``
        slots: int | list[int | None] | None = self._slot(result) if isinstance(result, Tensor) else None
        if isinstance(result, (tuple, list)):
            slots = [self._slot(x) if isinstance(x, Tensor) else None for x in result]
        self.steps.append((changes, used, Step(function, fill_args, fill_kwargs, slots)))

    def _slot(self, t: Tensor) -> int:
        """Return the slot of a tensor, a new one for an unknown tensor."""
        if id(t) not in self.slots:
            self.slots[id(t)] = len(self.known)
            self.known.append(t)
        return self.slots[id(t)]

    def _template(self, x: Any, used: set[int]) -> Fill | None:
        """Return the function that fills in an argument's tensors, or None if it has none."""
        if isinstance(x, Tensor):
            if id(x) not in self.slots:
                self.is_complete = False
                return None
            used.add(self.slots[id(x)])
            return operator.itemgetter(self.slots[id(x)])
        if isinstance(getattr(x, "base", None), Tensor):
            return _fill_descriptor(x, self._template(x.base, used))
        if isinstance(x, (tuple, list)):
            fills = [self._template(field, used) for field in x]
            return _fill_fields(x, fills) if any(fills) else None
        if isinstance(x, dict):
            names, fill = tuple(x), self._template(tuple(x.values()), used)
            return None if fill is None else lambda values: dict(zip(names, fill(values), strict=True))
        return None

    def finish(self, result: Any, device: torch.device) -> Pass | None:
        """Return the steps without those that nothing needs, or None if the pass must not be stored."""
        needed: set[int] = set()
        fill = self._template(result, needed)
        if not self.is_complete or fill is None:
            return None
        steps = []
        for must_be_kept, used, step in reversed(self.steps):
            made = {step.slots} if isinstance(step.slots, int) else set(step.slots or ())
            if must_be_kept or made & needed:
                needed |= used
                steps.append(step)
        return Pass(steps[::-1], len(self.known), fill, device)


def _is_in_place(name: str, kwargs: dict[str, Any] | None) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or bool(kwargs and "out" in kwargs)


def _tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [t for t in x if isinstance(t, Tensor)] if x is not None else []


def _constant(x: Any) -> Fill:
    return lambda values: x


def _fill_descriptor(descriptor: Any, base: Fill | None) -> Fill | None:
    """Return the function that makes a TMA descriptor of another tensor."""
    if base is None:
        return None
    new, kind, fields = object.__new__, type(descriptor), {**vars(descriptor), "base": None}

    def fill(values: list[Any]) -> Any:  # ``copy.copy`` would take three times as long
        filled = new(kind)
        filled.__dict__.update(fields, base=base(values))
        return filled

    return fill


def _fill_fields(x: Sequence[Any], fills: list[Fill | None]) -> Fill:
    """Return the function that makes a tuple, a named tuple or a list with other tensors."""
    constants = [None if fill else field for field, fill in zip(x, fills, strict=True)]
    positions = [(position, fill) for position, fill in enumerate(fills) if fill]
    make: Callable[[list[Any]], Any] = getattr(type(x), "_make", type(x))

    def fill(values: list[Any]) -> Any:
        fields = constants.copy()
        for position, field in positions:
            fields[position] = field(values)
        return make(fields)

    return fill
