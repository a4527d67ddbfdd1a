"""Rows of a head in memory: copies in the orders in which microtiles read them, and results."""

from __future__ import annotations

from sigattn.ops.llvm.builder import FLOAT, INT16, Builder, Matrix, Pointer, Value, constant
from sigattn.ops.llvm.microtiles import Microtiles
from sigattn.ops.llvm.module import StridedTensor


class Copies(Microtiles):
    """Module with functions on the rows of a head. Existing rows are those before ``count``; the others count as 0."""

    def pad_to_tiles(self, keys: Value) -> Value:
        """Return a number of keys rounded up to a multiple of a tile."""
        last = keys + (self.registers.tile - 1)
        return last - last % self.registers.tile

    def pack(
        self, b: Builder, rows: Matrix, size: Value, first: Value | int, last: Value, count: Value, out: Pointer
    ) -> None:
        """Write rows first … last - 1 as packed right factors, (size, tile) for each tile of rows."""
        tile = self.registers.tile
        with b.loop(first, last, tile) as start:
            target = out + start * size
            existing = b.maximum(b.minimum(count - start, tile), 0)
            squares = b.round_down(existing, b.lanes)
            with b.loop(0, squares, b.lanes) as row, b.loop(0, size, b.lanes) as d:
                self.transpose(b, Matrix(rows[start + row] + d, rows.stride), target + (d * tile + row))
            with b.loop(squares, existing) as row, b.loop(0, size) as d:
                (target + (d * tile + row)).store((rows[start + row] + d).load())
            with b.loop(existing, tile) as row, b.loop(0, size) as d:
                (target + (d * tile + row)).store(Value(b, constant(0.0, FLOAT)))

    def pair(
        self, b: Builder, rows: Matrix, width: Value, first: Value | int, last: Value, count: Value, out: Matrix
    ) -> None:
        """Write rows first (even) … last - 1 of bfloat16 in pairs of rows."""
        zero = Value(b, constant(0, b.int16s))
        existing = b.minimum(count, last)
        full, end = b.maximum(b.round_down(existing, 2), first), b.maximum(existing, first)
        for start, stop, size in ((first, full, 2), (full, end, 1), (b.round_down(end + 1, 2), last, 0)):
            with b.loop(start, stop, 2) as row, b.loop(0, width, b.lanes) as d:
                halves = [(rows[row + i] + d // 2).of(INT16).load_vector() for i in range(size)]
                (out[row // 2] + d).store(b.pair(*[*halves, zero, zero][:2]))

    def clear_rows(self, b: Builder, rows: Matrix, first: Value | int, last: Value, width: Value | int) -> None:
        """Write zeros to rows first … last - 1 of float32."""
        with b.loop(first, last) as row, b.loop(0, width, b.lanes) as d:
            (rows[row] + d).store(b.vector(0.0))

    def divide_rows(self, b: Builder, rows: Matrix, count: Value, width: Value, vectors: Matrix, sums: Matrix) -> None:
        """Divide rows by their sums of weights, and write these; rows with a sum of 0 remain."""
        with b.loop(0, count) as row:
            total = b.sum(vectors[row].load_vector())
            sums[row].store(total)
            divisor = b.splat(b.select(total == 0.0, Value(b, constant(1.0, FLOAT)), total))
            with b.loop(0, width, b.lanes) as d:
                (rows[row] + d).store((rows[row] + d).load_vector() / divisor)

    def round_rows(self, b: Builder, sums: Matrix, count: Value, width: Value, out: Matrix) -> None:
        """Write ``count`` rows of float32 as bfloat16."""
        with b.loop(0, count) as row, b.loop(0, width, b.lanes) as d:
            (out[row] + d).store(b.round((sums[row] + d).load_vector()))

    def paired(self, memory: Pointer, number: Value, rows: Value, width: Value) -> Matrix:
        """Return the matrix of a head's rows in pairs; ``number`` is the index of the head in all samples."""
        return Matrix(memory + number * ((rows + 1) // 2 * width), width)

    def sums(
        self, result: StridedTensor, memory: Pointer, sample: Value, head: Value, number: Value, rows: Value,
        width: Value,
    ) -> Matrix:  # fmt: skip
        """Return the matrix in which a head of a result is summed: the float32 result itself, else separate memory.

        Args:
            number: index of the head in that memory. rows, width: its size.
        """
        if self.per_word == 1:
            return result.head(sample, head)
        return Matrix(memory + number * (rows * width), width)

    def right_factor(self, rows: Matrix, pairs: Matrix, first: Value, count: Value) -> tuple[Matrix, Value]:
        """Return rows from ``first`` on as the right factor of a product, and their number in words.

        Args:
            rows: of a head. pairs: its rows in pairs, for bfloat16.
        """
        if self.per_word == 1:
            return rows[first:], count
        return pairs[first // 2 :], (count + 1) // 2
