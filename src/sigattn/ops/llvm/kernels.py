"""Kernels of sigmoid attention for the vector units of a CPU.

The forward pass (Algorithm 1) computes σ where a microtile of logits is complete, and multiplies it with the values at
once. The backward pass (Algorithm 2) loops over tiles of keys: it computes the weights again, unless the forward pass
saved them, and all products of a tile while its numbers are in the L1 cache.

bfloat16 is read in pairs (``microtiles``): along the features from the tensors, along queries and keys from copies. The
sums of its results are float32 and rounded once.
"""

from types import SimpleNamespace

from llvmlite import ir

from sigattn.ops.llvm.arguments import BACKWARD_ROWS, FORWARD_ROWS
from sigattn.ops.llvm.builder import INT8, INT32, INT64, Builder, Matrix, Pointer, Value
from sigattn.ops.llvm.copies import Copies
from sigattn.ops.llvm.processor import Registers

NAMES = ("pack", "forward", "backward")


def make_module(registers: Registers, per_word: int) -> ir.Module:
    """Return the module of the kernels in ``NAMES`` for tensors with some elements in a word of 32 bits."""
    kernels, tile, rows = _Kernels(registers, per_word), registers.tile, registers.rows
    kernels.add_kernel("pack", kernels.pack_keys)
    kernels.add_kernel("forward", kernels.forward, rows * 2 * tile, FORWARD_ROWS * registers.lanes)
    if per_word == 1:
        kernels.add_kernel("backward", kernels.backward, BACKWARD_ROWS * tile, BACKWARD_ROWS * tile)
    else:
        block = BACKWARD_ROWS // 2 * tile
        kernels.add_kernel("backward", kernels.backward, block, block, rows * tile, rows * tile)
    return kernels.module


