"""Microtiles of sigmoid attention: R rows and C vectors of a product, whose sums stay in registers.

Factors are float32, or pairs of bfloat16 along the dimension that is summed; both have 32 bits, called words here. Sums
and all that is elementwise are float32.

Two products, each made for 1 to R rows: that with a packed right factor, (D, tile) for each tile of keys, and that with
rows of another tensor, added to a result. Other functions change the results of the first kind in place: to the weights
σ(scale · Q Kᵀ + b), to the gradient of the logits, by a mask, and by dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from sigattn.ops import dropout
from sigattn.ops.llvm.builder import FLOAT, INT8, INT32, INT64, LOG2_E, POINTER, Builder, function, int64


class Registers(NamedTuple):
    """Vector registers of a processor: numbers in a vector, and rows (even) and vectors of a microtile.

    ``has_dot`` is True if an instruction multiplies and adds pairs of bfloat16 (AVX512-BF16).
    """

    lanes: int
    rows: int
    columns: int
    has_dot: bool = False

    @property
    def tile(self) -> int:
        """Columns of a microtile."""
        return self.lanes * self.columns


class Microtiles:
    """Functions of a module that compute microtiles, each made when it is first called.

    Args:
        word: numbers in a word: 1 for float32, 2 for bfloat16.
    """

    def __init__(self, module: ir.Module, registers: Registers, word: int) -> None:
        self.module, self.registers, self.word = module, registers, word
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

    def transpose(self) -> ir.Function:
        """Make the function that transposes a square of as many rows as a vector has numbers, into rows of a tile.

        Arguments: the rows and their stride; the first row of the result.
        """
        b, (rows, stride, out) = self._function("transpose", POINTER, INT64, POINTER)
        vectors = b.transposed([b.read_vector(b.at(rows, b.times(stride, r))) for r in range(b.lanes)])
        for r, vector in enumerate(vectors):
            b.write_vector(vector, b.at(out, r * self.registers.tile))
        b.ret_void()
        return b.function

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
                for vector, total in zip(vectors, sums[r * columns : (r + 1) * columns], strict=True):
                    new.append(b.multiply_add(x, vector, total) if self.word == 1 else self._dot(b, x, vector, total))
            return new

        return b.loop(0, size, 1, body, sums)

    def _dot(self, b: Builder, x: Any, vector: Any, total: Any) -> Any:
        return b.dot(x, vector, total, self.registers.has_dot)

    def product(self, rows: int) -> ir.Function:
        """Make out = left · right for one microtile, where right is packed.

        Arguments: left and its stride, right and the number of its rows, out and its stride.
        """
        b, (left, row, right, size, out, stride) = self._function(
            f"product{rows}", POINTER, INT64, POINTER, INT64, POINTER, INT64
        )
        columns, tile = self.registers.columns, self.registers.tile
        zeros = [b.constant(0.0)] * (rows * columns)
        for i, vector in enumerate(self._multiply(b, rows, columns, left, row, 1, right, tile, size, zeros)):
            r, c = divmod(i, columns)
            b.write_vector(vector, b.at(out, b.times(r, stride), c * b.lanes))
        b.ret_void()
        return b.function

    def pairs_of_columns(self) -> ir.Function:
        """Round rows of a microtile to bfloat16, in pairs along the rows; the result may be the start of the same row.

        Arguments: the number of rows, the microtile and its stride, the result and its stride.
        """
        b, (rows, tile, stride, out, out_stride) = self._function(
            "pairs_of_columns", INT64, POINTER, INT64, POINTER, INT64
        )

        def row(r: Any) -> None:
            for c in range(self.registers.columns):
                vector = b.read_vector(b.at(tile, b.times(r, stride), c * b.lanes))
                b.write_halves(vector, b.at(out, b.times(r, out_stride)), c * b.lanes)

        b.loop(0, rows, 1, row)
        b.ret_void()
        return b.function

    def pairs_of_rows(self, rows: int) -> ir.Function:
        """Round a microtile to bfloat16, in pairs of rows, of which the last is paired with 0 if it is alone.

        Arguments: the microtile, the result.
        """
        b, (tile, out) = self._function(f"pairs_of_rows{rows}", POINTER, POINTER)
        width = self.registers.tile
        for r in range(0, rows, 2):
            for at in range(0, width, b.lanes):
                pair = [b.read_vector(b.at(tile, i * width + at)) for i in range(r, min(r + 2, rows))]
                pair = [b.rounded(x) for x in (*pair, b.constant(0.0))]
                b.write_vector(b.paired(pair[0], pair[1]), b.at(out, r // 2 * width + at))
        b.ret_void()
        return b.function

    def weights(self, alibi: bool, masked: bool) -> ir.Function:
        """Make P = σ(scale · S + bias) of rows of a microtile of S, written over S; 0 where hidden.

        Args:
            alibi, masked: whether ALiBi and an additive mask are added to the logits.

        Arguments: the number of rows; scale; the rows' biases and their stride; slopes; position of the first query
        minus that of the first key; the smallest and the largest column that the first row sees, which may lie outside
        the microtile; the number of columns that exist; S and its stride; the mask of the microtile and its stride in
        bytes.
        """
        types = INT64, FLOAT, POINTER, INT64, POINTER, INT64, INT64, INT64, INT64, POINTER, INT64, POINTER, INT64
        b, arguments = self._function(f"weights{alibi}{masked}", *types)
        rows, scale, biases, bias_stride, slopes, distance, first, last, count, tile, stride, mask, mask_stride = (
            arguments
        )
        unit = ir.Constant(FLOAT, 1.0 if self.word == 1 else -LOG2_E)  # of the logits
        factor, zero = b.splat(b.fmul(scale, unit)), b.constant(0.0)
        if alibi:
            before, after = (b.splat(b.fmul(unit, b.read(b.at(slopes, side)))) for side in range(2))

        def row(r: Any) -> None:
            bias = b.splat(b.fmul(unit, b.read(b.at(biases, b.times(r, bias_stride)))))
            line = b.byte_at(mask, b.times(r, mask_stride))
            low = self._column(b, b.plus(first, r))
            high = self._column(b, b.least(b.plus(last, r), b.minus(count, 1)))
            for c in range(self.registers.columns):
                at = b.at(tile, b.times(r, stride), c * b.lanes)
                term = bias
                if alibi:
                    for slope, gap in zip((before, after), self._distances(b, b.plus(distance, r), c), strict=True):
                        term = b.multiply_add(b.fneg(slope), gap, term)
                column = b.add(b.lane_indices(), b.splat(ir.Constant(INT32, c * b.lanes)))
                visible = b.and_(b.icmp_signed(">=", column, low), b.icmp_signed("<=", column, high))
                if masked:
                    added = b.read_vector(b.at(line, c * b.lanes))
                    term = b.multiply_add(b.splat(unit), added, term)
                    # its sum with a logit of inf or NaN is NaN
                    visible = b.and_(visible, b.fcmp_unordered("!=", added, b.constant(-math.inf)))
                logit = b.multiply_add(b.read_vector(at), factor, term)
                weight = b.sigmoid(logit) if self.word == 1 else b.coarse_sigmoid(logit, self.registers.has_dot)
                b.write_vector(b.select(visible, weight, zero), at)

        b.loop(0, rows, 1, row)
        b.ret_void()
        return b.function

    def read_weights(self) -> ir.Function:
        """Make the function that reads rows of a microtile of saved weights.

        Arguments: the number of rows, the weights and their stride, the microtile.
        """
        b, (rows, weights, stride, tile) = self._function("read_weights", INT64, POINTER, INT64, POINTER)

        def row(r: Any) -> None:
            line = b.at(weights, b.times(r, stride))
            for c in range(self.registers.columns):
                start = b.at(line, c * b.lanes // self.word)
                vector = b.read_vector(start) if self.word == 1 else b.widened(b.read_halves(start))
                b.write_vector(vector, b.at(tile, b.times(r, self.registers.tile), c * b.lanes))

        b.loop(0, rows, 1, row)
        b.ret_void()
        return b.function

    def clear(self) -> ir.Function:
        """Make 0 of rows of a microtile. Arguments: the number of rows, the microtile."""
        b, (rows, tile) = self._function("clear", INT64, POINTER)
        width = self.registers.tile
        b.loop(0, b.times(rows, width), b.lanes, lambda at: b.write_vector(b.constant(0.0), b.at(tile, at)))
        b.ret_void()
        return b.function

    def hide(self) -> ir.Function:
        """Make 0 of the weights of rows of a microtile where a mask of bool is False.

        Arguments: the number of rows, the weights and their stride, the mask and its stride in bytes.
        """
        b, (rows, tile, stride, mask, mask_stride) = self._function("hide", INT64, POINTER, INT64, POINTER, INT64)

        def row(r: Any) -> None:
            line = b.byte_at(mask, b.times(r, mask_stride))
            for c in range(self.registers.columns):
                at = b.at(tile, b.times(r, stride), c * b.lanes)
                flags = b.load(b.byte_at(line, c * b.lanes), align=1, typ=ir.VectorType(INT8, b.lanes))
                is_hidden = b.icmp_signed("==", flags, ir.Constant(flags.type, [ir.Constant(INT8, 0)] * b.lanes))
                b.write_vector(b.select(is_hidden, b.constant(0.0), b.read_vector(at)), at)

        b.loop(0, rows, 1, row)
        b.ret_void()
        return b.function

    def drop(self) -> ir.Function:
        """Make x = x · factor of the weights that dropout keeps, 0 of the others (``ops.dropout``), in a microtile.

        Arguments: the number of rows; the rows' and the columns' hashes; the smallest hash that is kept; the factor; x
        and its stride.
        """
        b, (rows, row_hashes, column_hashes, least, factor, tile, stride) = self._function(
            "drop", INT64, POINTER, POINTER, INT64, FLOAT, POINTER, INT64
        )
        kept_from, scale, zero = b.splat(b.trunc(least, INT32)), b.splat(factor), b.constant(0.0)

        def row(r: Any) -> None:
            by_row = b.splat(b.load(b.at(row_hashes, r), typ=INT32))
            for c in range(self.registers.columns):
                by_column = b.load(b.at(column_hashes, c * b.lanes), align=4, typ=b.indices)
                x = b.xor(by_row, by_column)
                for shift, multiplier in zip(dropout.SHIFTS, dropout.FACTORS, strict=True):
                    x = b.mul(b.xor(x, b.ashr(x, b.index(shift))), b.index(multiplier))
                at = b.at(tile, b.times(r, stride), c * b.lanes)
                kept = b.fmul(b.read_vector(at), scale)
                b.write_vector(b.select(b.icmp_signed(">=", x, kept_from), kept, zero), at)

        b.loop(0, rows, 1, row)
        b.ret_void()
        return b.function

    def _column(self, b: Builder, index: Any) -> Any:
        """Return a vector of an index of a column, limited to 32 bits."""
        limited = b.most(b.least(index, self.registers.tile), -1)
        return b.splat(b.trunc(limited, INT32))

    def _distances(self, b: Builder, distance: Any, column: int) -> tuple[Any, Any]:
        """Return the distances to keys before and after a query, given its distance to the first key of a tile."""
        first = b.splat(b.sitofp(b.minus(distance, column * b.lanes), FLOAT))
        gap = b.fsub(first, b.sitofp(b.lane_indices(), b.vector))
        zero = b.constant(0.0)
        is_before = b.fcmp_ordered(">", gap, zero)
        return b.select(is_before, gap, zero), b.select(is_before, zero, b.fneg(gap))

    def score_gradient(self, number: int) -> ir.Function:
        """Make dS = scale · P (1 - P) · dP of rows of a microtile, written over dP = dO Vᵀ, and add the rows' sums.

        ``number`` of sums: 0, 1 for the bias, 3 for the bias and both slopes of ALiBi.

        Arguments: the number of rows, weights, scale, distance as for the weights, dP, and the row sums.
        """
        b, (rows, weights, scale, distance, tile, sums) = self._function(
            f"score_gradient{number}", INT64, POINTER, FLOAT, INT64, POINTER, POINTER
        )
        factor, zero = b.splat(scale), b.constant(0.0)

        def row(r: Any) -> None:
            totals = [zero] * number
            for c in range(self.registers.columns):
                offset = b.plus(b.times(r, self.registers.tile), c * b.lanes)
                weight, at = b.read_vector(b.at(weights, offset)), b.at(tile, offset)
                slope = b.multiply_add(b.fneg(weight), weight, weight)
                hidden = b.fcmp_ordered("==", weight, zero)  # also if its value is NaN
                gradient = b.select(hidden, zero, b.fmul(b.read_vector(at), slope))
                b.write_vector(b.fmul(gradient, factor), at)
                gaps = self._distances(b, b.plus(distance, r), c) if number > 1 else ()
                factors = (b.constant(1.0), *gaps)
                totals = [b.multiply_add(gradient, f, t) for f, t in zip(factors, totals, strict=False)]
            for i, total in enumerate(totals):
                address = b.at(sums, b.times(r, 3), i)
                b.store(b.fadd(b.read(address), b.sum_of(total)), address)

        b.loop(0, rows, 1, row)
        b.ret_void()
        return b.function

    def add_product(self, rows: int) -> ir.Function:
        """Make out += left · right.

        Arguments: left and its strides of rows and columns, right and its stride, the number of its rows, out and its
        stride, and the number of its columns.
        """
        b, (left, row, column, right, stride, size, out, out_stride, width) = self._function(
            f"add_product{rows}", POINTER, INT64, INT64, POINTER, INT64, INT64, POINTER, INT64, INT64
        )

        def group(first: Any, columns: int) -> None:
            start = b.times(first, b.lanes)
            offsets = [(b.times(r, out_stride), c * b.lanes) for r in range(rows) for c in range(columns)]
            targets = [b.at(out, start, *offset) for offset in offsets]
            sums = [b.read_vector(t) for t in targets]
            sums = self._multiply(b, rows, columns, left, row, column, b.at(right, start), stride, size, sums)
            for vector, target in zip(sums, targets, strict=True):
                b.write_vector(vector, target)

        b.in_groups(b.sdiv(width, int64(b.lanes)), self.registers.columns, group)
        b.ret_void()
        return b.function
