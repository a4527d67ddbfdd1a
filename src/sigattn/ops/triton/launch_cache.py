"""Recorded passes: what a pass does is prepared once for each signature (``call_cache``).

``run`` calls a function that prepares and launches the kernels of a pass. The second call of a signature is recorded (a
first may be the only one) as a Python function, in which each operator of PyTorch and each launch is a line, and whose
arguments are the tensors of a call. From the third call on, only that function runs. A pass that reads a tensor's
values, or launches a kernel with a tensor of unknown origin, is not stored. Recordings hold no tensors of a call.

With ``tuning.DIRECT_LAUNCH`` the line of a launch starts the compiled kernel itself, instead of through Triton, which
binds and specialises every argument again (30 µs).
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sigattn.ops.gradients import Prepared
from sigattn.ops.problem import KVCacheProblem, Problem, VarlenProblem
from sigattn.ops.triton import tuning

_NEW: bool | None = None  # state of a pass before its first call, in the place of a recording
_CALLED = False  # … after it
_NOT_RECORDED = True  # … if it must not be stored
_state = threading.local()  # .recording: that of a pass in this thread

R = TypeVar("R")


def run(
    prepared: Prepared, function: Callable[..., R], problem: Problem | VarlenProblem | KVCacheProblem,
    *rest: Any,
) -> R:  # fmt: skip
    """Return ``function(problem, *rest)``, by its recording if the call has been recorded.

    function: returns a tensor, or a tuple of tensors and None; it depends on nothing but its arguments and settings.
    prepared: recordings of the signature of problem and rest, by settings. rest: tensors, or hashable values.
    """
    settings = _settings(problem.query)
    stored = prepared.get(settings, _NEW)
    if callable(stored):
        bias = problem.bias
        tensors = [x for x in (*problem, *rest) if isinstance(x, Tensor) and (x is not bias or x.dim())]
        recorded: R = stored(*tensors)
        return recorded
    if stored is _CALLED:
        return _record(prepared, settings, function, problem, rest)
    if stored is _NEW:
        prepared[settings] = _CALLED
    return function(problem, *rest)


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


def _record(prepared: Prepared, settings: Hashable, function: Callable[..., R], problem: Any, rest: Sequence[Any]) -> R:
    """Call a function, and store its lines."""
    tensors: list[Tensor] = []

    def distinct(x: Any) -> Any:  # one tensor may be query, key and value: another call's are three
        if not isinstance(x, Tensor) or (x is problem.bias and not x.dim()):
            return x
        tensors.append(x.detach())
        return tensors[-1]

    call = type(problem)(*map(distinct, problem)), *map(distinct, rest)
    recording = Recording(tensors, problem.bias)
    _state.recording = recording
    try:
        with recording:
            result = function(*call)
    finally:
        _state.recording = None
    prepared[settings] = recording.finish(result, problem.query.device) or _NOT_RECORDED
    return result


# What may be asked of a tensor without a result that depends on its values. (An address counts as its alignment.)
_METADATA = frozenset([
    "__get__", "__hash__", "__len__", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
])  # fmt: skip


class Recording(TorchFunctionMode):
    """Records a pass as lines of Python: operators of PyTorch by itself, launches by ``add``."""

    def __init__(self, tensors: list[Tensor], bias: Tensor | None) -> None:
        super().__init__()
        self.parameters = ", ".join(f"t{i}" for i in range(len(tensors)))
        self.known = list(tensors)  # t0, t1, …; held, so that no other tensor gets the id of one of them
        self.index: dict[int, int] = {id(t): i for i, t in enumerate(tensors)}
        self.number = bias if bias is not None and not bias.dim() else None
        self.names: dict[str, Any] = {"on": _on, "with_base": _with_base}  # what the lines refer to
        self.lines: list[str] = []
        self.is_complete = True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, and record it if it returns or changes tensors."""
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if (isinstance(result, (Tensor, tuple, list)) and _tensors(result)) or name == "__setitem__":
            is_in_place = (name.endswith("_") and not name.endswith("__")) or "out" in (kwargs or {})
            self.add(function, args, kwargs or {}, result, changes=name == "__setitem__" or is_in_place)
        elif name not in _METADATA and not (name == "item" and args[0] is self.number):
            self.is_complete &= not any(isinstance(x, (Tensor, tuple, list)) for x in args)
        return result

    def add(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, changes: bool = True
    ) -> None:
        """Record a call; changes: True if it does more than to return new tensors."""
        if not changes and all(id(t) in self.index for t in _tensors(result)):
            return  # such as a contiguous tensor's ``contiguous``
        given = [self._code(x) for x in args] + [f"{name}={self._code(x)}" for name, x in kwargs.items()]
        targets = ""
        if isinstance(result, Tensor):
            targets = f"t{self._index(result)} = "
        elif isinstance(result, (tuple, list)):
            names = [f"t{self._index(x)}" if isinstance(x, Tensor) else "_" for x in result]
            targets = f"[{', '.join(names)}] = "
        self.lines.append(f"{targets}{self._name(function)}({', '.join(given)})")

    def _index(self, t: Tensor) -> int:
        """Return the index of a tensor, a new one for an unknown tensor."""
        if id(t) not in self.index:
            self.index[id(t)] = len(self.known)
            self.known.append(t)
        return self.index[id(t)]

    def _name(self, constant: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = constant
        return name

    def _code(self, x: Any) -> str:
        """Return an argument as code."""
        if isinstance(x, Tensor):
            if id(x) not in self.index:
                self.is_complete = False
                return "None"
            return f"t{self.index[id(x)]}"
        if isinstance(getattr(x, "base", None), Tensor):
            return f"with_base({self._name(_with_base(x, None))}, {self._code(x.base)})"
        if isinstance(x, (tuple, list)) and _tensors(x):
            fields = [self._code(field) for field in x]
            return f"{self._name(getattr(type(x), '_make', type(x)))}([{', '.join(fields)}])"
        return self._name(x)

    def finish(self, result: Any, device: torch.device) -> Callable[..., Any] | None:
        """Return the function of the lines, or None if the pass must not be stored."""
        returned = self._code(result)
        if not self.is_complete:
            return None
        header = f"def run({self.parameters}):\n with on({self._name(device)}):"
        exec("\n  ".join([header, *self.lines, f"return {returned}"]), self.names)
        run: Callable[..., Any] = self.names["run"]
        return run


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors in a value and its fields."""
    if isinstance(x, (tuple, list)):
        return [t for field in x for t in _tensors(field)]
    return [x] if isinstance(x, Tensor) else []


def _with_base(descriptor: Any, base: Tensor | None) -> Any:
    """Return a TMA descriptor of another tensor; ``copy.copy`` would take three times as long."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__, base=base)
    return other
