"""Functions on microtiles: R rows and C vectors of a product, whose sums stay in registers.

Factors are float32, or pairs of bfloat16 along the dimension that is summed; both have 32 bits and are called words.
Sums and all that is elementwise are float32. A microtile in memory is its address and the stride of its rows.
Hashes are int32, masks bytes.
"""

import math

from sigattn.ops import dropout
from sigattn.ops.llvm.activation import LOG2_E, coarse_sigmoid, sigmoid
from sigattn.ops.llvm.builder import FLOAT, INT16, Builder, Matrix, Pointer, Value
from sigattn.ops.llvm.module import Module, function


class Microtiles(Module):
    """Module with functions on microtiles, each compiled for the numbers of rows with which it is called."""

    # products

    @function
    def product(self, b: Builder, rows: int, left: Matrix, right: Pointer, size: Value, out: Matrix) -> None:
        """Compute out = left · right for one microtile; right is packed, (size, tile)."""
        columns = self.registers.columns
        sums = [b.vector(0.0)] * (rows * columns)
        self._multiply_add(b, rows, columns, left, 1, Matrix(right, self.registers.tile), size, sums)
        for i, vector in enumerate(sums):
            r, c = divmod(i, columns)
            (out[r] + c * b.lanes).store(vector)

    @function
    def add_product(
        self, b: Builder, rows: int,
        left: Matrix, column_stride: Value, right: Matrix, size: Value, out: Matrix, width: Value,
    ) -> None:  # fmt: skip
        """Compute out += left · right, (rows, size) · (size, width)."""
        for first, columns in b.groups(width // b.lanes, self.registers.columns):
            column = first * b.lanes
            shifted_out = Matrix(out.data + column, out.stride)
            targets = [shifted_out[r] + c * b.lanes for r in range(rows) for c in range(columns)]
            sums = [target.load_vector() for target in targets]
            shifted = Matrix(right.data + column, right.stride)
            self._multiply_add(b, rows, columns, left, column_stride, shifted, size, sums)
            for target, vector in zip(targets, sums, strict=True):
                target.store(vector)

    def _multiply_add(
        self, b: Builder, rows: int, columns: int, left: Matrix, column_stride: Value | int, right: Matrix, size: Value,
        sums: list[Value],
    ) -> None:  # fmt: skip
        """Add the product of (rows, size) and (size, columns vectors) to the sums, in registers."""
        lines = [left[r] for r in range(rows)]
        with b.loop(0, size, carried=sums) as k:
            vectors = [(right[k] + c * b.lanes).load_vector() for c in range(columns)]
            for r in range(rows):
                x = b.splat_factor((lines[r] + k * column_stride).load())
                for i, vector in enumerate(vectors, r * columns):
                    sums[i] = b.fma(x, vector, sums[i]) if self.per_word == 1 else b.dot(x, vector, sums[i])

    # weights

    @function
    def weights(
        self, b: Builder, has_alibi: bool, has_mask: bool, sees_all: bool,
        rows: Value, scale: Value, bias: Matrix, slopes: Pointer, distance: Value,
        first: Value, last: Value, count: Value, tile: Matrix, mask: Matrix,
    ) -> None:  # fmt: skip
        """Compute P = σ(scale · S + bias) in place of S; 0 for keys that a query does not see.

        Args:
            has_alibi, has_mask: whether ALiBi and an additive mask are added to the logits.
            sees_all: whether every query sees every column, so that nothing is hidden.
            distance: position of the first query minus that of the first key.
            first, last: columns of the first and the last key that the first query sees; they may lie outside.
            count: number of columns that exist.
        """
        # the unit of the logits, and the function that computes weights of logits in this unit
        unit, activation = (-1.0, sigmoid) if self.per_word == 1 else (-LOG2_E, coarse_sigmoid)
        factor, zero = b.splat(scale * unit), b.vector(0.0)
        if has_alibi:
            slopes_before, slopes_after = (b.splat((slopes + side).load() * unit) for side in (0, 1))
        with b.loop(0, rows) as r:
            row_bias, mask_row = b.splat(bias[r].load() * unit), mask[r].of(FLOAT)
            low = self._column(b, first + r)
            high = self._column(b, b.minimum(last + r, count - 1))
            scores = [tile[r] + c * b.lanes for c in range(self.registers.columns)]
            logits, visible = [], []
            for c, score in enumerate(scores):
                term = row_bias
                if has_alibi:
                    before, after = self._distances(b, distance + r, c)
                    term = b.fma(-slopes_before, before, term)
                    term = b.fma(-slopes_after, after, term)
                column = b.lane_indices() + c * b.lanes
                is_visible = (column >= low) & (column <= high)
                logit = b.fma(score.load_vector(), factor, term)
                if has_mask:
                    added = (mask_row + c * b.lanes).load_vector()
                    logit = b.fma(b.vector(unit), added, logit)  # last: a lift in the bias must not cancel it before
                    is_visible = is_visible & (added != -math.inf)  # its sum with a logit of inf or NaN is NaN
                logits.append(logit)
                visible.append(is_visible)
            for score, weight, is_visible in zip(scores, activation(b, logits), visible, strict=True):
                score.store(weight if sees_all else b.select(is_visible, weight, zero))

    @function
    def hide(self, b: Builder, rows: Value, tile: Matrix, mask: Matrix) -> None:
        """Set weights to 0 where a mask of bool is False."""
        with b.loop(0, rows) as r:
            mask_row = mask[r]
            for c in range(self.registers.columns):
                weights = tile[r] + c * b.lanes
                is_hidden = (mask_row + c * b.lanes).load_vector() == 0
                weights.store(b.select(is_hidden, b.vector(0.0), weights.load_vector()))

    @function
    def add_weights(self, b: Builder, rows: Value, tile: Matrix, sums: Pointer) -> None:
        """Add the weights of each row to a vector of sums, which has another number for each lane."""
        with b.loop(0, rows) as r:
            total = (sums + r * b.lanes).load_vector()
            for c in range(self.registers.columns):
                total = total + (tile[r] + c * b.lanes).load_vector()
            (sums + r * b.lanes).store(total)

    @function
    def drop(
        self, b: Builder, rows: Value, row_hashes: Pointer, column_hashes: Pointer, keep_from: Value, keep_scale: Value,
        tile: Matrix,
    ) -> None:  # fmt: skip
        """Multiply the numbers that dropout keeps by ``keep_scale``, the others by 0 (``ops.dropout``)."""
        smallest, scale, zero = b.splat(keep_from.to_int32()), b.splat(keep_scale), b.vector(0.0)
        with b.loop(0, rows) as r:
            row_hash = b.splat((row_hashes + r).load())
            for c in range(self.registers.columns):
                x = row_hash ^ (column_hashes + c * b.lanes).load_vector()
                for shift, multiplier in zip(dropout.SHIFTS, dropout.FACTORS, strict=True):
                    x = (x ^ (x >> shift)) * multiplier
                numbers = tile[r] + c * b.lanes
                scaled = numbers.load_vector() * scale
                numbers.store(b.select(x >= smallest, scaled, zero))

    @function
    def load_weights(self, b: Builder, rows: Value, weights: Matrix, tile: Pointer) -> None:
        """Read rows of saved weights into a microtile."""
        with b.loop(0, rows) as r:
            for c in range(self.registers.columns):
                saved = weights[r] + c * b.lanes // self.per_word
                vector = saved.load_vector() if self.per_word == 1 else b.widen(saved.of(INT16).load_vector())
                (tile + (r * self.registers.tile + c * b.lanes)).store(vector)

    @function
    def grad_scores(
        self, b: Builder, num_sums: int,
        rows: Value, weights: Pointer, scale: Value, distance: Value, row_terms: Matrix, tile: Pointer, sums: Pointer,
    ) -> None:  # fmt: skip
        """Compute dS = scale · P (1 - P) · (dP - row term) in place of dP, and add sums over each row of dS / scale.

        Args:
            num_sums: 0; 1 for the gradient of the bias; 3 for those of the bias and of both slopes of ALiBi.
            distance: as for the weights.
        """
        factor, zero = b.splat(scale), b.vector(0.0)
        with b.loop(0, rows) as r:
            totals, row_term = [zero] * num_sums, b.splat(row_terms[r].load())
            for c in range(self.registers.columns):
                offset = r * self.registers.tile + c * b.lanes
                weight, grad_weights = (weights + offset).load_vector(), tile + offset
                slope = b.fma(-weight, weight, weight)
                hidden = weight == 0.0  # its dP may be NaN
                grad = b.select(hidden, zero, (grad_weights.load_vector() - row_term) * slope)
                grad_weights.store(grad * factor)
                distances = self._distances(b, distance + r, c) if num_sums > 1 else ()
                factors = (b.vector(1.0), *distances)
                totals = [b.fma(grad, f, total) for f, total in zip(factors, totals, strict=False)]
            for i, total in enumerate(totals):
                target = sums + (r * 3 + i)
                target.store(target.load() + b.sum(total))

    def _column(self, b: Builder, index: Value) -> Value:
        """Return a vector of the index of a column, limited to 32 bits."""
        return b.splat(b.maximum(b.minimum(index, self.registers.tile), -1).to_int32())

    def _distances(self, b: Builder, distance: Value, column: int) -> tuple[Value, Value]:
        """Return the distances to keys before and after a query, given its distance to the first key of the tile."""
        gap = b.splat((distance - column * b.lanes).to_float()) - b.lane_indices().to_float()
        zero = b.vector(0.0)
        is_before = gap > 0.0
        return b.select(is_before, gap, zero), b.select(is_before, zero, -gap)

    # copies in other orders

    @function
    def transpose(self, b: Builder, rows: Matrix, out: Pointer) -> None:
        """Transpose a square of as many rows as a vector has numbers into rows of a tile."""
        vectors = b.transpose([rows[r].load_vector() for r in range(b.lanes)])
        for r, vector in enumerate(vectors):
            (out + r * self.registers.tile).store(vector)

    @function
    def pair_columns(self, b: Builder, rows: Value, tile: Matrix, out: Matrix) -> None:
        """Round rows of a microtile to bfloat16, in pairs along the rows; out may be the start of the same row."""
        with b.loop(0, rows) as r:
            for c in range(self.registers.columns):
                vector = (tile[r] + c * b.lanes).load_vector()
                (out[r].of(INT16) + c * b.lanes).store(b.round(vector))

    @function
    def pair_rows(self, b: Builder, rows: int, tile: Pointer, out: Pointer) -> None:
        """Round a microtile to bfloat16, in pairs of rows; the last is paired with 0 if it is alone."""
        width = self.registers.tile
        for r in range(0, rows, 2):
            for column in range(0, width, b.lanes):
                pair = [(tile + (i * width + column)).load_vector() for i in range(r, min(r + 2, rows))]
                first, second = [b.round(x) for x in (*pair, b.vector(0.0))][:2]
                (out + (r // 2 * width + column)).store(b.pair(first, second))
