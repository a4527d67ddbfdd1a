"""Kernels of functions of rows, as LLVM's intermediate representation: the scale of rows, and a quadratic form of them.

Their formulas are in ``sigattn.ops.rows``. A kernel reads each row once or twice while it is in the nearest
cache, where operators of PyTorch would pass over the tensor five to nine times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from sigattn.ops.llvm.builder import FLOAT, INT32, INT64, POINTER, Builder, int64, kernel
from sigattn.ops.row_constants import EPS, MAX_DIRECTIONS, MAX_LOG_SCALE

ROWS = 32  # of a block, whose numbers stay in the nearest cache
_FORMS = MAX_DIRECTIONS + 1  # linear forms of a row: those that are squared, and the linear term
_TINY = 2.0**-126

_NUMBERS = ("heads", "n", "width", "blocks", "total", "step")
_STRIDED = ("rows", "grad", "out")
_ARRAYS = (
    "gain", "power", "direction", "forms", "curvature", "lower", "upper",
    "factor", "norm", "cosine", "values", "term", "row_grad", "sums",
)  # fmt: skip
# Arguments of a kernel. ``blocks`` is the number of blocks of a head, ``total`` that of all samples of a head, of which
# a task computes ``step``, for all heads: other tasks then do not write to memory nearby. ``rows``, ``grad`` (the
# gradient of their scaled values) and ``out`` are (B, H, N, width), followed by their first three strides, in words of
# 32 bits but for ``out``.
# The others are float32 and contiguous: gain, power, lower and upper (H,), direction (H, width), forms (H, _FORMS,
# width), curvature (H, MAX_DIRECTIONS); factor, norm, cosine, term and their gradient row_grad (B, H, N);
# values (_FORMS, B, H, N); sums (tasks, H, number_of_sums).
_FIELDS = ("counter", "tasks", *_NUMBERS, *(f"{name}{axis}" for name in _STRIDED for axis in ("", "_b", "_h", "_n")))
FIELDS = (*_FIELDS, *_ARRAYS)
INDEX = {name: index for index, name in enumerate(FIELDS)}
_TYPES = {name: POINTER if name in (*_STRIDED, *_ARRAYS) else INT64 for name in FIELDS}
NAMES = ("scale", "scale_backward", "quadratic", "quadratic_term", "quadratic_backward")


def number_of_sums(name: str, width: int) -> int:
    """Return how many sums over its rows a kernel of a backward pass makes: the gradients of one head's parameters."""
    return width + 2 if name == "scale_backward" else _FORMS * width + MAX_DIRECTIONS


def make_module(lanes: int, word: int) -> ir.Module:
    """Return the module of the kernels in ``NAMES``.

    Args:
        lanes: number of float32 in a vector. word: how many numbers of the tensors are in 32 bits.
    """
    module = ir.Module("sigattn_rows")
    kernels = _RowKernels(lanes, word)
    arrays_of = {"scale": 3, "scale_backward": 6, "quadratic_backward": 2 * _FORMS + 1}
    arrays_of |= dict.fromkeys(("quadratic", "quadratic_term"), _FORMS + 1)
    for name, arrays in arrays_of.items():
        kernel(module, name, lanes, _TYPES, getattr(kernels, name), [arrays * ROWS])
    return module


