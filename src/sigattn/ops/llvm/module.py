"""Module of LLVM: kernels, which take tasks from a counter, and functions that they call."""

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from sigattn.ops.llvm.arguments import KernelArguments
from sigattn.ops.llvm.builder import FLOAT, INT64, POINTER, VOID, Builder, Matrix, Pointer, Value, constant, raw_index
from sigattn.ops.llvm.processor import Registers

_FIELD_TYPES = {ctypes.c_int64: INT64, ctypes.c_float: FLOAT, ctypes.c_void_p: POINTER}


@dataclass(frozen=True)
class StridedTensor:
    """``arguments.Strided`` in a kernel."""

    data: Pointer
    batch_stride: Value
    head_stride: Value
    row_stride: Value

    def head(self, sample: Value, head: Value, element: Any = FLOAT) -> Matrix:
        """Return the rows of a head, if the strides count elements of a type."""
        data = self.data.of(element) + (sample * self.batch_stride + head * self.head_stride)
        return Matrix(data, self.row_stride)


class Module:
    """Module of LLVM. per_word: elements of a tensor in 32 bits, 1 of float32, 2 of bfloat16."""

    def __init__(self, registers: Registers, per_word: int) -> None:
        self.registers, self.per_word = registers, per_word
        self.module = ir.Module("sigattn")
        self.functions: dict[str, Any] = {}

    def add_function(self, name: str, kinds: list[Any]) -> tuple[Builder, Any]:
        """Add a function without a result; return a builder at its beginning, and the function."""
        function = ir.Function(self.module, ir.FunctionType(VOID, kinds), name)
        function.attributes.add("nounwind")
        return Builder(function, self.registers), function

    def add_kernel(
        self, name: str, emit: Callable[[Builder, SimpleNamespace, Value, list[Pointer]], None], *scratch: int
    ) -> None:
        """Add a kernel, which takes tasks from a counter until none is left, so that any number of threads may run it.

        ``emit`` emits a task, given a builder, the arguments and ``worker``, the index of the thread, the index of the
        task, and scratch memory, whose sizes are in float32.
        """
        b, function = self.add_function(name, [POINTER])
        data = Pointer(b, function.args[0], INT64)
        args = _load(data, KernelArguments)
        args.worker = self._take(b, data, "workers")
        memory = [b.scratch(size) for size in scratch]
        head, body, after = (b.ir.append_basic_block() for _ in range(3))
        b.ir.branch(head)
        b.ir.position_at_end(head)
        task = self._take(b, data, "counter")
        b.ir.cbranch((task < args.tasks).raw, body, after)
        b.ir.position_at_end(body)
        emit(b, args, task, memory)
        b.ir.branch(head)
        b.ir.position_at_end(after)
        b.ir.ret_void()

    def _take(self, b: Builder, args: Pointer, name: str) -> Value:
        """Return the next number of a counter that all threads share."""
        counter = args + getattr(KernelArguments, name).offset // 8
        return Value(b, b.ir.atomic_rmw("add", counter.raw, constant(1, INT64), "monotonic"))


def _load(data: Pointer, structure: Any) -> SimpleNamespace:
    """Return the fields of a structure that begins at an address; each has 64 bits."""
    fields: dict[str, Any] = {}
    for name, kind in structure._fields_:
        at = data + getattr(structure, name).offset // 8
        if issubclass(kind, ctypes.Structure):
            fields[name] = StridedTensor(**vars(_load(at, kind)))
        else:
            field = at.of(_FIELD_TYPES[kind]).load()
            fields[name] = Pointer(data.b, field.raw, FLOAT) if kind is ctypes.c_void_p else field
    return SimpleNamespace(**fields)


def function(method: Callable[..., None]) -> Callable[..., None]:
    """Compile a method of a module as a function, which calls of the method call.

    The method has a builder and the function's arguments; one of type int or bool is a constant, each value of which
    has its own function. Functions are not inlined: that doubles the time of compilation.
    """
    annotations = [parameter.annotation for parameter in inspect.signature(method).parameters.values()][2:]
    is_constant = [annotation in (int, bool) for annotation in annotations]

    @functools.wraps(method)
    def call(module: Module, b: Builder, *arguments: Any) -> None:
        pairs = list(zip(arguments, is_constant, strict=True))
        name = "_".join([method.__name__, *(str(argument) for argument, constant in pairs if constant)])
        values = [raw for argument, constant in pairs if not constant for raw in _raw_values(argument)]
        if name not in module.functions:
            body, made = module.add_function(name, [raw.type for raw in values])
            made.linkage = "internal"
            made.attributes.add("noinline")
            module.functions[name], parameters = made, iter(made.args)
            method(module, body, *(a if constant else _parameter(body, a, parameters) for a, constant in pairs))
            body.ir.ret_void()
        b.ir.call(module.functions[name], values)

    return call


def _raw_values(argument: Any) -> list[Any]:
    if isinstance(argument, Matrix):
        return [argument.data.raw, raw_index(argument.stride)]
    return [argument.raw if isinstance(argument, Pointer) else raw_index(argument)]


def _parameter(b: Builder, argument: Any, parameters: Iterator[Any]) -> Any:
    """Return the parameter of a function of which an argument of a call is known."""
    if isinstance(argument, Matrix):
        return Matrix(_parameter(b, argument.data, parameters), Value(b, next(parameters)))
    if isinstance(argument, Pointer):
        return Pointer(b, next(parameters), argument.element)
    return Value(b, next(parameters))
