"""Numbers and vectors with operators, loops and conditions, over LLVM's intermediate representation.

    with b.loop(0, n, b.lanes) as i:
        (out + i).store(b.fma((x + i).load_vector(), scale, (y + i).load_vector()))

A number of Python is a constant. A pair of bfloat16 has 32 bits, and is held as one float32 wherever it is only moved.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from sigattn.ops.llvm.processor import Registers

FLOAT, POINTER, VOID = ir.FloatType(), ir.PointerType(), ir.VoidType()
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SIZES = {FLOAT: 4, INT8: 1, INT16: 2, INT32: 4, INT64: 8}  # in bytes


class _BFloat16(ir.Type):
    """Type bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)


def _binary(of_integers: str, of_floats: str) -> Any:
    """Return a method that emits an instruction with two operands of one type."""
    return lambda self, other: self._emit(of_integers, of_floats, other)


def _comparison(predicate: str) -> Any:
    return lambda self, other: self._compare(predicate, other)


class Value:
    """Integer, float32, condition, or vector of these.

    Integers are signed; ``//`` truncates towards 0. Comparisons with a NaN are False, ``!=`` True.
    """

    def __init__(self, b: Builder, raw: Any) -> None:
        self.b, self.raw = b, raw

    def _raw(self, other: Any) -> Any:
        return other.raw if isinstance(other, Value) else constant(other, self.raw.type)

    @property
    def _is_float(self) -> bool:
        return getattr(self.raw.type, "element", self.raw.type) == FLOAT

    def _emit(self, of_integers: str, of_floats: str, other: Any) -> Value:
        emit = getattr(self.b.ir, of_floats if self._is_float else of_integers)
        return Value(self.b, emit(self.raw, self._raw(other)))

    def _compare(self, predicate: str, other: Any) -> Value:
        if not self._is_float:
            compare = self.b.ir.icmp_signed
        else:
            compare = self.b.ir.fcmp_unordered if predicate == "!=" else self.b.ir.fcmp_ordered
        return Value(self.b, compare(predicate, self.raw, self._raw(other)))

    __add__, __radd__ = _binary("add", "fadd"), _binary("add", "fadd")
    __sub__ = _binary("sub", "fsub")
    __mul__, __rmul__ = _binary("mul", "fmul"), _binary("mul", "fmul")
    __truediv__ = _binary("", "fdiv")
    __floordiv__, __mod__ = _binary("sdiv", ""), _binary("srem", "")
    __and__, __or__, __xor__ = _binary("and_", ""), _binary("or_", ""), _binary("xor", "")
    __lshift__, __rshift__ = _binary("shl", ""), _binary("ashr", "")
    __lt__, __le__, __gt__, __ge__ = (_comparison(p) for p in ("<", "<=", ">", ">="))
    __eq__, __ne__ = _comparison("=="), _comparison("!=")

    def __neg__(self) -> Value:
        return Value(self.b, self.b.ir.fneg(self.raw))

    def __invert__(self) -> Value:
        return Value(self.b, self.b.ir.not_(self.raw))

    def logical_shift_right(self, bits: int) -> Value:
        """Shift right, with zeros from the left."""
        return self._emit("lshr", "", bits)

    def bitcast(self, kind: Any) -> Value:
        """Return the same bits as another type."""
        return Value(self.b, self.b.ir.bitcast(self.raw, kind))

    def to_float(self) -> Value:
        """Convert an integer, or a vector of them, to float32."""
        kind = ir.VectorType(FLOAT, self.raw.type.count) if isinstance(self.raw.type, ir.VectorType) else FLOAT
        return Value(self.b, self.b.ir.sitofp(self.raw, kind))

    def to_int32(self) -> Value:
        """Convert a 64-bit integer to 32 bits."""
        return Value(self.b, self.b.ir.trunc(self.raw, INT32))