class _RowKernels:
    """Bodies of the kernels, which compute a task."""

    def __init__(self, lanes: int, word: int) -> None:
        self.lanes, self.word = lanes, word

    # blocks and rows

    def _blocks(self, b: Builder, call: SimpleNamespace, task: Any, body: Callable[[SimpleNamespace], None]) -> None:
        """Emit ``body`` for each block of a task."""
        first = b.times(task, call.step)

        def block(index: Any) -> None:
            sample, start = b.sdiv(index, call.blocks), b.times(b.srem(index, call.blocks), ROWS)

            def of_head(head: Any) -> None:
                own = SimpleNamespace(sample=sample, head=head, start=start)
                own.count = b.least(b.minus(call.n, start), ROWS)
                own.row = b.plus(b.times(b.plus(b.times(sample, call.heads), head), call.n), start)  # of all rows
                body(own)

            b.loop(0, call.heads, 1, of_head)

        b.loop(first, b.least(b.plus(first, call.step), call.total), 1, block)

    def _sums(self, b: Builder, call: SimpleNamespace, task: Any, size: Any) -> Any:
        """Return the address of a task's sums, ``size`` for each head, which are set to 0."""
        count = b.times(call.heads, size)
        sums = b.at(call.sums, b.times(task, count))
        b.loop(0, count, 1, lambda i: b.store(ir.Constant(FLOAT, 0.0), b.at(sums, i)) and None)
        return sums

    def _offset(self, b: Builder, call: SimpleNamespace, name: str, block: SimpleNamespace, row: Any) -> Any:
        """Return the offset of a row of a block in a strided tensor."""
        by_sample, by_head, by_row = (getattr(call, f"{name}_{axis}") for axis in "bhn")
        start = b.plus(b.times(block.sample, by_sample), b.times(block.head, by_head))
        return b.plus(start, b.times(b.plus(block.start, row), by_row))

    def _line(self, b: Builder, call: SimpleNamespace, name: str, block: SimpleNamespace, row: Any) -> Any:
        """Return the address of a row to read."""
        return b.at(getattr(call, name), self._offset(b, call, name, block, row))

    def _read(self, b: Builder, line: Any, d: Any) -> Any:
        """Read a vector of features of a row, from feature d on."""
        if self.word == 1:
            return b.read_vector(b.at(line, d))
        return b.widened(b.read_halves(b.at(line, b.sdiv(d, int64(2)))))

    def _fetch_next(self, b: Builder, call: SimpleNamespace, line: Any, d: Any) -> None:
        """Prefetch the features from d on of the same row of the next block, given the address of a row."""
        b.prefetch(b.at(line, b.times(call.rows_n, ROWS), b.sdiv(d, int64(self.word))))

    def _fetch_target(self, b: Builder, call: SimpleNamespace, offset: Any, d: Any) -> None:
        """Prefetch the memory of ``out`` that ``_write`` writes in the next block."""
        index = b.times(b.plus(offset, b.times(call.out_n, ROWS), d), 4 // self.word)
        b.prefetch(b.byte_at(call.out, index), to_write=True)

    def _write(self, b: Builder, call: SimpleNamespace, offset: Any, d: Any, vector: Any) -> None:
        """Write a vector of features of a row of ``out``, given the row's offset."""
        if self.word == 1:
            b.write_vector(vector, b.at(call.out, offset, d))
        else:
            b.write_halves(vector, call.out, offset, d)

    def _copy(self, b: Builder, source: Any, target: Any, count: Any) -> None:
        """Copy some float32."""
        whole = b.round_down(count, self.lanes)
        b.loop(0, whole, self.lanes, lambda i: b.write_vector(b.read_vector(b.at(source, i)), b.at(target, i)))
        b.loop(whole, count, 1, lambda i: b.store(b.read(b.at(source, i)), b.at(target, i)) and None)

    def _existing(self, b: Builder, block: SimpleNamespace, i: Any) -> Any:
        """Return which of the rows of a vector, from row i of a block on, exist."""
        return b.icmp_signed("<", b.lane_indices(), b.splat(b.trunc(b.minus(block.count, i), INT32)))

    def _number(self, b: Builder, array: Any, *offsets: Any) -> Any:
        """Return a vector of one number of an array."""
        return b.splat(b.read(b.at(array, *offsets)))

    def _add(self, b: Builder, numbers: Any, target: Any) -> None:
        """Add a vector to numbers in memory."""
        b.write_vector(b.fadd(numbers, b.read_vector(target)), target)

    def _add_one(self, b: Builder, number: Any, target: Any) -> None:
        """Add to a number in memory."""
        b.store(b.fadd(number, b.read(target)), target)

    # scale of rows

    def _exponent(self, b: Builder, call: SimpleNamespace, head: Any, norm: Any, cosine: Any) -> tuple[Any, Any]:
        """Return the exponents g + β · log(‖o‖ + ε) + w · o/‖o‖ of some rows, not yet limited, and the logarithms."""
        log = b.log(b.fadd(norm, b.constant(EPS)))
        gain, power = self._number(b, call.gain, head), self._number(b, call.power, head)
        return b.fadd(b.multiply_add(power, log, gain), cosine), log

    def scale(self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
        """Compute the scaled rows, their factors, norms and ``cosine``, w · o/‖o‖."""
        factors, norms, cosines = (b.at(memory[0], k * ROWS) for k in range(3))

        def block(own: SimpleNamespace) -> None:
            direction = b.at(call.direction, b.times(own.head, call.width))

            def measure(i: Any) -> None:
                line = self._line(b, call, "rows", own, i)

                def features(d: Any, squares: Any, products: Any) -> list[Any]:
                    self._fetch_next(b, call, line, d)
                    x, w = self._read(b, line, d), b.read_vector(b.at(direction, d))
                    return [b.multiply_add(x, x, squares), b.multiply_add(x, w, products)]

                sums = b.loop(0, call.width, self.lanes, features, [b.constant(0.0)] * 2)
                for total, array in zip(sums, (norms, cosines), strict=True):
                    b.store(b.sum_of(total), b.at(array, i))

            def factor(i: Any) -> None:
                norm = b.intrinsic(f"llvm.sqrt.v{self.lanes}f32", b.read_vector(b.at(norms, i)))
                cosine = b.fdiv(b.read_vector(b.at(cosines, i)), b.fadd(norm, b.constant(EPS)))
                exponent, _ = self._exponent(b, call, own.head, norm, cosine)
                largest, least = b.constant(MAX_LOG_SCALE), b.constant(-MAX_LOG_SCALE)
                exponent = b.select(b.fcmp_ordered(">", exponent, largest), largest, exponent)
                exponent = b.select(b.fcmp_ordered("<", exponent, least), least, exponent)
                for number, array in ((b.exp(exponent), factors), (norm, norms), (cosine, cosines)):
                    b.write_vector(number, b.at(array, i))

            def apply(i: Any) -> None:
                line, offset = self._line(b, call, "rows", own, i), self._offset(b, call, "out", own, i)
                own_factor = self._number(b, factors, i)

                def features(d: Any) -> None:
                    self._fetch_target(b, call, offset, d)
                    self._write(b, call, offset, d, b.fmul(self._read(b, line, d), own_factor))

                b.loop(0, call.width, self.lanes, features)

            b.loop(0, own.count, 1, measure)
            b.loop(0, own.count, self.lanes, factor)
            b.loop(0, own.count, 1, apply)
            for array, target in ((factors, call.factor), (norms, call.norm), (cosines, call.cosine)):
                self._copy(b, array, b.at(target, own.row), own.count)

        self._blocks(b, call, task, block)

    def scale_backward(self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
        """Compute the gradient of the rows, and ``sums``: the gradients of direction, gain and power."""
        products, factors, norms, cosines, radials, projections = (b.at(memory[0], k * ROWS) for k in range(6))
        size = b.plus(call.width, 2)
        of_heads = self._sums(b, call, task, size)

        def block(own: SimpleNamespace) -> None:
            direction = b.at(call.direction, b.times(own.head, call.width))
            sums = b.at(of_heads, b.times(own.head, size))

            def product(i: Any) -> None:
                line, grad = (self._line(b, call, name, own, i) for name in ("rows", "grad"))

                def features(d: Any, total: Any) -> list[Any]:
                    return [b.multiply_add(self._read(b, line, d), self._read(b, grad, d), total)]

                (total,) = b.loop(0, call.width, self.lanes, features, [b.constant(0.0)])
                b.store(b.sum_of(total), b.at(products, i))

            def add_row_grad(i: Any) -> None:
                self._add_one(b, b.read(b.at(call.row_grad, own.row, i)), b.at(products, i))

            def coefficients(i: Any, of_gain: Any, of_power: Any) -> list[Any]:
                total, factor, norm, cosine = (b.read_vector(b.at(x, i)) for x in (products, factors, norms, cosines))
                exponent, log = self._exponent(b, call, own.head, norm, cosine)
                size = b.intrinsic(f"llvm.fabs.v{self.lanes}f32", exponent)
                counts = b.and_(self._existing(b, own, i), b.fcmp_unordered("<=", size, b.constant(MAX_LOG_SCALE)))
                grad = b.select(counts, b.fmul(total, factor), b.constant(0.0))
                projection = b.fdiv(grad, b.fadd(norm, b.constant(EPS)))
                power = self._number(b, call.power, own.head)
                tiny = b.constant(_TINY)
                divisor = b.select(b.fcmp_ordered("<", norm, tiny), tiny, norm)
                radial = b.fdiv(b.fmul(projection, b.fsub(power, cosine)), divisor)
                b.write_vector(projection, b.at(projections, i))
                b.write_vector(radial, b.at(radials, i))
                log = b.select(self._existing(b, own, i), log, b.constant(0.0))
                return [b.fadd(of_gain, grad), b.multiply_add(grad, log, of_power)]

            def gradient(i: Any) -> None:
                line, grad = (self._line(b, call, name, own, i) for name in ("rows", "grad"))
                offset = self._offset(b, call, "out", own, i)
                factor, radial, projection = (self._number(b, x, i) for x in (factors, radials, projections))

                def features(d: Any) -> None:
                    x = self._read(b, line, d)
                    total = b.multiply_add(x, radial, b.fmul(self._read(b, grad, d), factor))
                    total = b.multiply_add(projection, b.read_vector(b.at(direction, d)), total)
                    self._write(b, call, offset, d, total)
                    self._add(b, b.fmul(projection, x), b.at(sums, d))

                b.loop(0, call.width, self.lanes, features)

            for array, source in ((factors, call.factor), (norms, call.norm), (cosines, call.cosine)):
                self._copy(b, b.at(source, own.row), array, own.count)
            b.loop(0, own.count, 1, product)
            b.loop(0, own.count, 1, add_row_grad)
            totals = b.loop(0, own.count, self.lanes, coefficients, [b.constant(0.0)] * 2)
            for k, total in enumerate(totals):
                self._add_one(b, b.sum_of(total), b.at(sums, call.width, k))
            b.loop(0, own.count, 1, gradient)

        self._blocks(b, call, task, block)

    # quadratic form

    def _squares(self, b: Builder, call: SimpleNamespace, head: Any, y: list[Any]) -> Any:
        """Return the quadratic form of some rows, not yet limited, given their linear forms."""
        total = y[MAX_DIRECTIONS]
        for r in range(MAX_DIRECTIONS):
            curvature = self._number(b, call.curvature, b.times(head, MAX_DIRECTIONS), r)
            total = b.multiply_add(b.fmul(curvature, y[r]), y[r], total)
        return total

    def quadratic_term(self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
        """Compute ``term``, the quadratic form of the rows, limited."""
        self.quadratic(b, call, task, memory, stored=())

    def quadratic(
        self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any], stored: Iterable[int] = range(_FORMS)
    ) -> None:
        """Compute ``term``, and the linear forms that are ``stored`` in ``values``, for a backward pass."""
        arrays = [b.at(memory[0], k * ROWS) for k in range(_FORMS + 1)]

        def block(own: SimpleNamespace) -> None:
            forms = b.at(call.forms, b.times(own.head, b.times(_FORMS, call.width)))
            lower, upper = (self._number(b, x, own.head) for x in (call.lower, call.upper))

            def group(i: Any) -> None:
                last = b.minus(own.count, 1)  # rows that do not exist are read as the last
                lines = [self._line(b, call, "rows", own, b.least(b.plus(i, k), last)) for k in range(self.lanes)]

                def features(d: Any, *given: Any) -> list[Any]:
                    y = list(given)
                    for line in lines:
                        self._fetch_next(b, call, line, d)
                    for k, column in enumerate(b.transposed([self._read(b, line, d) for line in lines])):
                        for r in range(_FORMS):
                            form = self._number(b, forms, b.times(r, call.width), d, k)
                            y[r] = b.multiply_add(column, form, y[r])
                    return y

                y = b.loop(0, call.width, self.lanes, features, [b.constant(0.0)] * _FORMS)
                total = self._squares(b, call, own.head, y)
                total = b.select(b.fcmp_ordered("<", total, lower), lower, total)
                total = b.select(b.fcmp_ordered(">", total, upper), upper, total)
                for number, array in zip((*y, total), arrays, strict=True):
                    b.write_vector(number, b.at(array, i))

            b.loop(0, own.count, self.lanes, group)
            for r in stored:
                self._copy(b, arrays[r], self._values(b, call, r, own), own.count)
            self._copy(b, arrays[_FORMS], b.at(call.term, own.row), own.count)

        self._blocks(b, call, task, block)

    def _values(self, b: Builder, call: SimpleNamespace, r: int, block: SimpleNamespace) -> Any:
        """Return the address of the r-th linear form of the first row of a block."""
        samples = b.sdiv(call.total, call.blocks)
        return b.at(call.values, b.times(r, b.times(b.times(samples, call.heads), call.n)), block.row)

    def quadratic_backward(self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
        """Compute the gradient of the rows, and ``sums``: the gradients of forms and curvature."""
        values, gradients = ([b.at(memory[0], (first + r) * ROWS) for r in range(_FORMS)] for first in (0, _FORMS))
        grads = b.at(memory[0], 2 * _FORMS * ROWS)
        of_forms = b.times(_FORMS, call.width)
        size = b.plus(of_forms, MAX_DIRECTIONS)
        of_heads = self._sums(b, call, task, size)

        def block(own: SimpleNamespace) -> None:
            forms = b.at(call.forms, b.times(own.head, of_forms))
            sums = b.at(of_heads, b.times(own.head, size))
            lower, upper = (self._number(b, x, own.head) for x in (call.lower, call.upper))

            def coefficients(i: Any, *totals: Any) -> list[Any]:
                y = [b.read_vector(b.at(value, i)) for value in values]
                term = self._squares(b, call, own.head, y)
                inside = b.and_(b.fcmp_ordered(">=", term, lower), b.fcmp_ordered("<=", term, upper))
                inside = b.and_(inside, self._existing(b, own, i))
                grad = b.select(inside, b.read_vector(b.at(grads, i)), b.constant(0.0))
                new = []
                for r, total in enumerate(totals):
                    curvature = self._number(b, call.curvature, b.times(own.head, MAX_DIRECTIONS), r)
                    product = b.fmul(grad, y[r])
                    b.write_vector(b.fmul(b.fadd(product, product), curvature), b.at(gradients[r], i))
                    square = b.fmul(product, y[r])
                    new.append(b.fadd(total, b.select(inside, square, b.constant(0.0))))
                b.write_vector(grad, b.at(gradients[MAX_DIRECTIONS], i))
                return new

            def gradient(i: Any) -> None:
                offset = self._offset(b, call, "out", own, i)
                own_gradients = [self._number(b, array, i) for array in gradients]

                def features(d: Any) -> None:
                    total = b.constant(0.0)
                    for r, own_gradient in enumerate(own_gradients):
                        form = b.read_vector(b.at(forms, b.times(r, call.width), d))
                        total = b.multiply_add(own_gradient, form, total)
                    self._write(b, call, offset, d, total)

                b.loop(0, call.width, self.lanes, features)

            def of_features(d: Any) -> None:
                targets = [b.at(sums, b.times(r, call.width), d) for r in range(_FORMS)]

                def row(i: Any, *totals: Any) -> list[Any]:
                    x = self._read(b, self._line(b, call, "rows", own, i), d)
                    pairs = zip(totals, gradients, strict=True)
                    return [b.multiply_add(x, self._number(b, array, i), total) for total, array in pairs]

                totals = b.loop(0, own.count, 1, row, [b.read_vector(target) for target in targets])
                for total, target in zip(totals, targets, strict=True):
                    b.write_vector(total, target)

            for r in range(_FORMS):
                self._copy(b, self._values(b, call, r, own), values[r], own.count)
            self._copy(b, b.at(call.row_grad, own.row), grads, own.count)
            totals = b.loop(0, own.count, self.lanes, coefficients, [b.constant(0.0)] * MAX_DIRECTIONS)
            for r, total in enumerate(totals):
                self._add_one(b, b.sum_of(total), b.at(sums, of_forms, r))
            b.loop(0, own.count, 1, gradient)
            b.loop(0, call.width, self.lanes, of_features)

        self._blocks(b, call, task, block)
