"""Kernels of sigmoid attention for the vector units of a CPU.

The forward pass (Algorithm 1) computes σ where a microtile of logits is complete, and multiplies it with the values at
once. The backward pass (Algorithm 2) loops over tiles of keys: it computes the weights again, unless the forward pass
saved them, and all products of a tile while its numbers are in the L1 cache.

bfloat16 is read in pairs (``microtiles``): along the features from the tensors, along queries and keys from copies. The
sums of its results are float32 and rounded once.
"""

from __future__ import annotations

from types import SimpleNamespace

from llvmlite import ir

from sigattn.ops.llvm.arguments import FORWARD_ROWS
from sigattn.ops.llvm.builder import INT8, INT16, INT32, INT64, Builder, Matrix, Pointer, Value
from sigattn.ops.llvm.copies import Copies
from sigattn.ops.llvm.processor import Registers

BACKWARD_ROWS = 96  # queries of a block, whose weights and gradients stay in the cache for dV and dK
NAMES = {1: ("pack", "forward", "backward"), 2: ("pack", "forward", "pair_queries", "backward")}  # by elements per word


def make_module(registers: Registers, per_word: int) -> ir.Module:
    """Return the module of the kernels in ``NAMES`` for tensors with some elements in a word of 32 bits."""
    kernels, tile, rows = _Kernels(registers, per_word), registers.tile, registers.rows
    kernels.add_kernel("pack", kernels.pack_keys)
    kernels.add_kernel("forward", kernels.forward, rows * 2 * tile, FORWARD_ROWS * registers.lanes)
    if per_word == 1:
        kernels.add_kernel("backward", kernels.backward, BACKWARD_ROWS * tile, BACKWARD_ROWS * tile)
    else:
        kernels.add_kernel("pair_queries", kernels.pair_queries)
        block = BACKWARD_ROWS // 2 * tile
        kernels.add_kernel("backward", kernels.backward, block, block, rows * tile, rows * tile)
    return kernels.module


