"""Module of LLVM: kernels, which take tasks from a counter, and functions that they call."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from llvmlite import ir

from sigattn.ops.llvm.arguments import KernelArguments
from sigattn.ops.llvm.builder import (
    FLOAT,
    INT8,
    INT32,
    INT64,
    POINTER,
    VOID,
    Builder,
    Matrix,
    Pointer,
    Value,
    constant,
    raw_index,
)
from sigattn.ops.llvm.processor import Registers

# Types of a function's arguments, and of elements in memory. "Words" are float32 or pairs of bfloat16.
Index: TypeAlias = Value
Number: TypeAlias = Value
Words: TypeAlias = Pointer
Hashes: TypeAlias = Pointer
WordMatrix: TypeAlias = Matrix
ByteMatrix: TypeAlias = Matrix
_TYPES = {
    "Index": [INT64], "Number": [FLOAT], "Words": [POINTER], "Hashes": [POINTER],
    "WordMatrix": [POINTER, INT64], "ByteMatrix": [POINTER, INT64],
}  # fmt: skip
_ELEMENTS = {"Words": FLOAT, "Hashes": INT32, "WordMatrix": FLOAT, "ByteMatrix": INT8}
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
    """Module of LLVM.

    Args:
        registers: of the processor. per_word: elements of a tensor in 32 bits: 1 of float32, 2 of bfloat16.
    """

    def __init__(self, registers: Registers, per_word: int) -> None:
        self.registers, self.per_word = registers, per_word
        self.module = ir.Module("sigattn")
        self.functions: dict[tuple[Any, ...], Any] = {}

    def add_function(self, name: str, kinds: list[Any]) -> tuple[Builder, Any]:
        """Add a function without a result; return a builder at its beginning, and the function."""
        function = ir.Function(self.module, ir.FunctionType(VOID, kinds), name)
        function.attributes.add("nounwind")
        return Builder(function, self.registers), function

    def add_kernel(
        self, name: str, emit: Callable[[Builder, SimpleNamespace, Value, list[Pointer]], None], *scratch: int
    ) -> None:
        """Add a kernel, which takes tasks from a counter until none is left, so that any number of threads may run it.

        Args:
            emit: emits a task; called with a builder, the arguments and ``worker``, the index of the thread, the index
                of the task, and the scratch memory.
            scratch: sizes of the scratch memory, in float32.
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

    The method has a builder and the function's arguments, of the types above; an argument of type int or bool is a
    constant, each value of which has its own function. Functions are not inlined: that doubles the time of compilation.
    """
    kinds = [parameter.annotation for parameter in inspect.signature(method).parameters.values()][2:]

    @functools.wraps(method)
    def call(module: Module, b: Builder, *arguments: Any) -> None:
        pairs = list(zip(arguments, kinds, strict=True))
        key = (method.__name__, *(argument for argument, kind in pairs if kind not in _TYPES))
        if key not in module.functions:
            module.functions[key] = _define(module, method, kinds, key)
        values = [raw for argument, kind in pairs if kind in _TYPES for raw in _raw_values(argument)]
        b.ir.call(module.functions[key], values)

    return call


def _raw_values(argument: Any) -> list[Any]:
    if isinstance(argument, Matrix):
        return [argument.data.raw, raw_index(argument.stride)]
    return [argument.raw if isinstance(argument, Pointer) else raw_index(argument)]


def _define(module: Module, method: Callable[..., None], kinds: list[str], key: tuple[Any, ...]) -> Any:
    types = [kind for name in kinds for kind in _TYPES.get(name, [])]
    b, made = module.add_function("_".join(map(str, key)), types)
    made.linkage = "internal"
    made.attributes.add("noinline")
    constants, values, arguments = iter(key[1:]), iter(made.args), []
    for kind in kinds:
        if kind not in _TYPES:
            arguments.append(next(constants))
        elif kind not in _ELEMENTS:
            arguments.append(Value(b, next(values)))
        else:
            pointer = Pointer(b, next(values), _ELEMENTS[kind])
            arguments.append(Matrix(pointer, Value(b, next(values))) if len(_TYPES[kind]) == 2 else pointer)
    method(module, b, *arguments)
    b.ir.ret_void()
    return made
