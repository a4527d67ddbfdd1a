"""Kernels of sigmoid attention in float32 for the vector units of a CPU, as LLVM's intermediate representation.

Products are made in microtiles of R rows and C vectors, whose sums stay in registers. The forward pass computes σ where
a microtile of logits is complete, and multiplies it with the values at once (Algorithm 1). The backward pass goes over
tiles of keys (Algorithm 2): it computes the weights again, and all five products of a tile while its numbers are in the
nearest cache. A kernel takes tasks from a counter until none is left, so that it may run on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from llvmlite import ir

from sigattn.ops.llvm.builder import FLOAT, INT32, INT64, POINTER, Builder, function, int64

_TENSORS = ("query", "key", "value", "bias", "slopes", "lengths", "keys", "values", "out")
_GRADIENTS = ("grad_out", "grad_query", "grad_key", "grad_value", "row_sums")
_STRIDED = ("query", "key", "value", "bias", "out", "grad_out", "grad_query", "grad_key", "grad_value")
_NUMBERS = ("scale", "heads", "repeat", "n", "m", "left", "right", "query_offset", "parts")
# Arguments of a kernel, 64 bits each. Strides are those of samples, heads and rows. Packed ``keys`` and ``values`` have
# room for m rounded up to a tile. ``row_sums`` is (parts, B, Hq, N, 3), ``grad_query`` has a part's stride as well.
FIELDS = (
    "counter", "tasks", *_TENSORS, *_GRADIENTS, *(f"{name}_{axis}" for name in _STRIDED for axis in "bhn"), "slopes_b",
    "grad_query_part", *_NUMBERS,
)  # fmt: skip

FORWARD_ROWS = 192  # queries of a task
_BACKWARD_ROWS = 96  # queries whose weights are kept until the products of the transposed tile
ANYWHERE = 1 << 40  # a window side without a limit


class Registers(NamedTuple):
    """Vector registers of a processor: numbers in a vector, and rows and vectors of a microtile."""

    lanes: int
    rows: int
    columns: int

    @property
    def tile(self) -> int:
        """Columns of a microtile."""
        return self.lanes * self.columns


class Kind(NamedTuple):
    """Properties for which kernels are compiled.

    Attributes:
        registers: the processor's. head_dim, value_dim: D and Dv, multiples of the lanes. alibi: True with slopes.
            sums: True for the gradients of bias and slopes.
    """

    registers: Registers
    head_dim: int
    value_dim: int
    alibi: bool
    sums: bool


def make_module(kind: Kind, direction: str) -> ir.Module:
    """Return the module with the kernels ``pack`` and ``forward``, or with ``backward``."""
    module = ir.Module("sigattn")
    kernels = _Kernels(module, kind)
    if direction == "forward":
        kernels.pack()
        kernels.forward()
    else:
        kernels.backward()
    return module


def _read_arguments(builder: Builder, data: Any) -> SimpleNamespace:
    """Read the arguments of a kernel, by name."""

    def read(index: int, name: str) -> Any:
        kind = POINTER if name in (*_TENSORS, *_GRADIENTS) else FLOAT if name == "scale" else INT64
        return builder.load(builder.gep(data, [int64(index)], source_etype=INT64), typ=kind)

    return SimpleNamespace(**{name: read(index, name) for index, name in enumerate(FIELDS) if name != "counter"})


class _Kernels:
    """Functions of one module."""

    def __init__(self, module: ir.Module, kind: Kind) -> None:
        self.module, self.kind, self.registers = module, kind, kind.registers
        self._functions: dict[tuple[Any, ...], ir.Function] = {}

    def _call(self, b: Builder, make: Callable[..., ir.Function], sizes: tuple[int, ...], arguments: list[Any]) -> None:
        """Call the function that ``make`` makes for some sizes, made at its first call."""
        key = (make.__name__, *sizes)
        if key not in self._functions:
            self._functions[key] = make(*sizes)
        b.call(self._functions[key], [int64(a) for a in arguments])

    def _function(self, name: str, *arguments: Any) -> tuple[Builder, Any]:
        builder, values = function(self.module, name, arguments, self.registers.lanes)
        builder.function.linkage = "internal"
        builder.function.attributes.add("noinline")  # inlining doubles the time of compilation
        return builder, values

    def _multiply(
        self, b: Builder, rows: int, columns: int, left: Any, row: Any, column: Any, right: Any, stride: Any, size: Any,
        sums: list[Any],
    ) -> list[Any]:  # fmt: skip
        """Add Σ_k left[r · row + k · column] · right[k · stride + …] to sums, ``rows`` × ``columns`` vectors."""
        starts = [b.at(left, b.times(r, row)) for r in range(rows)]

        def body(k: Any, *sums: Any) -> list[Any]:
            line = b.at(right, b.times(k, stride))
            vectors = [b.read_vector(b.at(line, c * b.lanes)) for c in range(columns)]
            new = []
            for r in range(rows):
                x = b.splat(b.read(b.at(starts[r], b.times(k, column))))
                new += [b.multiply_add(x, vectors[c], sums[r * columns + c]) for c in range(columns)]
            return new

        return b.loop(0, size, 1, body, sums)

    def _logits(self, b: Builder, rows: int, left: Any, row: Any, packed: Any, size: int) -> list[Any]:
        """Return the products of rows and packed keys or values, one microtile."""
        columns, zero = self.registers.columns, b.constant(0.0)
        return self._multiply(
            b, rows, columns, left, row, 1, packed, self.registers.tile, size, [zero] * (rows * columns)
        )

    def _weights(self, rows: int) -> ir.Function:
        """Make σ(scale · Q Kᵀ + bias) of one microtile, 0 for hidden keys.

        Arguments: queries and their stride, packed keys, scale, the rows' biases and their stride, slopes, position of
        the first query minus that of the first key, the largest and the smallest visible column of the first row (at
        the end of the keys and left of them if there is no limit), the number of columns that exist, and the weights
        with their stride.
        """
        b, arguments = self._function(
            f"weights{rows}", POINTER, INT64, POINTER, FLOAT, POINTER, INT64, POINTER, INT64, INT64, INT64, INT64,
            POINTER, INT64,
        )  # fmt: skip
        query, stride, keys, scale, biases, bias_stride, slopes, distance, first, last, count, out, out_stride = (
            arguments
        )
        sums = self._logits(b, rows, query, stride, keys, self.kind.head_dim)
        factor, zero = b.splat(scale), b.constant(0.0)
        if self.kind.alibi:
            before, after = (b.splat(b.read(b.at(slopes, side))) for side in range(2))
        for r in range(rows):
            bias = b.splat(b.read(b.at(biases, b.times(r, bias_stride))))
            low = self._column(b, b.plus(first, r))
            high = self._column(b, b.least(b.plus(last, r), b.minus(count, 1)))
            for c in range(self.registers.columns):
                term = bias
                if self.kind.alibi:
                    for slope, gap in zip((before, after), self._distances(b, distance, r, c), strict=True):
                        term = b.multiply_add(b.fneg(slope), gap, term)
                weight = b.sigmoid(b.multiply_add(sums[r * self.registers.columns + c], factor, term))
                column = b.add(b.lane_indices(), b.splat(ir.Constant(INT32, c * b.lanes)))
                visible = b.and_(b.icmp_signed(">=", column, low), b.icmp_signed("<=", column, high))
                b.write_vector(b.select(visible, weight, zero), b.at(out, b.times(r, out_stride), c * b.lanes))
        b.ret_void()
        return b.function

    def _column(self, b: Builder, index: Any) -> Any:
        """Return a vector of an index of a column, limited to 32 bits."""
        limited = b.most(b.least(index, self.registers.tile), -1)
        return b.splat(b.trunc(limited, INT32))

    def _distances(self, b: Builder, distance: Any, row: int, column: int) -> tuple[Any, Any]:
        """Return the distances to keys before and after a query of a microtile."""
        first = b.splat(b.sitofp(b.plus(distance, row - column * b.lanes), FLOAT))
        gap = b.fsub(first, b.sitofp(b.lane_indices(), b.vector))
        zero = b.constant(0.0)
        is_before = b.fcmp_ordered(">", gap, zero)
        return b.select(is_before, gap, zero), b.select(is_before, zero, b.fneg(gap))

    def _score_gradient(self, rows: int) -> ir.Function:
        """Make dS = scale · P (1 - P) · (dO Vᵀ) of one microtile, and add the sums of its rows.

        Arguments: gradients of the output and their stride, packed values, the weights, scale, distance as for the
        weights, the result, and the row sums.
        """
        b, (grad, stride, values, weights, scale, distance, out, sums) = self._function(
            f"score_gradient{rows}", POINTER, INT64, POINTER, POINTER, FLOAT, INT64, POINTER, POINTER
        )
        products = self._logits(b, rows, grad, stride, values, self.kind.value_dim)
        factor, columns = b.splat(scale), self.registers.columns
        for r in range(rows):
            totals = [b.constant(0.0)] * 3
            for c in range(columns):
                at = (r * columns + c) * b.lanes
                weight = b.read_vector(b.at(weights, at))
                slope = b.multiply_add(b.fneg(weight), weight, weight)
                hidden = b.fcmp_ordered("==", weight, b.constant(0.0))  # also if its value is NaN
                gradient = b.select(hidden, b.constant(0.0), b.fmul(products[r * columns + c], slope))
                b.write_vector(b.fmul(gradient, factor), b.at(out, at))
                if self.kind.sums:
                    factors = (b.constant(1.0), *(self._distances(b, distance, r, c) if self.kind.alibi else ()))
                    totals[: len(factors)] = [
                        b.multiply_add(gradient, f, t) for f, t in zip(factors, totals, strict=False)
                    ]
            if self.kind.sums:
                for i in range(3 if self.kind.alibi else 1):
                    address = b.at(sums, 3 * r + i)
                    b.store(b.fadd(b.read(address), b.sum_of(totals[i])), address)
        b.ret_void()
        return b.function

    def _add_product(self, rows: int, width: int) -> ir.Function:
        """Make out += left · right for rows of ``width`` numbers.

        Arguments: left and its strides of rows and columns, right and its stride, the number of its rows, and out with
        its stride.
        """
        b, (left, row, column, right, stride, size, out, out_stride) = self._function(
            f"add_product{rows}x{width}", POINTER, INT64, INT64, POINTER, INT64, INT64, POINTER, INT64
        )
        for start in range(0, width, self.registers.tile):
            columns = min(self.registers.columns, (width - start) // b.lanes)
            targets = [
                b.at(out, b.times(r, out_stride), start + c * b.lanes) for r in range(rows) for c in range(columns)
            ]
            sums = self._multiply(
                b,
                rows,
                columns,
                left,
                row,
                column,
                b.at(right, start),
                stride,
                size,
                [b.read_vector(t) for t in targets],
            )
            for vector, target in zip(sums, targets, strict=True):
                b.write_vector(vector, target)
        b.ret_void()
        return b.function

    def _kernel(
        self, name: str, emit: Callable[[Builder, SimpleNamespace, Any, list[Any]], None], scratch: tuple[int, ...]
    ) -> None:
        """Make a kernel, which calls ``emit`` for each task with the task's number and scratch memory."""
        b, (data,) = function(self.module, name, (POINTER,), self.registers.lanes)
        call = _read_arguments(b, data)
        memory = [b.alloca(FLOAT, size) for size in scratch]
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

    def _head(self, b: Builder, call: SimpleNamespace, name: str, sample: Any, head: Any) -> Any:
        """Return the address of a head of a tensor."""
        strides = (getattr(call, f"{name}_{axis}") for axis in "bh")
        return b.at(getattr(call, name), *(b.times(i, s) for i, s in zip((sample, head), strides, strict=True)))

    def _length(self, b: Builder, call: SimpleNamespace, sample: Any) -> Any:
        return b.load(b.gep(call.lengths, [sample], source_etype=INT64), typ=INT64)

    def _slopes(self, b: Builder, call: SimpleNamespace, sample: Any, head: Any) -> Any:
        return b.at(call.slopes, b.times(sample, call.slopes_b), b.times(head, 2))

    def _pack(self, b: Builder, rows: Any, stride: Any, size: int, first: Any, last: Any, count: Any, out: Any) -> None:
        """Write rows first … last - 1 as microtiles' right factors, (size, tile) each; 0 beyond ``count`` rows."""
        tile = self.registers.tile

        def one(start: Any) -> None:
            target = b.at(out, b.times(start, size))
            existing = b.most(b.least(b.minus(count, start), tile), 0)

            def row(i: Any) -> None:
                source = b.at(rows, b.times(b.plus(start, i), stride))
                b.loop(
                    0, size, 1, lambda d: b.store(b.read(b.at(source, d)), b.at(target, b.times(d, tile), i)) and None
                )

            def nothing(i: Any) -> None:
                zero = ir.Constant(FLOAT, 0.0)
                b.loop(0, size, 1, lambda d: b.store(zero, b.at(target, b.times(d, tile), i)) and None)

            b.loop(0, existing, 1, row)
            b.loop(existing, tile, 1, nothing)

        b.loop(first, last, tile, one)

    def _clear(self, b: Builder, rows: Any, stride: Any, first: Any, last: Any, width: int) -> None:
        """Write zeros to rows first … last - 1."""

        def row(i: Any) -> None:
            for at in range(0, width, b.lanes):
                b.write_vector(b.constant(0.0), b.at(rows, b.times(i, stride), at))

        b.loop(first, last, 1, row)

    def _tiles(self, b: Builder, count: Any) -> Any:
        """Return a number of keys rounded up to whole tiles."""
        return b.round_down(b.plus(count, self.registers.tile - 1), self.registers.tile)

    def pack(self) -> None:
        """Make the kernel ``pack``, with a task for each key head."""
        size = self.kind.head_dim

        def head(b: Builder, call: SimpleNamespace, task: Any, _: list[Any]) -> None:
            kv = b.sdiv(call.heads, call.repeat)
            source = self._head(b, call, "key", b.sdiv(task, kv), b.srem(task, kv))
            whole = self._tiles(b, call.m)
            out = b.at(call.keys, b.times(task, b.times(whole, size)))
            self._pack(b, source, call.key_n, size, 0, whole, call.m, out)

        self._kernel("pack", head, ())

    def forward(self) -> None:
        """Make the kernel ``forward``, with a task for each block of queries of each head."""
        tile, rows = self.registers.tile, self.registers.rows
        wide = 2 * tile
        size, width = self.kind.head_dim, self.kind.value_dim

        def block(b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
            blocks = b.sdiv(b.plus(call.n, FORWARD_ROWS - 1), int64(FORWARD_ROWS))
            number, index = b.sdiv(task, blocks), b.srem(task, blocks)
            sample, head = b.sdiv(number, call.heads), b.srem(number, call.heads)
            first = b.times(b.minus(b.minus(blocks, 1), index), FORWARD_ROWS)  # the longest rows of a causal mask first
            count = b.least(b.minus(call.n, first), FORWARD_ROWS)
            kv = b.sdiv(head, call.repeat)
            query = b.at(self._head(b, call, "query", sample, head), b.times(first, call.query_n))
            bias = b.at(self._head(b, call, "bias", sample, head), b.times(first, call.bias_n))
            out = b.at(self._head(b, call, "out", sample, head), b.times(first, call.out_n))
            value = self._head(b, call, "value", sample, kv)
            slopes = self._slopes(b, call, sample, head)
            key_head = b.plus(b.times(sample, b.sdiv(call.heads, call.repeat)), kv)
            keys = b.at(call.keys, b.times(key_head, b.times(self._tiles(b, call.m), size)))
            length = self._length(b, call, sample)
            position = b.plus(first, call.query_offset)  # of the first query
            self._clear(b, out, call.out_n, 0, count, width)
            start = b.round_down(b.most(b.minus(position, call.left), 0), wide)
            stop = b.least(length, b.plus(position, count, call.right))

            def columns(c: Any) -> None:
                def microtile(m: Any, r: int) -> None:
                    own = b.plus(position, m)
                    sees = b.and_(
                        b.less(c, b.plus(own, r, call.right)), b.less(b.minus(own, call.left), b.plus(c, wide))
                    )

                    def products() -> None:
                        existing = b.least(b.minus(length, c), wide)

                        def part(w: Any) -> None:
                            at = b.plus(c, w)
                            self._call(
                                b, self._weights, (r,),
                                [
                                    b.at(query, b.times(m, call.query_n)), call.query_n, b.at(keys, b.times(at, size)),
                                    call.scale, b.at(bias, b.times(m, call.bias_n)), call.bias_n, slopes,
                                    b.minus(own, at), b.minus(b.minus(own, call.left), at),
                                    b.minus(b.plus(own, call.right), at), b.minus(length, at), b.at(memory[0], w),
                                    int64(wide),
                                ],
                            )  # fmt: skip

                        b.loop(0, existing, tile, part)
                        self._call(
                            b, self._add_product, (r, width),
                            [
                                memory[0], int64(wide), int64(1), b.at(value, b.times(c, call.value_n)), call.value_n,
                                existing, b.at(out, b.times(m, call.out_n)), call.out_n,
                            ],
                        )  # fmt: skip

                    b.when(sees, products)

                b.by_rows(count, rows, microtile)

            b.loop(start, stop, wide, columns)

        self._kernel("forward", block, (rows * wide,))

    def backward(self) -> None:
        """Make the kernel ``backward``, with ``parts`` tasks for each key head, one for each part of its keys."""
        tile, rows = self.registers.tile, self.registers.rows
        size, width = self.kind.head_dim, self.kind.value_dim

        def part(b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
            kv_heads = b.sdiv(call.heads, call.repeat)
            part, number = b.srem(task, call.parts), b.sdiv(task, call.parts)
            sample, kv = b.sdiv(number, kv_heads), b.srem(number, kv_heads)
            whole, length = self._tiles(b, call.m), self._length(b, call, sample)
            step = self._tiles(b, b.sdiv(b.plus(call.m, b.minus(call.parts, 1)), call.parts))
            first = b.least(b.times(part, step), call.m)
            last = b.least(b.plus(first, step), call.m)  # of the keys
            key, value = (self._head(b, call, name, sample, kv) for name in ("key", "value"))
            grad_key, grad_value = (self._head(b, call, name, sample, kv) for name in ("grad_key", "grad_value"))
            keys = b.at(call.keys, b.times(number, b.times(whole, size)))
            values = b.at(call.values, b.times(number, b.times(whole, width)))
            self._pack(b, key, call.key_n, size, first, last, call.m, keys)
            self._pack(b, value, call.value_n, width, first, last, call.m, values)
            self._clear(b, grad_key, call.grad_key_n, first, last, size)
            self._clear(b, grad_value, call.grad_value_n, first, last, width)

            def query_head(i: Any) -> None:
                head = b.plus(b.times(kv, call.repeat), i)
                tensors = {name: self._head(b, call, name, sample, head) for name in ("query", "bias", "grad_out")}
                grad_query = b.at(self._head(b, call, "grad_query", sample, head), b.times(part, call.grad_query_part))
                samples = b.sdiv(b.sdiv(call.tasks, call.parts), kv_heads)
                row = b.plus(b.times(b.plus(b.times(part, samples), sample), call.heads), head)
                sums = b.at(call.row_sums, b.times(row, b.times(call.n, 3)))
                slopes = self._slopes(b, call, sample, head)
                self._clear(b, grad_query, call.grad_query_n, 0, call.n, size)

                def columns(c: Any) -> None:
                    top = b.minus(b.minus(c, call.query_offset), call.right)  # the first query that sees a key
                    start = b.round_down(b.most(top, 0), _BACKWARD_ROWS)
                    end = b.minus(b.plus(c, tile, call.left), call.query_offset)
                    existing = b.least(b.minus(length, c), tile)

                    def block(at: Any) -> None:
                        count = b.least(b.minus(call.n, at), _BACKWARD_ROWS)
                        query, grad = (
                            b.at(tensors[n], b.times(at, getattr(call, f"{n}_n"))) for n in ("query", "grad_out")
                        )

                        def scores(m: Any, r: int) -> None:
                            own = b.plus(at, m, call.query_offset)
                            weights, gradient = (b.at(x, b.times(m, tile)) for x in memory)
                            self._call(
                                b, self._weights, (r,),
                                [
                                    b.at(query, b.times(m, call.query_n)), call.query_n, b.at(keys, b.times(c, size)),
                                    call.scale, b.at(tensors["bias"], b.times(b.plus(at, m), call.bias_n)), call.bias_n,
                                    slopes, b.minus(own, c), b.minus(b.minus(own, call.left), c),
                                    b.minus(b.plus(own, call.right), c), existing, weights, int64(tile),
                                ],
                            )  # fmt: skip
                            self._call(
                                b, self._score_gradient, (r,),
                                [
                                    b.at(grad, b.times(m, call.grad_out_n)), call.grad_out_n,
                                    b.at(values, b.times(c, width)), weights, call.scale, b.minus(own, c), gradient,
                                    b.at(sums, b.times(b.plus(at, m), 3)),
                                ],
                            )  # fmt: skip
                            self._call(
                                b, self._add_product, (r, size),
                                [
                                    gradient, int64(tile), int64(1), b.at(key, b.times(c, call.key_n)), call.key_n,
                                    existing, b.at(grad_query, b.times(b.plus(at, m), call.grad_query_n)),
                                    call.grad_query_n,
                                ],
                            )  # fmt: skip

                        def transposed(m: Any, r: int) -> None:
                            for left, right, name, wide in (
                                (memory[0], grad, "grad_value", width), (memory[1], query, "grad_key", size)
                            ):  # fmt: skip
                                other = "grad_out" if name == "grad_value" else "query"
                                target = grad_value if name == "grad_value" else grad_key
                                stride = getattr(call, f"{name}_n")
                                self._call(
                                    b, self._add_product, (r, wide),
                                    [
                                        b.at(left, m), int64(1), int64(tile), right, getattr(call, f"{other}_n"), count,
                                        b.at(target, b.times(b.plus(c, m), stride)), stride,
                                    ],
                                )  # fmt: skip

                        b.by_rows(count, rows, scores)
                        b.by_rows(existing, rows, transposed)

                    b.loop(start, b.least(call.n, end), _BACKWARD_ROWS, block)

                b.loop(first, b.least(last, length), tile, columns)

            b.loop(0, call.repeat, 1, query_head)

        self._kernel("backward", part, (_BACKWARD_ROWS * tile,) * 2)