class _Kernels(Copies):
    """Kernels; each method emits one task: ``args`` are the ``KernelArguments``, ``task`` is the task's index."""

    def pack_keys(self, b: Builder, args: SimpleNamespace, task: Value, scratch: list[Pointer]) -> None:
        """Pack the keys of a key head, and if they are bfloat16, its values in pairs. A task for each key head."""
        kv_heads, tiles, size = args.heads // args.heads_per_kv, self.pad_to_tiles(args.m), self._words(args.head_dim)
        sample, head = task // kv_heads, task % kv_heads
        out = args.packed_keys + task * (tiles * size)
        self.pack(b, args.key.head(sample, head), size, 0, tiles, args.m, out)
        if self.per_word == 2:
            pairs = self.paired(args.value_pairs, task, args.m, args.value_dim)
            self.pair(b, args.value.head(sample, head), args.value_dim, 0, args.m, _length(args, sample), pairs)

    def pair_queries(self, b: Builder, args: SimpleNamespace, task: Value, scratch: list[Pointer]) -> None:
        """Copy the queries of a head and the gradients of its output in pairs. A task for each head."""
        sample, head = task // args.heads, task % args.heads
        for rows, memory, width in (
            (args.query, args.query_pairs, args.head_dim),
            (args.grad_out, args.grad_out_pairs, args.value_dim),
        ):
            pairs = self.paired(memory, task, args.n, width)
            self.pair(b, rows.head(sample, head), width, 0, args.n, args.n, pairs)

    def forward(self, b: Builder, args: SimpleNamespace, task: Value, scratch: list[Pointer]) -> None:
        """Compute the output of a block of queries of a head. A task for each block of each head."""
        tile, pair_of_tiles, size = self.registers.tile, 2 * self.registers.tile, self._words(args.head_dim)
        blocks = (args.n + (FORWARD_ROWS - 1)) // FORWARD_ROWS
        number, index = task // blocks, task % blocks
        sample, head = number // args.heads, number % args.heads
        first = (blocks - 1 - index) * FORWARD_ROWS  # the longest rows of a causal mask first
        count = b.minimum(args.n - first, FORWARD_ROWS)
        kv_head = head // args.heads_per_kv
        kv_number = sample * (args.heads // args.heads_per_kv) + kv_head
        length, position = _length(args, sample), first + args.query_offset

        out = self.sums(args.out, args.out_sums, sample, head, number, args.n, args.value_dim)[first:]
        query, bias = args.query.head(sample, head)[first:], args.bias.head(sample, head)[first:]
        mask = args.mask.head(sample, head, INT8)[first:]
        slopes, row_hashes = _slopes(args, sample, head), _row_hashes(args, sample, head) + first
        keys = args.packed_keys + kv_number * (self.pad_to_tiles(args.m) * size)
        value = args.value.head(sample, kv_head)
        value_pairs = self.paired(args.value_pairs, kv_number, args.m, args.value_dim)
        logits = Matrix(scratch[0], pair_of_tiles)  # of a microtile's rows and two tiles of keys
        saves, saved = args.saves == 1, self._saved_weights(args, number)[first:]
        weights = Matrix(b.select_pointer(saves, saved.data, logits.data), b.select(saves, saved.stride, pair_of_tiles))

        with b.when(args.packs_keys > 0):
            self.pack_keys(b, args, kv_number, [])
        self.clear_rows(b, out, 0, count, args.value_dim)
        weight_sums = Matrix(scratch[1], b.lanes)  # a vector for each row, whose numbers add to the sum
        with b.when(args.normalizes == 1):
            self.clear_rows(b, weight_sums, 0, count, b.lanes)
        start = b.round_down(b.maximum(position - args.left, 0), pair_of_tiles)
        stop = b.minimum(length, position + count + args.right)
        with b.loop(start, stop, pair_of_tiles) as column:
            for row, rows in b.groups(count, self.registers.rows):
                microtile = weights.data + args.saves * (row * weights.stride + self._words(column))
                with b.when(self._sees(args, position + row, rows, column)):
                    end = b.minimum(length, column + pair_of_tiles)
                    with b.loop(column, end, tile) as key:
                        # P = σ(scale · Q Kᵀ + b)
                        target = Matrix(microtile + self._words(key - column), weights.stride)
                        scores = target if self.per_word == 1 else Matrix(logits.data + (key - column), pair_of_tiles)
                        self.product(b, rows, query[row:], keys + key * size, size, scores)
                        corner = Matrix(mask[row] + key * args.mask_itemsize, mask.stride)
                        self._weights(
                            b, args, rows, bias[row:], slopes, position + row - key, length - key, scores, corner
                        )
                        with b.when(args.normalizes == 1):
                            self.add_weights(b, rows, scores, weight_sums[row])
                        self._drop(b, args, rows, row_hashes + row, key, scores)
                        if self.per_word == 2:
                            self.pair_columns(b, rows, scores, target)
                    # O += P V
                    factor, words = self.right_factor(value, value_pairs, column, end - column)
                    left = Matrix(microtile, weights.stride)
                    self.add_product(b, rows, left, 1, factor, words, out[row:], args.value_dim)
        with b.when(args.normalizes == 1):
            sums_of_head = Matrix(args.weight_sums + (number * args.n + first) * 2, 2)
            self.divide_rows(b, out, count, args.value_dim, weight_sums, sums_of_head)
        if self.per_word == 2:
            self.round_rows(b, out, count, args.value_dim, args.out.head(sample, head, INT16)[first:])

    def backward(self, b: Builder, args: SimpleNamespace, task: Value, scratch: list[Pointer]) -> None:
        """Compute the gradients of a split of a head's keys and values, and its share of the queries' gradients.

        A task for each split of each key head.
        """
        tile, size, width = self.registers.tile, self._words(args.head_dim), self._words(args.value_dim)
        kv_heads = args.heads // args.heads_per_kv
        kv_number, split = task // args.splits, task % args.splits
        sample, kv_head = kv_number // kv_heads, kv_number % kv_heads
        length, tiles = _length(args, sample), self.pad_to_tiles(args.m)
        step = self.pad_to_tiles((args.m + (args.splits - 1)) // args.splits)
        first = b.minimum(split * step, args.m)
        last = b.minimum(first + step, args.m)

        key, value = args.key.head(sample, kv_head), args.value.head(sample, kv_head)
        grad_key = self.sums(args.grad_key, args.grad_key_sums, sample, kv_head, kv_number, args.m, args.head_dim)
        grad_value = self.sums(
            args.grad_value, args.grad_value_sums, sample, kv_head, kv_number, args.m, args.value_dim
        )
        keys = args.packed_keys + kv_number * (tiles * size)
        values = args.packed_values + kv_number * (tiles * width)
        key_pairs = self.paired(args.key_pairs, kv_number, args.m, args.head_dim)
        with b.when(args.saves == 0):
            self.pack(b, key, size, first, last, args.m, keys)
        self.pack(b, value, width, first, last, args.m, values)
        if self.per_word == 2:
            self.pair(b, key, args.head_dim, first, last, length, key_pairs)
        self.clear_rows(b, grad_key, first, last, args.head_dim)
        self.clear_rows(b, grad_value, first, last, args.value_dim)

        samples = args.tasks // args.splits // kv_heads
        with b.loop(0, args.heads_per_kv) as group_index:
            head = kv_head * args.heads_per_kv + group_index
            number = sample * args.heads + head
            split_number = split * (samples * args.heads) + number
            query, grad_out = args.query.head(sample, head), args.grad_out.head(sample, head)
            bias, mask = args.bias.head(sample, head), args.mask.head(sample, head, INT8)
            row_terms = args.row_terms.head(sample, head)
            slopes, row_hashes = _slopes(args, sample, head), _row_hashes(args, sample, head)
            query_pairs = self.paired(args.query_pairs, number, args.n, args.head_dim)
            grad_out_pairs = self.paired(args.grad_out_pairs, number, args.n, args.value_dim)
            saved, score_sums = self._saved_weights(args, number), args.score_sums + split_number * (args.n * 3)
            grad_query = self.sums(
                args.grad_query, args.grad_query_sums, sample, head, split_number, args.n, args.head_dim
            )
            if self.per_word == 1:
                grad_query = Matrix(grad_query.data + split * args.grad_query_split_stride, grad_query.stride)
            self.clear_rows(b, grad_query, 0, args.n, args.head_dim)
            with b.loop(first, b.minimum(last, length), tile) as column:
                count = b.minimum(length - column, tile)
                key_factor, key_words = self.right_factor(key, key_pairs, column, count)
                start = b.round_down(b.maximum(column - args.query_offset - args.right, 0), BACKWARD_ROWS)
                stop = b.minimum(args.n, column + tile + args.left - args.query_offset)
                with b.loop(start, stop, BACKWARD_ROWS) as block:
                    block_size = b.minimum(args.n - block, BACKWARD_ROWS)
                    for i, rows in b.groups(block_size, self.registers.rows):
                        row = block + i
                        position = row + args.query_offset
                        distance = position - column
                        # float32: in the memory of the block; bfloat16: in that of a microtile, rounded at the end
                        weights, grads = (
                            Matrix(memory + i * tile if self.per_word == 1 else memory, tile)
                            for memory in (scratch if self.per_word == 1 else scratch[2:])
                        )
                        # P = σ(scale · Q Kᵀ + b)
                        with b.when(args.saves == 0):
                            self.product(b, rows, query[row:], keys + column * size, size, weights)
                            corner = Matrix(mask[row] + column * args.mask_itemsize, mask.stride)
                            self._weights(b, args, rows, bias[row:], slopes, distance, count, weights, corner)
                        with b.when(args.saves == 1):
                            is_saved = self._sees(args, position, rows, b.round_down(column, 2 * tile))
                            with b.when(is_saved):
                                self.load_weights(
                                    b, rows, Matrix(saved[row] + self._words(column), saved.stride), weights.data
                                )
                            with b.when(~is_saved):
                                self.clear(b, rows, weights.data)
                        # dP = dO Vᵀ, dS = scale · P (1 - P) · (dP - row term)
                        self.product(b, rows, grad_out[row:], values + column * width, width, grads)
                        self._drop(b, args, rows, row_hashes + row, column, grads)
                        for size_of_sums in (0, 1, 3):
                            with b.when(args.score_sums_size == size_of_sums):
                                self.grad_scores(
                                    b, size_of_sums, rows, weights.data, args.scale, distance, row_terms[row:],
                                    grads.data, score_sums + row * 3,
                                )  # fmt: skip
                        self._drop(b, args, rows, row_hashes + row, column, weights)  # for the gradient of the values
                        if self.per_word == 2:
                            for source, memory in ((weights, scratch[0]), (grads, scratch[1])):
                                self.pair_rows(b, rows, source.data, memory + i // 2 * tile)
                            self.pair_columns(b, rows, grads, grads)
                        # dQ += dS K
                        self.add_product(b, rows, grads, 1, key_factor, key_words, grad_query[row:], args.head_dim)
                    # dV += Pᵀ dO, dK += dSᵀ Q
                    query_factor = self.right_factor(query, query_pairs, block, block_size)
                    grad_out_factor = self.right_factor(grad_out, grad_out_pairs, block, block_size)
                    for i, rows in b.groups(count, self.registers.rows):
                        for left, factor, result, columns in (
                            (scratch[0], grad_out_factor, grad_value, args.value_dim),
                            (scratch[1], query_factor, grad_key, args.head_dim),
                        ):
                            self.add_product(b, rows, Matrix(left + i, 1), tile, *factor, result[column + i :], columns)
            if self.per_word == 2:
                with b.when(args.splits == 1):
                    out = args.grad_query.head(sample, head, INT16)
                    self.round_rows(b, grad_query, args.n, args.head_dim, out)
        if self.per_word == 2:
            for sums, result, columns in (
                (grad_key, args.grad_key, args.head_dim), (grad_value, args.grad_value, args.value_dim),
            ):  # fmt: skip
                out = result.head(sample, kv_head, INT16)[first:]
                self.round_rows(b, sums[first:], last - first, columns, out)

    def _words(self, elements: Value) -> Value:
        """Return the number of words of 32 bits that some elements take."""
        return elements // self.per_word

    def _weights(
        self, b: Builder, args: SimpleNamespace, rows: int, bias: Matrix, slopes: Pointer, distance: Value,
        count: Value, scores: Matrix, mask: Matrix,
    ) -> None:  # fmt: skip
        """Compute the weights of rows of a microtile in place of their scores; arguments of ``Microtiles.weights``."""
        adds_mask = args.mask_itemsize == 4
        for has_alibi in (False, True):
            for has_mask, is_kind in ((False, ~adds_mask), (True, adds_mask)):
                with b.when((args.alibi == int(has_alibi)) & is_kind):
                    self.weights(
                        b, has_alibi, has_mask, rows, args.scale, bias, slopes, distance, distance - args.left,
                        distance + args.right, count, scores, mask,
                    )  # fmt: skip
        with b.when(args.mask_itemsize == 1):
            self.hide(b, rows, scores, mask)

    def _drop(
        self, b: Builder, args: SimpleNamespace, rows: int, row_hashes: Pointer, column: Value, tile: Matrix
    ) -> None:  # fmt: skip
        """Apply dropout, if there is one, to rows of a microtile whose first key is ``column``."""
        with b.when(args.dropout == 1):
            column_hashes = args.column_hashes.of(INT32) + column
            self.drop(b, rows, row_hashes, column_hashes, args.keep_from, args.keep_scale, tile)

    def _sees(self, args: SimpleNamespace, position: Value, rows: int, column: Value) -> Value:
        """Return the condition that the window lets one of some queries see a key of the two tiles from ``column`` on.

        Args:
            position: of the first query. rows: number of queries.
        """
        is_before_end = column < position + rows + args.right
        return is_before_end & (position - args.left < column + 2 * self.registers.tile)

    def _saved_weights(self, args: SimpleNamespace, number: Value) -> Matrix:
        """Return the matrix of a head's saved weights, in words; ``number`` is the index of the head in all samples."""
        stride = self._words(self.pad_to_tiles(args.m))
        return Matrix(args.weights + number * args.n * stride, stride)


def _length(args: SimpleNamespace, sample: Value) -> Value:
    """Return the number of a sample's keys."""
    return (args.lengths.of(INT64) + sample * args.lengths_batch_stride).load()


def _slopes(args: SimpleNamespace, sample: Value, head: Value) -> Pointer:
    return args.slopes + (sample * args.slopes_batch_stride + head * 2)


def _row_hashes(args: SimpleNamespace, sample: Value, head: Value) -> Pointer:
    return args.row_hashes.of(INT32) + (sample * args.heads + head) * args.n
