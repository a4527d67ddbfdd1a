"""Rows of a head in memory: copies in the orders in which microtiles read them, and results."""

from typing import Any

from sigattn.ops.llvm.builder import FLOAT, INT16, Builder, Matrix, Pointer, Value, constant
from sigattn.ops.llvm.microtiles import Microtiles
from sigattn.ops.normalization import SMALLEST_SUM


class Copies(Microtiles):
    """Module with functions on the rows of a head."""

    @property
    def element(self) -> Any:
        """Type of a result's elements."""
        return FLOAT if self.per_word == 1 else INT16

    def round_up(self, number: Value, multiple: int) -> Value:
        """Return the smallest multiple of a constant that is not below a number."""
        return number.b.round_down(number + (multiple - 1), multiple)

    def pack(self, b: Builder, rows: Matrix, size: Value, last: Value | int, count: Value, out: Pointer) -> None:
        """Write rows 0 … last - 1 as packed right factors, (size, tile) for each tile of rows; 0 from ``count`` on."""
        tile = self.registers.tile
        with b.loop(0, last, tile) as start:
            target = out + start * size
            existing = b.maximum(b.minimum(count - start, tile), 0)
            squares = b.round_down(existing, b.lanes)
            with b.loop(0, squares, b.lanes) as row, b.loop(0, size, b.lanes) as d:
                self.transpose(b, Matrix(rows[start + row] + d, rows.stride), target + (d * tile + row))
            with b.loop(squares, existing) as row, b.loop(0, size) as d:
                (target + (d * tile + row)).store((rows[start + row] + d).load())
            with b.loop(existing, tile) as row, b.loop(0, size) as d:
                (target + (d * tile + row)).store(Value(b, constant(0.0, FLOAT)))

    def pair(self, b: Builder, rows: Matrix, width: Value, count: Value, out: Matrix) -> None:
        """Write ``count`` rows of bfloat16 in pairs of rows; the last is paired with 0 if it is alone."""
        zero, full = Value(b, constant(0, b.int16s)), b.round_down(count, 2)
        for start, stop, size in ((0, full, 2), (full, count, 1)):
            with b.loop(start, stop, 2) as row, b.loop(0, width, b.lanes) as d:
                halves = [(rows[row + i] + d // 2).of(INT16).load_vector() for i in range(size)]
                (out[row // 2] + d).store(b.pair(*[*halves, zero][:2]))

    def clear_rows(self, b: Builder, rows: Matrix, count: Value | int, width: Value | int) -> None:
        """Write zeros to ``count`` rows of float32."""
        with b.loop(0, count) as row, b.loop(0, width, b.lanes) as d:
            (rows[row] + d).store(b.vector(0.0))

    def divide_rows(
        self, b: Builder, rows: Matrix, count: Value, width: Value, vectors: Matrix, sums: Matrix, small_sum: Pointer
    ) -> None:
        """Divide rows by their sums of weights, and write these and lifts of 0; rows with a sum of 0 remain.

        ``small_sum`` becomes 1 if a sum is below ``SMALLEST_SUM``.
        """
        zero, one = (Value(b, constant(number, FLOAT)) for number in (0.0, 1.0))
        with b.loop(0, count) as row:
            total = b.sum(vectors[row].load_vector())
            sums[row].store(total)
            (sums[row] + 1).store(zero)
            with b.when(total < SMALLEST_SUM):
                small_sum.store(one)
            divisor = b.splat(b.select(total == 0.0, one, total))
            with b.loop(0, width, b.lanes) as d:
                (rows[row] + d).store((rows[row] + d).load_vector() / divisor)

    def round_rows(self, b: Builder, sums: Matrix, count: Value, width: Value, out: Matrix) -> None:
        """Write ``count`` rows of float32 as bfloat16."""
        with b.loop(0, count) as row, b.loop(0, width, b.lanes) as d:
            (out[row] + d).store(b.round((sums[row] + d).load_vector()))

    def paired(self, memory: Pointer, row: Value, width: Value) -> Matrix:
        """Return the matrix of rows in pairs from a row on, which is even, in the memory of all."""
        return Matrix(memory + row // 2 * width, width)

    def sums(self, result: Matrix, memory: Pointer, row: Value, width: Value) -> Matrix:
        """Return the matrix in which a result is summed: itself if it is float32, else memory from a row on."""
        return result if self.per_word == 1 else Matrix(memory + row * width, width)

    def right_factor(self, rows: Matrix, pairs: Matrix, count: Value) -> tuple[Matrix, Value]:
        """Return ``count`` rows as the right factor of a product, and their number in words; pairs: of bfloat16."""
        return (rows, count) if self.per_word == 1 else (pairs, (count + 1) // 2)
