"""Microtiles of sigmoid attention: R rows and C vectors of a product, whose sums stay in registers.

Three functions use them, each made for 1 to R rows: the weights σ(scale · Q Kᵀ + b), the gradient of the logits, and
the product of either with rows of another tensor, added to a result. The right factors of the first two are packed:
(D, tile) for each tile of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from sigattn.ops.llvm.builder import FLOAT, INT32, INT64, POINTER, Builder, function, int64


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


class Microtiles:
    """Functions of a module that compute microtiles, each made when it is first called."""

    def __init__(self, module: ir.Module, kind: Kind) -> None:
        self.module, self.kind, self.registers = module, kind, kind.registers
        self._functions: dict[tuple[Any, ...], ir.Function] = {}

    def call(self, b: Builder, make: Callable[..., ir.Function], sizes: tuple[int, ...], arguments: list[Any]) -> None:
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

    def weights(self, rows: int) -> ir.Function:
        """Make σ(scale · Q Kᵀ + bias) of one microtile, 0 for hidden keys.

        Arguments: queries and their stride; packed keys; scale; the rows' biases and their stride; slopes; position of
        the first query minus that of the first key; the smallest and the largest column that the first row sees, which
        may lie outside the microtile; the number of columns that exist; the weights and their stride.
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

    def score_gradient(self, rows: int) -> ir.Function:
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

    def add_product(self, rows: int, width: int) -> ir.Function:
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