class Pointer:
    """Address of elements of one type, in which offsets are counted."""

    def __init__(self, b: Builder, raw: Any, element: Any) -> None:
        self.b, self.raw, self.element = b, raw, element

    def __add__(self, offset: Value | int) -> Pointer:
        raw = self.b.ir.gep(self.raw, [raw_index(offset)], source_etype=self.element)
        return Pointer(self.b, raw, self.element)

    def of(self, element: Any) -> Pointer:
        """Return the same address, of elements of another type."""
        return Pointer(self.b, self.raw, element)

    def load(self) -> Value:
        """Read the element."""
        return Value(self.b, self.b.ir.load(self.raw, typ=self.element))

    def load_vector(self) -> Value:
        """Read as many elements as a vector of float32 has."""
        kind = ir.VectorType(self.element, self.b.lanes)
        return Value(self.b, self.b.ir.load(self.raw, align=_SIZES[self.element], typ=kind))

    def store(self, value: Value) -> None:
        """Write an element, or a vector of them."""
        self.b.ir.store(value.raw, self.raw, align=_SIZES[self.element])


class Matrix:
    """Rows of elements: ``matrix[i]`` is the address of row i, ``matrix[i:]`` the matrix that begins with it."""

    def __init__(self, data: Pointer, stride: Value | int) -> None:
        self.data, self.stride = data, stride

    def __getitem__(self, row: Value | int | slice) -> Any:
        if isinstance(row, slice):
            return Matrix(self.data + row.start * self.stride, self.stride)
        return self.data + row * self.stride


