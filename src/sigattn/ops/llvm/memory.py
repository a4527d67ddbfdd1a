"""Memory of the kernels: addresses in their tensors, copies of tensors in the order in which microtiles read them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from sigattn.ops.llvm.builder import FLOAT, INT16, INT64, Builder, int64
from sigattn.ops.llvm.microtiles import Microtiles


class Memory(Microtiles):
    """Functions of kernels that address or copy memory; ``call`` are the arguments of a kernel (``kernels.FIELDS``)."""

    # addresses

    def _head(self, b: Builder, call: SimpleNamespace, name: str, sample: Any, head: Any) -> Any:
        """Return the address of a head of a tensor."""
        strides = (getattr(call, f"{name}_{axis}") for axis in "bh")
        return b.at(getattr(call, name), *(b.times(i, s) for i, s in zip((sample, head), strides, strict=True)))

    def _head_of_mask(self, b: Builder, call: SimpleNamespace, sample: Any, head: Any) -> Any:
        return b.byte_at(call.mask, b.times(sample, call.mask_b), b.times(head, call.mask_h))

    def _length(self, b: Builder, call: SimpleNamespace, sample: Any) -> Any:
        return b.load(b.gep(call.lengths, [b.times(sample, call.lengths_b)], source_etype=INT64), typ=INT64)

    def _slopes(self, b: Builder, call: SimpleNamespace, sample: Any, head: Any) -> Any:
        return b.at(call.slopes, b.times(sample, call.slopes_b), b.times(head, 2))

    def _tiles(self, b: Builder, count: Any) -> Any:
        """Return a number of keys rounded up to whole tiles."""
        return b.round_down(b.plus(count, self.registers.tile - 1), self.registers.tile)

    def _row_hashes(self, b: Builder, call: SimpleNamespace, sample: Any, head: Any) -> Any:
        return b.at(call.row_hashes, b.times(b.plus(b.times(sample, call.heads), head), call.n))

    def _row_of_weights(self, b: Builder, call: SimpleNamespace) -> Any:
        """Return the stride of the saved weights' rows, in words."""
        return b.sdiv(self._tiles(b, call.m), int64(self.word))

    def _pairs(self, b: Builder, memory: Any, number: Any, rows: Any, width: Any) -> Any:
        """Return the address of the pairs of a head, of which each has as many rows."""
        return b.at(memory, b.times(number, b.times(b.sdiv(b.plus(rows, 1), int64(2)), width)))

    def _sums(
        self, b: Builder, call: SimpleNamespace, name: str, sample: Any, head: Any, number: Any, rows: Any, width: Any
    ) -> tuple[Any, Any]:
        """Return address and stride of the rows in which a head of a result is summed: of the result, if it is float32.

        Args:
            number, rows, width: number of the head, and its size in sums apart from the result.
        """
        if self.word == 1:
            return self._head(b, call, name, sample, head), getattr(call, f"{name}_n")
        return b.at(getattr(call, f"{name}_sums"), b.times(number, b.times(rows, width))), width

    def _rows(
        self, b: Builder, tensor: Any, stride: Any, pairs: Any, width: Any, first: Any, count: Any
    ) -> tuple[Any, Any, Any]:
        """Return rows of a tensor as a right factor: address, stride and number of its rows of words.

        Args:
            tensor, stride: a head, if it is float32. pairs, width: its rows in pairs, if it is bfloat16.
        """
        if self.word == 1:
            return b.at(tensor, b.times(first, stride)), stride, count
        return b.at(pairs, b.times(b.sdiv(first, int64(2)), width)), width, b.sdiv(b.plus(count, 1), int64(2))

    # copies

    def _pack(self, b: Builder, rows: Any, stride: Any, size: Any, first: Any, last: Any, count: Any, out: Any) -> None:
        """Write rows first … last - 1 as microtiles' right factors, (size, tile) each; 0 beyond ``count`` rows."""
        tile, lanes = self.registers.tile, b.lanes

        def one(start: Any) -> None:
            target = b.at(out, b.times(start, size))
            existing = b.most(b.least(b.minus(count, start), tile), 0)
            squares = b.round_down(existing, lanes)

            def address(row: Any) -> Any:
                return b.at(rows, b.times(b.plus(start, row), stride))

            def fill(row: Any, number: Callable[[Any], Any]) -> None:
                b.loop(0, size, 1, lambda d: b.store(number(d), b.at(target, b.times(d, tile), row)) and None)

            def square(row: Any, d: Any) -> None:
                self.call(b, self.transpose, (), [b.at(address(row), d), stride, b.at(target, b.times(d, tile), row)])

            b.loop(0, squares, lanes, lambda row: b.loop(0, size, lanes, lambda d: square(row, d)) and None)
            b.loop(squares, existing, 1, lambda row: fill(row, lambda d: b.read(b.at(address(row), d))))
            b.loop(existing, tile, 1, lambda row: fill(row, lambda d: ir.Constant(FLOAT, 0.0)))

        b.loop(first, last, tile, one)

    def _pair(
        self, b: Builder, rows: Any, stride: Any, width: Any, first: Any, last: Any, count: Any, out: Any
    ) -> None:
        """Write rows first (even) … last - 1 of bfloat16 as pairs of rows, with 0 from row ``count`` on."""
        zero = ir.Constant(b.halves, [ir.Constant(INT16, 0)] * b.lanes)

        def pair(at: Any, existing: int) -> None:
            lines = [b.at(rows, b.times(b.plus(at, i), stride)) for i in range(existing)]
            target = b.at(out, b.times(b.sdiv(at, int64(2)), width))

            def vector(d: Any) -> None:
                halves = [b.read_halves(b.at(line, b.sdiv(d, int64(2)))) for line in lines]
                b.write_vector(b.paired(*[*halves, zero, zero][:2]), b.at(target, d))

            b.loop(0, width, b.lanes, vector)

        whole = b.most(b.round_down(b.least(count, last), 2), first)
        b.loop(first, whole, 2, lambda at: pair(at, 2))
        alone = b.most(b.least(count, last), first)
        b.loop(whole, alone, 2, lambda at: pair(at, 1))
        b.loop(b.round_down(b.plus(alone, 1), 2), last, 2, lambda at: pair(at, 0))

    def _round(
        self, b: Builder, call: SimpleNamespace, name: str, sample: Any, head: Any, sums: Any, first: Any, count: Any,
        width: Any,
    ) -> None:  # fmt: skip
        """Write rows of a result in bfloat16, from row ``first`` on, given their sums."""
        by_sample, by_head, by_row = (getattr(call, f"{name}_{axis}") for axis in "bhn")
        start = b.plus(b.times(sample, by_sample), b.times(head, by_head), b.times(first, by_row))

        def row(i: Any) -> None:
            line, offset = b.at(sums, b.times(i, width)), b.plus(start, b.times(i, by_row))
            b.loop(
                0, width, b.lanes,
                lambda d: b.write_halves(b.read_vector(b.at(line, d)), getattr(call, name), offset, d),
            )  # fmt: skip

        b.loop(0, count, 1, row)

    def _clear(self, b: Builder, rows: Any, stride: Any, first: Any, last: Any, width: Any) -> None:
        """Write zeros to rows first … last - 1."""

        def row(i: Any) -> None:
            line = b.at(rows, b.times(i, stride))
            b.loop(0, width, b.lanes, lambda at: b.write_vector(b.constant(0.0), b.at(line, at)))

        b.loop(first, last, 1, row)
