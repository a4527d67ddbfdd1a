"""Builder of LLVM's intermediate representation for loops over vectors of float32, and the logistic function.

Indices and sizes are 64-bit integers: Python's where they are known when a kernel is made, else values of LLVM. A pair
of bfloat16 has 32 bits, and is held as one float32 wherever it is only moved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

FLOAT = ir.FloatType()
INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
POINTER = ir.PointerType()
VOID = ir.VoidType()

_LARGEST = 87.0  # exp(x) of float32 is neither infinite nor subnormal for |x| up to this
LOG2_E = 1.44269504088896341
_LOG_2 = (0.693145751953125, 1.428606765330187045e-6)  # in two parts, of which the first has few bits
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_SQRT_HALF = 0x3F3504F3  # bits of √½
_SHIFT = 1.5 * 2**23 + 127  # the last bits of x + _SHIFT are 127 plus the integer nearest to x
_EXP2 = (0.009570101276, 0.055917859077, 0.240247443318, 0.693121790886, 0.999999284744)  # 2^x, |x| up to 1/2
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


class _BFloat16(ir.Type):
    """Type bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def int64(value: Any) -> Any:
    """Return a 64-bit integer of LLVM."""
    return ir.Constant(INT64, value) if isinstance(value, int) else value


def function(module: ir.Module, name: str, arguments: Sequence[Any], lanes: int) -> tuple[Builder, Sequence[Any]]:
    """Add a function without a result to a module; return a builder at its beginning, and its arguments."""
    made = ir.Function(module, ir.FunctionType(VOID, arguments), name)
    made.attributes.add("nounwind")
    return Builder(made, lanes), made.args


def kernel(
    module: ir.Module,
    name: str,
    lanes: int,
    fields: Mapping[str, Any],
    emit: Callable[[Builder, SimpleNamespace, Any, list[Any]], None],
    scratch: Sequence[int] = (),
) -> None:
    """Add a kernel to a module, which takes tasks from a counter until none is left.

    Args:
        lanes: number of float32 in a vector.
        fields: types of its arguments, 64 bits each, by name; the first two are "counter" and "tasks".
        emit: emits a task, given a builder, the arguments by name, the task's number and scratch memory.
        scratch: sizes of the scratch memory, in float32.
    """
    b, (data,) = function(module, name, (POINTER,), lanes)

    def argument(index: int, kind: Any) -> Any:
        return b.load(b.gep(data, [int64(index)], source_etype=INT64), typ=kind)

    items = [(index, field, kind) for index, (field, kind) in enumerate(fields.items()) if field != "counter"]
    call = SimpleNamespace(**{field: argument(index, kind) for index, field, kind in items})
    memory = [b.scratch(size) for size in scratch]
    head, inside, after = (b.append_basic_block() for _ in range(3))
    b.branch(head)
    b.position_at_end(head)
    task = b.atomic_rmw("add", data, int64(1), "monotonic")
    b.cbranch(b.less(task, call.tasks), inside, after)
    b.position_at_end(inside)
    emit(b, call, task, memory)
    b.branch(head)
    b.position_at_end(after)
    b.ret_void()