class _Kernels(Copies):
    """Kernels; each method emits one task: ``args`` are the ``KernelArguments``, ``task`` is the task's index."""

    def pack_keys(self, b: Builder, args: SimpleNamespace, task: Value, scratch: list[Pointer]) -> None:
        """Pack the keys of a key head, and if they are bfloat16, its values in pairs. A task for each key head."""
        self._pack_keys(b, args, task, task)

    def _pack_keys(self, b: Builder, args: SimpleNamespace, number: Value, slot: Value) -> None:
        """Pack a key head in a slot of the memory; ``number`` is the index of the head in all samples."""
        kv_heads, size = args.heads // args.heads_per_kv, self._words(args.head_dim)
        sample, head, tiles = number // kv_heads, number % kv_heads, self.round_up(args.m, self.registers.tile)
        self.pack(b, args.key.head(sample, head), size, tiles, args.m, args.packed_keys + slot * (tiles * size))
        if self.per_word == 2:
            pairs = self.paired(args.value_pairs, slot * tiles, args.value_dim)
            self.pair(b, args.value.head(sample, head), args.value_dim, _length(args, sample), pairs)

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

        result = args.out.head(sample, head, self.element)[first:]
        out = self.sums(result, args.out_sums, args.worker * FORWARD_ROWS, args.value_dim)
        query, bias = args.query.head(sample, head)[first:], args.bias.head(sample, head)[first:]
        mask = args.mask.head(sample, head, INT8)[first:]
        slopes, row_hashes = _slopes(args, sample, head), _row_hashes(args, sample, head) + first
        packs_keys, tiles = args.packs_keys == 1, self.round_up(args.m, self.registers.tile)
        slot = b.select(packs_keys, args.worker, kv_number)
        keys, value = args.packed_keys + slot * (tiles * size), args.value.head(sample, kv_head)
        value_pairs = self.paired(args.value_pairs, slot * tiles, args.value_dim)
        logits = Matrix(scratch[0], pair_of_tiles)  # of a microtile's rows and two tiles of keys
        saves, saved = args.saves == 1, self._saved_weights(args, number)[first:]
        weights = Matrix(b.select_pointer(saves, saved.data, logits.data), b.select(saves, saved.stride, pair_of_tiles))

        with b.when(packs_keys):
            self._pack_keys(b, args, kv_number, slot)
        self.clear_rows(b, out, count, args.value_dim)
        weight_sums = Matrix(scratch[1], b.lanes)  # a vector for each row, whose numbers add to the sum
        with b.when(args.normalizes == 1):
            self.clear_rows(b, weight_sums, count, b.lanes)
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
                    factor = self.right_factor(value[column:], value_pairs[column // 2 :], end - column)
                    left = Matrix(microtile, weights.stride)
                    self.add_product(b, rows, left, 1, *factor, out[row:], args.value_dim)
        with b.when(args.normalizes == 1):
            sums_of_head = Matrix(args.weight_sums + (number * args.n + first) * 2, 2)
            self.divide_rows(b, out, count, args.value_dim, weight_sums, sums_of_head, args.small_sum)
        if self.per_word == 2:
            self.round_rows(b, out, count, args.value_dim, result)

    def backward(self, b: Builder, args: SimpleNamespace, task: Value, scratch: list[Pointer]) -> None:
        """Add to the gradients of a split of a head's keys and values what some of its queries contribute.

        The gradient of these queries is complete if there is one split, else to be added. A task for each split of each
        key head: of n splits, each has one tile in n.
        """
        tile, size, width = self.registers.tile, self._words(args.head_dim), self._words(args.value_dim)
        group, kv_heads = args.heads_per_kv, args.heads // args.heads_per_kv
        kv_number, split, is_only = task // args.splits, task % args.splits, args.splits == 1
        sample, kv_head = kv_number // kv_heads, kv_number % kv_heads
        length, first = _length(args, sample), args.first_query
        num_rows = b.minimum(args.n - first, args.part_size)
        split_number = split * (args.tasks // args.splits) + kv_number
        slot = b.select(is_only, args.worker, split_number)  # of dQ

        def of_query_head(index: Value) -> tuple[Matrix, Matrix, Matrix, Matrix]:
            """Return dQ, where it is summed, and pairs of Q and dO, of a query head among those that share the keys."""
            result = args.grad_query.head(sample, kv_head * group + index, self.element)[first:]
            sums = Matrix(args.grad_query_sums + (slot * group + index) * args.part_size * args.head_dim, args.head_dim)
            if self.per_word == 1:
                data = b.select_pointer(is_only, result.data, sums.data)
                sums = Matrix(data, b.select(is_only, result.stride, sums.stride))
            row = (args.worker * group + index) * args.part_size
            pairs = self.paired(args.query_pairs, row, args.head_dim)
            return result, sums, pairs, self.paired(args.grad_out_pairs, row, args.value_dim)

        key, value = args.key.head(sample, kv_head), args.value.head(sample, kv_head)
        keys, values = args.packed_keys + args.worker * (tile * size), args.packed_values + args.worker * (tile * width)
        key_pairs = self.paired(args.key_pairs, args.worker * tile, args.head_dim)
        with b.loop(0, group) as index:
            _, grad_query, query_pairs, grad_out_pairs = of_query_head(index)
            self.clear_rows(b, grad_query, num_rows, args.head_dim)
            if self.per_word == 2:
                head = kv_head * group + index
                self.pair(b, args.query.head(sample, head)[first:], args.head_dim, num_rows, query_pairs)
                self.pair(b, args.grad_out.head(sample, head)[first:], args.value_dim, num_rows, grad_out_pairs)
        step = args.splits * args.key_group
        with (
            b.loop(split * tile, args.m, step) as first_key,
            b.loop(0, num_rows, args.query_group) as first_row,
            b.loop(first_key, b.minimum(args.m, first_key + step), args.splits * tile) as column,
        ):
            last_row = b.minimum(num_rows, first_row + args.query_group)
            offset = column - first - args.query_offset  # of the first key to the first query
            start = b.round_down(b.maximum(offset - args.right, 0), self.registers.rows)
            start = b.maximum(start, first_row)
            stop = b.minimum(last_row, self.round_up(offset + tile + args.left, self.registers.rows))
            existing, count = b.minimum(args.m - column, tile), b.minimum(length - column, tile)
            key_result = args.grad_key.head(sample, kv_head, self.element)[column:]
            value_result = args.grad_value.head(sample, kv_head, self.element)[column:]
            row_of_worker = args.worker * args.key_group + (column - first_key)
            row_of_sums = b.select(is_only, row_of_worker, kv_number * args.m + column)
            grad_key = self.sums(key_result, args.grad_key_sums, row_of_sums, args.head_dim)
            grad_value = self.sums(value_result, args.grad_value_sums, row_of_sums, args.value_dim)
            with b.when(first + first_row == 0):
                self.clear_rows(b, grad_key, existing, args.head_dim)
                self.clear_rows(b, grad_value, existing, args.value_dim)
            with b.when((count > 0) & (start < stop)):
                with b.when(args.saves == 0):
                    self.pack(b, key[column:], size, tile, existing, keys)
                self.pack(b, value[column:], width, tile, existing, values)
                if self.per_word == 2:
                    self.pair(b, key[column:], args.head_dim, count, key_pairs)
                key_factor = self.right_factor(key[column:], key_pairs, count)
                with b.loop(0, group) as index:
                    head, number = kv_head * group + index, kv_number * group + index
                    query, grad_out = args.query.head(sample, head)[first:], args.grad_out.head(sample, head)[first:]
                    bias, mask = args.bias.head(sample, head)[first:], args.mask.head(sample, head, INT8)[first:]
                    row_terms = args.row_terms.head(sample, head)[first:]
                    slopes, row_hashes = _slopes(args, sample, head), _row_hashes(args, sample, head) + first
                    saved = self._saved_weights(args, number)[first:]
                    score_sums = Matrix(args.score_sums, 3)[(split_number * group + index) * args.n + first :]
                    _, grad_query, query_pairs, grad_out_pairs = of_query_head(index)
                    with b.loop(start, stop, BACKWARD_ROWS) as block:
                        block_size = b.minimum(stop - block, BACKWARD_ROWS)
                        for i, rows in b.groups(block_size, self.registers.rows):
                            row = block + i
                            distance = row - offset
                            # float32: in the memory of the block; bfloat16: in that of a microtile, rounded at the end
                            weights, grads = (
                                Matrix(memory + i * tile if self.per_word == 1 else memory, tile)
                                for memory in (scratch if self.per_word == 1 else scratch[2:])
                            )
                            # P = σ(scale · Q Kᵀ + b)
                            with b.when(args.saves == 0):
                                self.product(b, rows, query[row:], keys, size, weights)
                                corner = Matrix(mask[row] + column * args.mask_itemsize, mask.stride)
                                self._weights(b, args, rows, bias[row:], slopes, distance, count, weights, corner)
                            with b.when(args.saves == 1):
                                is_saved = self._sees(args, distance + column, rows, b.round_down(column, 2 * tile))
                                with b.when(is_saved):
                                    saved_rows = Matrix(saved[row] + self._words(column), saved.stride)
                                    self.load_weights(b, rows, saved_rows, weights.data)
                                with b.when(~is_saved):
                                    self.clear_rows(b, weights, rows, tile)
                            # dP = dO Vᵀ, dS = scale · P (1 - P) · (dP - row term)
                            self.product(b, rows, grad_out[row:], values, width, grads)
                            self._drop(b, args, rows, row_hashes + row, column, grads)
                            for size_of_sums in (0, 1, 3):
                                with b.when(args.score_sums_size == size_of_sums):
                                    self.grad_scores(
                                        b, size_of_sums, rows, weights.data, args.scale, distance, row_terms[row:],
                                        grads.data, score_sums[row],
                                    )  # fmt: skip
                            self._drop(b, args, rows, row_hashes + row, column, weights)  # for the gradient of V
                            if self.per_word == 2:
                                for source, memory in ((weights, scratch[0]), (grads, scratch[1])):
                                    self.pair_rows(b, rows, source.data, memory + i // 2 * tile)
                                self.pair_columns(b, rows, grads, grads)
                            # dQ += dS K
                            self.add_product(b, rows, grads, 1, *key_factor, grad_query[row:], args.head_dim)
                        # dV += Pᵀ dO, dK += dSᵀ Q
                        grad_out_factor = self.right_factor(grad_out[block:], grad_out_pairs[block // 2 :], block_size)
                        query_factor = self.right_factor(query[block:], query_pairs[block // 2 :], block_size)
                        for i, rows in b.groups(count, self.registers.rows):
                            for left, factor, grad, columns in (
                                (scratch[0], grad_out_factor, grad_value, args.value_dim),
                                (scratch[1], query_factor, grad_key, args.head_dim),
                            ):
                                self.add_product(b, rows, Matrix(left + i, 1), tile, *factor, grad[i:], columns)
            if self.per_word == 2:
                with b.when(first + last_row == args.n):
                    self.round_rows(b, grad_key, existing, args.head_dim, key_result)
                    self.round_rows(b, grad_value, existing, args.value_dim, value_result)
        if self.per_word == 2:
            with b.when(is_only), b.loop(0, group) as index:
                result, sums, *_ = of_query_head(index)
                self.round_rows(b, sums, num_rows, args.head_dim, result)

    def _words(self, elements: Value) -> Value:
        """Return the number of words of 32 bits that some elements take."""
        return elements // self.per_word

    def _weights(
        self, b: Builder, args: SimpleNamespace, rows: int, bias: Matrix, slopes: Pointer, distance: Value,
        count: Value, scores: Matrix, mask: Matrix,
    ) -> None:  # fmt: skip
        """Compute the weights of rows of a microtile in place of their scores; arguments of ``Microtiles.weights``."""
        tile, adds_mask = self.registers.tile, args.mask_itemsize == 4
        first, last = distance - args.left, distance + args.right
        sees_all = (first <= 1 - rows) & (last >= tile - 1) & (count >= tile)  # all rows all columns
        is_plain = (args.alibi == 0) & ~adds_mask & sees_all
        kinds = {(False, False, True): is_plain}
        for has_alibi in (False, True):
            for has_mask, is_kind in ((False, ~adds_mask), (True, adds_mask)):
                kinds[has_alibi, has_mask, False] = (args.alibi == int(has_alibi)) & is_kind & ~is_plain
        for kind, is_kind in kinds.items():
            with b.when(is_kind):
                self.weights(b, *kind, rows, args.scale, bias, slopes, distance, first, last, count, scores, mask)
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
        """Return the condition that the window lets one of some rows see a key of the two tiles from ``column`` on."""
        is_before_end = column < position + rows + args.right
        return is_before_end & (position - args.left < column + 2 * self.registers.tile)

    def _saved_weights(self, args: SimpleNamespace, number: Value) -> Matrix:
        """Return the matrix of a head's saved weights, in words; ``number`` is the index of the head in all samples."""
        stride = self._words(self.round_up(args.m, self.registers.tile))
        return Matrix(args.weights + number * args.n * stride, stride)


def _length(args: SimpleNamespace, sample: Value) -> Value:
    """Return the number of a sample's keys."""
    return (args.lengths.of(INT64) + sample * args.lengths_batch_stride).load()


def _slopes(args: SimpleNamespace, sample: Value, head: Value) -> Pointer:
    return args.slopes + (sample * args.slopes_batch_stride + head * 2)


def _row_hashes(args: SimpleNamespace, sample: Value, head: Value) -> Pointer:
    return args.row_hashes.of(INT32) + (sample * args.heads + head) * args.n