def constant(number: int | float, kind: Any) -> Any:
    """Return a number of Python as a constant of llvmlite, in each element of a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [constant(number, kind.element)] * kind.count)
    return ir.Constant(kind, struct.unpack("f", struct.pack("f", number))[0] if kind == FLOAT else number)


def raw_index(index: Value | int) -> Any:
    """Return an index as a value of llvmlite."""
    return index.raw if isinstance(index, Value) else constant(index, INT64)


class Builder:
    """Builder of one function of llvmlite, which has no block yet."""

    def __init__(self, function: Any, registers: Registers) -> None:
        self.ir = ir.IRBuilder(function.append_basic_block())
        self.lanes, self.has_bf16, self.by_element = registers.lanes, registers.has_bf16, registers.by_element
        self.floats, self.int32s, self.int16s = (ir.VectorType(kind, self.lanes) for kind in (FLOAT, INT32, INT16))

    # loops and conditions

    @contextlib.contextmanager
    def loop(
        self, start: Value | int, stop: Value | int, step: Value | int = 1, carried: list[Value] | None = None
    ) -> Iterator[Value]:
        """Emit a loop; yield its index.

        carried: values that the loop changes. Its body replaces the list's elements, the last values after it.
        """
        before, values = self.ir.block, carried if carried is not None else []
        head, body, after = (self.ir.append_basic_block() for _ in range(3))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        index = Value(self, self.ir.phi(INT64))
        index.raw.add_incoming(raw_index(start), before)
        phis = [Value(self, self.ir.phi(value.raw.type)) for value in values]
        for phi, value in zip(phis, values, strict=True):
            phi.raw.add_incoming(value.raw, before)
        self.ir.cbranch((index < stop).raw, body, after)
        self.ir.position_at_end(body)
        values[:] = phis
        yield index
        index.raw.add_incoming((index + step).raw, self.ir.block)
        for phi, value in zip(phis, values, strict=True):
            phi.raw.add_incoming(value.raw, self.ir.block)
        self.ir.branch(head)
        self.ir.position_at_end(after)
        values[:] = phis

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emit a block that is executed if a condition is true."""
        body, after = self.ir.append_basic_block(), self.ir.append_basic_block()
        self.ir.cbranch(condition.raw, body, after)
        self.ir.position_at_end(body)
        yield
        self.ir.branch(after)
        self.ir.position_at_end(after)

    def groups(self, count: Value, size: int) -> Iterator[tuple[Value, int]]:
        """Yield first index and size of groups of ``count`` things, at most ``size`` each.

        The body of the ``for`` statement is emitted for each size, which is thus a constant: in a loop over the groups
        of the largest size, and in a branch of a switch for each other.
        """
        full = self.round_down(count, size)
        with self.loop(0, full, size) as first:
            yield first, size
        after = self.ir.append_basic_block()
        switch = self.ir.switch((count - full).raw, after)
        for rest in range(1, size):
            block = self.ir.append_basic_block()
            switch.add_case(constant(rest, INT64), block)
            self.ir.position_at_end(block)
            yield full, rest
            self.ir.branch(after)
        self.ir.position_at_end(after)

    # indices

    def minimum(self, a: Value, b: Value | int) -> Value:
        """Return the smaller of two integers."""
        return self.select(a < b, a, b)

    def maximum(self, a: Value, b: Value | int) -> Value:
        """Return the larger of two integers."""
        return self.select(a < b, b, a)

    def round_down(self, a: Value, multiple: int) -> Value:
        """Return the largest multiple of a number up to a, which is not negative."""
        return a - a % multiple

    # memory

    def scratch(self, size: int) -> Pointer:
        """Return new memory for some float32."""
        memory = self.ir.alloca(FLOAT, size)
        memory.type = POINTER  # llvmlite's is that of a number, at which no vector can be stored
        return Pointer(self, memory, FLOAT)

    # vectors

    def vector(self, number: float) -> Value:
        """Return a vector of one number, rounded to float32."""
        return Value(self, constant(number, self.floats))

    def lane_indices(self) -> Value:
        """Return the vector 0, 1, … of 32-bit integers."""
        return Value(self, ir.Constant(self.int32s, [constant(i, INT32) for i in range(self.lanes)]))

    def splat(self, value: Value) -> Value:
        """Return a vector of one value."""
        undefined = ir.Constant(ir.VectorType(value.raw.type, self.lanes), ir.Undefined)
        first = self.ir.insert_element(undefined, value.raw, constant(0, INT32))
        return Value(self, self.ir.shuffle_vector(first, undefined, constant(0, self.int32s)))

    def splat_factor(self, value: Value) -> Value:
        """Return a vector of one float32, the factor of several products.

        On ARM LLVM would load the number into all elements, which takes a vector unit as long as a multiply-add does.
        Empty assembly hides where the number comes from; it is then loaded once, and multiplied as an element.
        """
        if self.by_element:
            identity = ir.InlineAsm(ir.FunctionType(FLOAT, [FLOAT]), "", "=w,0")
            value = Value(self, self.ir.call(identity, [value.raw]))
        return self.splat(value)

    def select(self, condition: Value, a: Value | int, b: Value | int) -> Value:
        """Return a where a condition is true, else b; integers of Python are indices."""
        return Value(self, self.ir.select(condition.raw, raw_index(a), raw_index(b)))

    def select_pointer(self, condition: Value, a: Pointer, b: Pointer) -> Pointer:
        """Return a if a condition is true, else b."""
        return Pointer(self, self.ir.select(condition.raw, a.raw, b.raw), a.element)

    def intrinsic(self, name: str, *arguments: Value, kind: Any = None, fastmath: Sequence[str] = ()) -> Value:
        """Call an intrinsic function, such as "llvm.fma.v16f32"; its result is of a type, or a vector of float32."""
        signature = ir.FunctionType(kind or self.floats, [a.raw.type for a in arguments])
        function = self.ir.module.globals.get(name) or ir.Function(self.ir.module, signature, name)
        return Value(self, self.ir.call(function, [a.raw for a in arguments], fastmath=fastmath))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a · b + c, rounded once."""
        return self.intrinsic(f"llvm.fma.v{self.lanes}f32", a, b, c)

    def estimate_reciprocal(self, x: Value) -> Value:
        """Return 1 / x, relative error up to 2^-14: by an instruction of AVX-512, elsewhere exact."""
        if self.lanes < 16:
            return self.vector(1.0) / x
        all_lanes = Value(self, constant(-1, INT16))
        return self.intrinsic("llvm.x86.avx512.rcp14.ps.512", x, self.vector(0.0), all_lanes)

    def together(self, vectors: list[Value]) -> list[Value]:
        """Return the same vectors, all of which are computed before one of the results is used.

        LLVM would order chains of dependent instructions one after the other, and the processor wait for each. Empty
        assembly, which seems to change the vectors, keeps them side by side.
        """
        if len(vectors) == 1:
            return vectors
        kind, register = ir.LiteralStructType([self.floats] * len(vectors)), "w" if self.by_element else "v"
        constraints = [f"={register}"] * len(vectors) + [str(i) for i in range(len(vectors))]
        assembly = ir.InlineAsm(ir.FunctionType(kind, list(kind.elements)), "", ",".join(constraints))
        results = self.ir.call(assembly, [vector.raw for vector in vectors])
        return [Value(self, self.ir.extract_value(results, i)) for i in range(len(vectors))]

    def sum(self, vector: Value) -> Value:
        """Return the sum of a vector's numbers, in any order."""
        zero = Value(self, constant(-0.0, FLOAT))
        return self.intrinsic(
            f"llvm.vector.reduce.fadd.v{self.lanes}f32", zero, vector, kind=FLOAT, fastmath=("reassoc",)
        )

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Return some numbers of two vectors; those of the second are numbered from ``self.lanes`` on."""
        order = ir.Constant(ir.VectorType(INT32, len(lanes)), [constant(lane, INT32) for lane in lanes])
        return Value(self, self.ir.shuffle_vector(a.raw, b.raw, order))

    def interleave(self, a: Value, b: Value, start: int, stop: int) -> Value:
        """Return a[start], b[start], a[start + 1], …"""
        return self.shuffle(a, b, [lane for i in range(start, stop) for lane in (i, i + self.lanes)])

    def transpose(self, rows: list[Value]) -> list[Value]:
        """Return the columns of a square of vectors, by log2(lanes) times interleaving its halves."""
        half = self.lanes // 2
        for _ in range(half.bit_length()):
            pairs = list(zip(rows[:half], rows[half:], strict=True))
            rows = [self.interleave(*pair, start, start + half) for pair in pairs for start in (0, half)]
        return rows

    # bfloat16, as integers of 16 bits

    def dot(self, a: Value, b: Value, c: Value) -> Value:
        """Return a₀ · b₀ + a₁ · b₁ + c for vectors of pairs of bfloat16, by one instruction if there is one."""
        if self.has_bf16:
            pairs = ir.VectorType(_BFloat16(), 2 * self.lanes)
            arm, x86 = "llvm.aarch64.neon.bfdot.v4f32.v8bf16", f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            name = arm if self.by_element else x86
            return self.intrinsic(name, c, a.bitcast(pairs), b.bitcast(pairs))
        a, b = a.bitcast(self.int32s), b.bitcast(self.int32s)
        low_a, low_b = ((x << 16).bitcast(self.floats) for x in (a, b))
        high_a, high_b = ((x & (-1 << 16)).bitcast(self.floats) for x in (a, b))
        return self.fma(high_a, high_b, self.fma(low_a, low_b, c))

    def widen(self, halves: Value) -> Value:
        """Return a vector of bfloat16 as float32."""
        return (Value(self, self.ir.zext(halves.raw, self.int32s)) << 16).bitcast(self.floats)

    def round(self, vector: Value) -> Value:
        """Return a vector rounded to the nearest bfloat16, ties to even; a NaN remains one.

        Without an instruction for it, LLVM would call a library function for each number.
        """
        if self.has_bf16:
            kind = ir.VectorType(_BFloat16(), self.lanes)
            return Value(self, self.ir.fptrunc(vector.raw, kind)).bitcast(self.int16s)
        bits = vector.bitcast(self.int32s)
        high = bits.logical_shift_right(16)
        nearest = (bits + (0x7FFF + (high & 1))).logical_shift_right(16)
        halves = self.select(vector != vector, high | 0x40, nearest)  # the sum could make inf or -0 of a NaN
        return Value(self, self.ir.trunc(halves.raw, self.int16s))

    def pair(self, a: Value, b: Value) -> Value:
        """Return the vector of pairs a[0], b[0]; a[1], b[1]; … of two vectors of bfloat16."""
        return self.interleave(a, b, 0, self.lanes).bitcast(self.floats)