class Builder(ir.IRBuilder):
    """Builder within one function.

    Args:
        function: the function, without a block.
        lanes: number of float32 in a vector.
    """

    def __init__(self, function: ir.Function, lanes: int) -> None:
        super().__init__(function.append_basic_block())
        self.lanes = lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        self.indices = ir.VectorType(INT32, lanes)
        self.halves = ir.VectorType(INT16, lanes)

    # integers

    def plus(self, *terms: Any) -> Any:
        """Return a sum of integers."""
        known = sum(term for term in terms if isinstance(term, int))
        total = None
        for term in terms:
            if not isinstance(term, int):
                total = term if total is None else self.add(total, term)
        if total is None:
            return known
        return self.add(total, int64(known)) if known else total

    def times(self, a: Any, b: Any) -> Any:
        """Return a product of integers."""
        return a * b if isinstance(a, int) and isinstance(b, int) else self.mul(int64(a), int64(b))

    def minus(self, a: Any, b: Any) -> Any:
        """Return a difference of integers."""
        return a - b if isinstance(a, int) and isinstance(b, int) else self.sub(int64(a), int64(b))

    def less(self, a: Any, b: Any) -> Any:
        """Return a < b."""
        return self.icmp_signed("<", int64(a), int64(b))

    def equal(self, a: Any, b: Any) -> Any:
        """Return a = b."""
        return self.icmp_signed("==", int64(a), int64(b))

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller of two integers."""
        return self.select(self.less(a, b), int64(a), int64(b))

    def most(self, a: Any, b: Any) -> Any:
        """Return the larger of two integers."""
        return self.select(self.less(a, b), int64(b), int64(a))

    def round_down(self, a: Any, multiple: int) -> Any:
        """Return the largest multiple of a number up to a, which is not negative."""
        return self.minus(a, self.srem(int64(a), int64(multiple)))

    # memory

    def at(self, pointer: Any, *offsets: Any) -> Any:
        """Return the address of a float32 at the sum of some offsets."""
        return self.gep(pointer, [int64(self.plus(*offsets))], source_etype=FLOAT)

    def byte_at(self, pointer: Any, *offsets: Any) -> Any:
        """Return the address at the sum of some offsets in bytes."""
        return self.gep(pointer, [int64(self.plus(*offsets))], source_etype=INT8)

    def scratch(self, size: int) -> Any:
        """Return the address of new memory for some float32."""
        memory = self.alloca(FLOAT, size)
        memory.type = POINTER  # llvmlite's is that of a number, at which no vector can be stored
        return memory

    def read(self, pointer: Any) -> Any:
        """Read a float32."""
        return self.load(pointer, typ=FLOAT)

    def read_vector(self, pointer: Any) -> Any:
        """Read a vector at any address of a float32."""
        return self.load(pointer, align=4, typ=self.vector)

    def write_vector(self, vector: Any, pointer: Any) -> None:
        """Write a vector at any address of a float32."""
        self.store(vector, pointer, align=4)

    def prefetch(self, pointer: Any, *, to_write: bool = False) -> None:
        """Fetch a line into the nearest cache; the address may be invalid."""
        purpose, keep, data = (ir.Constant(INT32, number) for number in (int(to_write), 3, 1))
        self.intrinsic("llvm.prefetch.p0", pointer, purpose, keep, data, result=VOID)

    # vectors

    def constant(self, number: float) -> Any:
        """Return a vector of one number, rounded to float32."""
        rounded = struct.unpack("f", struct.pack("f", number))[0]
        return ir.Constant(self.vector, [ir.Constant(FLOAT, rounded)] * self.lanes)

    def index(self, number: int) -> Any:
        """Return a vector of one 32-bit integer."""
        return ir.Constant(self.indices, [ir.Constant(INT32, number)] * self.lanes)

    def splat(self, value: Any) -> Any:
        """Return a vector of one value."""
        kind = ir.VectorType(value.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.insert_element(undefined, value, ir.Constant(INT32, 0))
        return self.shuffle_vector(first, undefined, ir.Constant(self.indices, [ir.Constant(INT32, 0)] * self.lanes))

    def lane_indices(self) -> Any:
        """Return the vector 0, 1, …"""
        return ir.Constant(self.indices, [ir.Constant(INT32, i) for i in range(self.lanes)])

    def intrinsic(self, name: str, *arguments: Any, result: Any = None, fastmath: Sequence[str] = ()) -> Any:
        """Call an intrinsic function, such as "llvm.fma.v16f32", whose result is a vector or of the type given."""
        kind = ir.FunctionType(result or self.vector, [a.type for a in arguments])
        made = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.call(made, arguments, fastmath=fastmath)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a · b + c, rounded once."""
        return self.intrinsic(f"llvm.fma.v{self.lanes}f32", a, b, c)

    def dot(self, a: Any, b: Any, c: Any, has_instruction: bool) -> Any:
        """Return a₀ · b₀ + a₁ · b₁ + c for vectors of pairs of bfloat16, by one instruction of AVX512-BF16 or more."""
        if has_instruction:
            pairs = ir.VectorType(_BFloat16(), 2 * self.lanes)
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            return self.intrinsic(name, c, self.bitcast(a, pairs), self.bitcast(b, pairs))
        a, b = self.bitcast(a, self.indices), self.bitcast(b, self.indices)
        first = [self.bitcast(self.shl(x, self.index(16)), self.vector) for x in (a, b)]
        second = [self.bitcast(self.and_(x, self.index(-1 << 16)), self.vector) for x in (a, b)]
        return self.multiply_add(second[0], second[1], self.multiply_add(first[0], first[1], c))

    def read_halves(self, pointer: Any) -> Any:
        """Read as many bfloat16 as a vector has float32, as integers of 16 bits."""
        return self.load(pointer, align=4, typ=self.halves)

    def write_halves(self, vector: Any, pointer: Any, *offsets: Any) -> None:
        """Write a vector rounded to bfloat16, at the sum of some offsets, counted in bfloat16."""
        self.store(self.rounded(vector), self.gep(pointer, [int64(self.plus(*offsets))], source_etype=INT16), align=2)

    def widened(self, halves: Any) -> Any:
        """Return a vector of bfloat16, given as integers of 16 bits, as float32."""
        return self.bitcast(self.shl(self.zext(halves, self.indices), self.index(16)), self.vector)

    def rounded(self, vector: Any) -> Any:
        """Return a vector rounded to bfloat16, as integers of 16 bits."""
        return self.bitcast(self.fptrunc(vector, ir.VectorType(_BFloat16(), self.lanes)), self.halves)

    def paired(self, a: Any, b: Any) -> Any:
        """Return the vector of pairs a[0], b[0]; a[1], b[1]; … of two vectors of 16-bit integers."""
        order = [lane + which for lane in range(self.lanes) for which in (0, self.lanes)]
        kind = ir.VectorType(INT32, len(order))
        pairs = self.shuffle_vector(a, b, ir.Constant(kind, [ir.Constant(INT32, i) for i in order]))
        return self.bitcast(pairs, self.vector)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Return the columns of a square of vectors, by log2(lanes) times interleaving its halves."""
        half = self.lanes // 2
        for _ in range(half.bit_length()):
            pairs = list(zip(rows[:half], rows[half:], strict=True))
            rows = [self._interleaved(*pair, first) for pair in pairs for first in (0, half)]
        return rows

    def _interleaved(self, a: Any, b: Any, first: int) -> Any:
        """Return a[first], b[first], a[first + 1], …"""
        order = [lane + which for lane in range(first, first + self.lanes // 2) for which in (0, self.lanes)]
        return self.shuffle_vector(a, b, ir.Constant(self.indices, [ir.Constant(INT32, i) for i in order]))

    def sum_of(self, vector: Any) -> Any:
        """Return the sum of a vector's numbers, in any order."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        return self.intrinsic(name, ir.Constant(FLOAT, -0.0), vector, result=FLOAT, fastmath=("reassoc",))

    def sigmoid(self, x: Any) -> Any:
        """Return σ(x) = 1 / (1 + exp(-x)), relative error a few units of the last place; 0 below -87, NaN for NaN."""
        y, largest = self.fneg(x), self.constant(_LARGEST)
        small = self.fcmp_ordered(">", y, largest)
        y = self.select(small, largest, y)
        y = self.select(self.fcmp_ordered("<", y, self.constant(-_LARGEST)), self.constant(-_LARGEST), y)
        one = self.constant(1.0)
        weight = self.fdiv(one, self.fadd(one, self.exp(y)), flags=("arcp", "afn", "reassoc", "contract"))
        return self.select(small, self.constant(0.0), weight)

    def coarse_sigmoid(self, y: Any, has_estimate: bool) -> Any:
        """Return 1 / (1 + 2^y), relative error up to 2^-13: a small part of that of rounding it to bfloat16.

        Args:
            has_estimate: whether to estimate the reciprocal by an instruction of AVX-512.
        """
        for predicate, limit in ((">", 128.0), ("<", -126.0)):  # 2^128 is infinite; NaN remains
            y = self.select(self.fcmp_ordered(predicate, y, self.constant(limit)), self.constant(limit), y)
        shifted = self.fadd(y, self.constant(_SHIFT))
        fraction = self.fsub(y, self.fsub(shifted, self.constant(_SHIFT)))
        p = self.constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            p = self.multiply_add(p, fraction, self.constant(coefficient))
        power = self.bitcast(self.shl(self.bitcast(shifted, self.indices), self.index(23)), self.vector)
        divisor = self.multiply_add(p, power, self.constant(1.0))
        if not has_estimate:
            return self.fdiv(self.constant(1.0), divisor)
        name = "llvm.x86.avx512.rcp14.ps.512"  # relative error up to 2^-14
        all_lanes = ir.Constant(INT16, -1)
        return self.intrinsic(name, divisor, self.constant(0.0), all_lanes)

    def log(self, x: Any) -> Any:
        """Return the logarithm of positive normal numbers: a multiple of log 2 plus a polynomial (Cephes)."""
        bits = self.bitcast(x, self.indices)
        exponent = self.ashr(self.sub(bits, self.index(_SQRT_HALF)), self.index(23))
        mantissa = self.bitcast(self.sub(bits, self.shl(exponent, self.index(23))), self.vector)  # √½ … √2
        n, f = self.sitofp(exponent, self.vector), self.fsub(mantissa, self.constant(1.0))
        p = self.constant(_LOG[0])
        for coefficient in _LOG[1:]:
            p = self.multiply_add(p, f, self.constant(coefficient))
        square = self.fmul(f, f)
        y = self.multiply_add(n, self.constant(_LOG_2[1]), self.fmul(self.fmul(square, f), p))
        y = self.multiply_add(square, self.constant(-0.5), y)
        return self.multiply_add(n, self.constant(_LOG_2[0]), self.fadd(f, y))

    def exp(self, x: Any) -> Any:
        """Return e to the power of x for |x| up to ``_LARGEST``: 2^n times a polynomial (Cephes)."""
        n = self.intrinsic(f"llvm.rint.v{self.lanes}f32", self.fmul(x, self.constant(LOG2_E)))
        r = x
        for part in _LOG_2:
            r = self.multiply_add(n, self.constant(-part), r)
        p = self.constant(_EXP[0])
        for coefficient in _EXP[1:]:
            p = self.multiply_add(p, r, self.constant(coefficient))
        p = self.multiply_add(p, self.fmul(r, r), self.fadd(r, self.constant(1.0)))
        exponent = self.add(self.fptosi(n, self.indices), self.splat(ir.Constant(INT32, 127)))
        power = self.bitcast(self.shl(exponent, self.splat(ir.Constant(INT32, 23))), self.vector)
        return self.fmul(p, power)

    # control flow

    def loop(self, start: Any, stop: Any, step: int, body: Callable[..., Any], values: Sequence[Any] = ()) -> list[Any]:
        """Emit ``for i in range(start, stop, step): values = body(i, *values)``; return the last values."""
        before = self.block
        head, inside, after = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(INT64)
        index.add_incoming(int64(start), before)
        current = [self.phi(value.type) for value in values]
        for phi, value in zip(current, values, strict=True):
            phi.add_incoming(value, before)
        self.cbranch(self.less(index, stop), inside, after)
        self.position_at_end(inside)
        new = body(index, *current) or ()
        index.add_incoming(self.plus(index, step), self.block)
        for phi, value in zip(current, new, strict=True):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(after)
        return current

    def when(self, condition: Any, body: Callable[[], None]) -> None:
        """Emit ``if condition: body()``."""
        inside, after = self.append_basic_block(), self.append_basic_block()
        self.cbranch(condition, inside, after)
        self.position_at_end(inside)
        body()
        self.branch(after)
        self.position_at_end(after)

    def in_groups(self, count: Any, most: int, body: Callable[[Any, int], None]) -> None:
        """Emit ``body(first, size)`` for groups of ``most`` of count things, then for the rest; size is a constant."""
        full = self.round_down(count, most)
        self.loop(0, full, most, lambda first: body(first, most))
        after = self.append_basic_block()
        choice = self.switch(int64(self.minus(count, full)), after)
        for size in range(1, most):
            block = self.append_basic_block()
            choice.add_case(int64(size), block)
            self.position_at_end(block)
            body(full, size)
            self.branch(after)
        self.position_at_end(after)
