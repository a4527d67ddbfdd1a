"""Kernels of sigmoid attention for the vector units of a CPU, as LLVM's intermediate representation.

The forward pass computes σ where a microtile of logits is complete, and multiplies it with the values at once
(Algorithm 1). The backward pass goes over tiles of keys (Algorithm 2): it computes the weights again, unless the
forward pass has saved them, and all products of a tile while its numbers are in the nearest cache. A kernel takes
tasks from a counter until none is left, so that it may run on any number of threads.

Tensors of bfloat16 are read as pairs (``microtiles``): along the features as they are, along queries and keys from
copies. The sums of their results are float32, and are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from sigattn.ops.llvm.builder import FLOAT, INT64, POINTER, Builder, int64, kernel
from sigattn.ops.llvm.memory import Memory
from sigattn.ops.llvm.microtiles import Registers

_NUMBERS = (
    "scale", "heads", "repeat", "n", "m", "head_dim", "value_dim", "left", "right",
    "query_offset", "alibi", "sums", "parts", "packs", "bias_value",
    "dropout", "least_hash", "keep_scale", "saves", "mask_size",
)  # fmt: skip
_FLOATS = ("scale", "bias_value", "keep_scale")
# by tensor, the axes whose strides are given: samples, heads, rows, parts
_TENSORS = {
    **dict.fromkeys(("query", "key", "value", "bias", "mask", "out", "grad_out", "grad_key", "grad_value"), "bhn"),
    "grad_query": "bhnp",
    **dict.fromkeys(("slopes", "lengths"), "b"),
    **dict.fromkeys(("keys", "values", "key_pairs", "value_pairs", "query_pairs", "grad_pairs"), ""),
    **dict.fromkeys(("out_sums", "grad_query_sums", "grad_key_sums", "grad_value_sums"), ""),
    **dict.fromkeys(("row_sums", "row_hashes", "column_hashes", "weights"), ""),
}
_STRIDES = {name: [f"{name}_{axis}" for axis in axes] for name, axes in _TENSORS.items()}
# Arguments of a kernel, 64 bits each. Packed ``keys`` and ``values`` have room for m rounded up to a tile. Copies of
# bfloat16 in pairs along queries or keys have room for an even number of them. Sums of results in bfloat16 are
# contiguous, those of queries (parts, B, Hq, N, head_dim). ``row_sums`` is (parts, B, Hq, N, 3). ``head_dim`` and
# ``value_dim`` are multiples of a vector of words. ``alibi`` is 1 with slopes; ``sums`` is the number of sums of each
# query in the backward pass (``Microtiles.score_gradient``); ``packs`` is 1 if the forward kernel packs the keys;
# ``dropout`` is 1 with dropout, whose hashes are int32, (B, Hq, N) and (M,) with room for whole tiles. ``saves`` is 1
# if the forward kernel writes ``weights`` (B, Hq, N, M rounded up to a tile), which the backward kernel reads, in calls
# without dropout, where windows let the queries of a microtile see its two tiles of keys. ``mask_size`` is the size of
# a number of ``mask`` in bytes, 1 if it is bool and 4 if it is float32, with room for whole tiles and strides in bytes;
# 0 without one. A strided tensor is followed by its strides, counted in words if it is read, else in numbers.
FIELDS = ("counter", "tasks", *_NUMBERS, *(f for name in _TENSORS for f in (name, *_STRIDES[name])))
INDEX = {name: index for index, name in enumerate(FIELDS)}
_TYPES = {name: POINTER if name in _TENSORS else FLOAT if name in _FLOATS else INT64 for name in FIELDS}

FORWARD_ROWS = 192  # queries of a task
_BACKWARD_ROWS = 96  # queries whose weights are kept until the products of the transposed tile
ANYWHERE = 1 << 40  # a window side without a limit


# kernels by the number of a tensor's numbers in 32 bits; pairs are made before the backward pass
NAMES = {1: ("pack", "forward", "backward"), 2: ("pack", "forward", "pair_queries", "backward")}


def make_module(registers: Registers, word: int) -> ir.Module:
    """Return the module of the kernels in ``NAMES`` for tensors with ``word`` numbers in 32 bits."""
    module = ir.Module("sigattn")
    kernels = _Kernels(module, registers, word)
    for name in NAMES[word]:
        getattr(kernels, name)()
    return module


class _Kernels(Memory):
    """Kernels of one module."""

    def _kernel(
        self, name: str, emit: Callable[[Builder, SimpleNamespace, Any, list[Any]], None], scratch: tuple[int, ...] = ()
    ) -> None:
        """Make a kernel, which calls ``emit`` for each task with the task's number and scratch memory."""

        def task(b: Builder, call: SimpleNamespace, number: Any, memory: list[Any]) -> None:
            call.head_words, call.value_words = (b.sdiv(x, int64(self.word)) for x in (call.head_dim, call.value_dim))
            emit(b, call, number, memory)

        kernel(self.module, name, self.registers.lanes, _TYPES, task, scratch)

    def pack(self) -> None:
        """Make the kernel ``pack``, with a task for each key head."""
        self._kernel("pack", lambda b, call, task, _: self._pack_keys(b, call, task))

    def forward(self) -> None:
        """Make the kernel ``forward``, with a task for each block of queries of each head."""
        self._kernel("forward", self._forward_block, (self.registers.rows * 2 * self.registers.tile,))

    def backward(self) -> None:
        """Make the kernel ``backward``, with ``parts`` tasks for each key head, one for each part of its keys."""
        block, microtile = (rows * self.registers.tile for rows in (_BACKWARD_ROWS, self.registers.rows))
        self._kernel(
            "backward",
            self._backward_part,
            (block, block) if self.word == 1 else (block // 2, block // 2, microtile, microtile),
        )

    def pair_queries(self) -> None:
        """Make the kernel ``pair_queries``, with a task for each head."""
        self._kernel("pair_queries", self._pair_queries)

    # copies

    def _pack_keys(self, b: Builder, call: SimpleNamespace, number: Any) -> None:
        """Pack the keys of a key head, given its number, and if they are bfloat16, its values as pairs."""
        kv, whole, size = b.sdiv(call.heads, call.repeat), self._tiles(b, call.m), call.head_words
        sample, head = b.sdiv(number, kv), b.srem(number, kv)
        out = b.at(call.keys, b.times(number, b.times(whole, size)))
        self._pack(b, self._head(b, call, "key", sample, head), call.key_n, size, 0, whole, call.m, out)
        if self.word == 2:
            value, length = self._head(b, call, "value", sample, head), self._length(b, call, sample)
            pairs = self._pairs(b, call.value_pairs, number, call.m, call.value_dim)
            self._pair(b, value, call.value_n, call.value_dim, 0, call.m, length, pairs)

    def _pair_queries(self, b: Builder, call: SimpleNamespace, number: Any, memory: list[Any]) -> None:
        """Copy the queries of a head and the gradients of its output in pairs, given the head's number."""
        sample, head = b.sdiv(number, call.heads), b.srem(number, call.heads)
        for name, pairs, width in (
            ("query", call.query_pairs, call.head_dim),
            ("grad_out", call.grad_pairs, call.value_dim),
        ):
            rows, stride = self._head(b, call, name, sample, head), getattr(call, f"{name}_n")
            self._pair(b, rows, stride, width, 0, call.n, call.n, self._pairs(b, pairs, number, call.n, width))

    # microtiles

    def _weights(
        self, b: Builder, call: SimpleNamespace, of_rows: SimpleNamespace, row: Any, column: Any, arguments: list[Any]
    ) -> None:
        """Compute the weights of rows of a microtile from their logits.

        Args:
            of_rows: has the mask of these rows' head or block. row, column: the microtile's first, of that mask.
            arguments: of ``Microtiles.weights``, without the mask.
        """
        mask = b.byte_at(of_rows.mask, b.times(row, call.mask_n), b.times(column, call.mask_size))
        adds = b.equal(call.mask_size, 4)
        for alibi in (False, True):
            has_alibi = b.equal(call.alibi, int(alibi))
            for masked, is_masked in ((False, b.not_(adds)), (True, adds)):
                given = [*arguments, mask, call.mask_n]
                b.when(b.and_(has_alibi, is_masked), partial(self.call, b, self.weights, (alibi, masked), given))
        hide = partial(self.call, b, self.hide, (), [arguments[0], *arguments[-2:], mask, call.mask_n])
        b.when(b.equal(call.mask_size, 1), hide)

    def _drop(
        self, b: Builder, call: SimpleNamespace, r: int,
        rows: Any, first_row: Any, first_key: Any, tile: Any, stride: Any,
    ) -> None:  # fmt: skip
        """Apply dropout to r rows of a microtile, given the head's row hashes and the indices of its corner."""
        row_hashes, column_hashes = b.at(rows, first_row), b.at(call.column_hashes, first_key)
        arguments = [r, row_hashes, column_hashes, call.least_hash, call.keep_scale, tile, stride]
        b.when(b.equal(call.dropout, 1), partial(self.call, b, self.drop, (), arguments))

    # forward

    def _forward_block(self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
        """Compute a block of queries."""
        wide = 2 * self.registers.tile
        blocks = b.sdiv(b.plus(call.n, FORWARD_ROWS - 1), int64(FORWARD_ROWS))
        number, index = b.sdiv(task, blocks), b.srem(task, blocks)
        sample, head = b.sdiv(number, call.heads), b.srem(number, call.heads)
        first = b.times(b.minus(b.minus(blocks, 1), index), FORWARD_ROWS)  # the longest rows of a causal mask first
        count = b.least(b.minus(call.n, first), FORWARD_ROWS)
        kv = b.sdiv(head, call.repeat)
        key_head = b.plus(b.times(sample, b.sdiv(call.heads, call.repeat)), kv)
        out, out_stride = self._sums(b, call, "out", sample, head, number, call.n, call.value_dim)
        block = SimpleNamespace(
            query=b.at(self._head(b, call, "query", sample, head), b.times(first, call.query_n)),
            bias=b.at(self._head(b, call, "bias", sample, head), b.times(first, call.bias_n)),
            mask=b.byte_at(self._head_of_mask(b, call, sample, head), b.times(first, call.mask_n)),
            out=b.at(out, b.times(first, out_stride)),
            out_stride=out_stride,
            value=self._head(b, call, "value", sample, kv),
            slopes=self._slopes(b, call, sample, head),
            keys=b.at(call.keys, b.times(key_head, b.times(self._tiles(b, call.m), call.head_words))),
            value_pairs=self._pairs(b, call.value_pairs, key_head, call.m, call.value_dim),
            length=self._length(b, call, sample),
            position=b.plus(first, call.query_offset),  # of the first query
            logits=memory[0],
            hashes=b.at(self._row_hashes(b, call, sample, head), first),
        )
        saves, row = b.equal(call.saves, 1), self._row_of_weights(b, call)
        saved = b.at(call.weights, b.times(b.plus(b.times(number, call.n), first), row))
        block.weights = b.select(saves, saved, block.logits)
        block.weights_stride = b.select(saves, row, int64(wide))
        b.when(b.less(0, call.packs), lambda: self._pack_keys(b, call, key_head))
        self._clear(b, block.out, out_stride, 0, count, call.value_dim)
        start = b.round_down(b.most(b.minus(block.position, call.left), 0), wide)
        stop = b.least(block.length, b.plus(block.position, count, call.right))

        def columns(c: Any) -> None:
            b.in_groups(count, self.registers.rows, lambda m, r: self._forward_rows(b, call, block, c, m, r))

        b.loop(start, stop, wide, columns)
        if self.word == 2:
            self._round(b, call, "out", sample, head, block.out, first, count, call.value_dim)

    def _forward_rows(self, b: Builder, call: SimpleNamespace, block: SimpleNamespace, c: Any, m: Any, r: int) -> None:
        """Add to r outputs, from row m of a block, the values of the keys from c, if one of them is seen."""
        tile, wide, size = self.registers.tile, 2 * self.registers.tile, call.head_words
        own = b.plus(block.position, m)
        stride = block.weights_stride
        corner = b.plus(b.times(m, stride), b.sdiv(c, int64(self.word)))
        left = b.at(block.weights, b.times(call.saves, corner))

        def weights(at: Any) -> None:
            target = b.at(left, b.sdiv(b.minus(at, c), int64(self.word)))
            logits, wide = (target, stride) if self.word == 1 else (b.at(block.logits, b.minus(at, c)), 2 * tile)
            query = b.at(block.query, b.times(m, call.query_n))
            keys = b.at(block.keys, b.times(at, size))
            self.call(b, self.product, (r,), [query, call.query_n, keys, size, logits, wide])
            self._weights(
                b, call, block, m, at,
                [
                    r, call.scale, b.at(block.bias, b.times(m, call.bias_n)), call.bias_n, block.slopes,
                    b.minus(own, at), b.minus(b.minus(own, call.left), at), b.minus(b.plus(own, call.right), at),
                    b.minus(block.length, at), logits, wide,
                ],
            )  # fmt: skip
            self._drop(b, call, r, block.hashes, m, at, logits, wide)
            if self.word == 2:
                self.call(b, self.pairs_of_columns, (), [r, logits, wide, target, stride])

        def products() -> None:
            end = b.least(block.length, b.plus(c, wide))
            b.loop(c, end, tile, weights)
            values = self._rows(b, block.value, call.value_n, block.value_pairs, call.value_dim, c, b.minus(end, c))
            out = b.at(block.out, b.times(m, block.out_stride))
            self.call(b, self.add_product, (r,), [left, stride, 1, *values, out, block.out_stride, call.value_dim])

        b.when(self._may_see(b, call, own, r, c), products)

    def _may_see(self, b: Builder, call: SimpleNamespace, own: Any, r: int, c: Any) -> Any:
        """Return whether windows let one of r queries, the first at position ``own``, see one of the two tiles at c."""
        before_end = b.less(c, b.plus(own, r, call.right))
        return b.and_(before_end, b.less(b.minus(own, call.left), b.plus(c, 2 * self.registers.tile)))

    # backward

    def _backward_part(self, b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
        """Compute the gradients of a part of a head's keys and values, and its share of the queries' gradients."""
        size, width = call.head_words, call.value_words
        kv_heads = b.sdiv(call.heads, call.repeat)
        number = b.sdiv(task, call.parts)
        sample, kv = b.sdiv(number, kv_heads), b.srem(number, kv_heads)
        whole = self._tiles(b, call.m)
        step = self._tiles(b, b.sdiv(b.plus(call.m, b.minus(call.parts, 1)), call.parts))
        part = SimpleNamespace(
            index=b.srem(task, call.parts),
            sample=sample,
            length=self._length(b, call, sample),
            key=self._head(b, call, "key", sample, kv),
            value=self._head(b, call, "value", sample, kv),
            grad_key=self._sums(b, call, "grad_key", sample, kv, number, call.m, call.head_dim),
            grad_value=self._sums(b, call, "grad_value", sample, kv, number, call.m, call.value_dim),
            keys=b.at(call.keys, b.times(number, b.times(whole, size))),
            values=b.at(call.values, b.times(number, b.times(whole, width))),
            key_pairs=self._pairs(b, call.key_pairs, number, call.m, call.head_dim),
            weights=memory[0],
            gradient=memory[1],
            microtiles=memory[2:],
        )
        part.first = b.least(b.times(part.index, step), call.m)
        part.last = b.least(b.plus(part.first, step), call.m)  # of the keys
        b.when(
            b.equal(call.saves, 0),
            lambda: self._pack(b, part.key, call.key_n, size, part.first, part.last, call.m, part.keys),
        )
        self._pack(b, part.value, call.value_n, width, part.first, part.last, call.m, part.values)
        if self.word == 2:
            self._pair(b, part.key, call.key_n, call.head_dim, part.first, part.last, part.length, part.key_pairs)
        for (sums, stride), columns in ((part.grad_key, call.head_dim), (part.grad_value, call.value_dim)):
            self._clear(b, sums, stride, part.first, part.last, columns)
        first_head = b.times(kv, call.repeat)
        b.loop(0, call.repeat, 1, lambda i: self._backward_head(b, call, part, b.plus(first_head, i)))
        if self.word == 2:
            for name, width in (("grad_key", call.head_dim), ("grad_value", call.value_dim)):
                sums = b.at(getattr(part, name)[0], b.times(part.first, width))
                count = b.minus(part.last, part.first)
                self._round(b, call, name, sample, kv, sums, part.first, count, width)

    def _backward_head(self, b: Builder, call: SimpleNamespace, part: SimpleNamespace, head: Any) -> None:
        """Add the gradients of a query head."""
        samples = b.sdiv(b.sdiv(call.tasks, call.parts), b.sdiv(call.heads, call.repeat))
        number = b.plus(b.times(part.sample, call.heads), head)
        row = b.plus(b.times(part.index, b.times(samples, call.heads)), number)
        grad_query, stride = self._sums(b, call, "grad_query", part.sample, head, row, call.n, call.head_dim)
        of_head = SimpleNamespace(
            **{name: self._head(b, call, name, part.sample, head) for name in ("query", "bias", "grad_out")},
            grad_query=grad_query if self.word == 2 else b.at(grad_query, b.times(part.index, call.grad_query_p)),
            grad_query_stride=stride,
            mask=self._head_of_mask(b, call, part.sample, head),
            sums=b.at(call.row_sums, b.times(row, b.times(call.n, 3))),
            saved=b.at(call.weights, b.times(b.times(number, call.n), self._row_of_weights(b, call))),
            slopes=self._slopes(b, call, part.sample, head),
            hashes=self._row_hashes(b, call, part.sample, head),
            query_pairs=self._pairs(b, call.query_pairs, number, call.n, call.head_dim),
            grad_pairs=self._pairs(b, call.grad_pairs, number, call.n, call.value_dim),
        )
        self._clear(b, of_head.grad_query, stride, 0, call.n, call.head_dim)

        def columns(c: Any) -> None:
            top = b.minus(b.minus(c, call.query_offset), call.right)  # the first query that sees a key
            start = b.round_down(b.most(top, 0), _BACKWARD_ROWS)
            end = b.least(call.n, b.minus(b.plus(c, self.registers.tile, call.left), call.query_offset))
            b.loop(start, end, _BACKWARD_ROWS, lambda at: self._backward_block(b, call, part, of_head, c, at))

        b.loop(part.first, b.least(part.last, part.length), self.registers.tile, columns)

        def round_query() -> None:
            sums = of_head.grad_query
            self._round(b, call, "grad_query", part.sample, head, sums, 0, call.n, call.head_dim)

        if self.word == 2:
            b.when(b.equal(call.parts, 1), round_query)

    def _backward_block(
        self, b: Builder, call: SimpleNamespace, part: SimpleNamespace, of_head: SimpleNamespace, c: Any, at: Any
    ) -> None:
        """Add the gradients of the queries from ``at`` and the keys from c, one tile."""
        tile, rows = self.registers.tile, self.registers.rows
        count = b.least(b.minus(call.n, at), _BACKWARD_ROWS)
        existing = b.least(b.minus(part.length, c), tile)
        query = self._rows(b, of_head.query, call.query_n, of_head.query_pairs, call.head_dim, at, count)
        grad = self._rows(b, of_head.grad_out, call.grad_out_n, of_head.grad_pairs, call.value_dim, at, count)
        b.in_groups(count, rows, lambda m, r: self._scores(b, call, part, of_head, c, b.plus(at, m), m, existing, r))

        def transposed(m: Any, r: int) -> None:
            for left, right, name, width in (
                (part.weights, grad, "grad_value", call.value_dim),
                (part.gradient, query, "grad_key", call.head_dim),
            ):
                sums, row = getattr(part, name)
                target = b.at(sums, b.times(b.plus(c, m), row))
                self.call(b, self.add_product, (r,), [b.at(left, m), 1, tile, *right, target, row, width])

        b.in_groups(existing, rows, transposed)

    def _scores(
        self, b: Builder, call: SimpleNamespace, part: SimpleNamespace, of_head: SimpleNamespace,
        c: Any, at: Any, m: Any, existing: Any, r: int,
    ) -> None:  # fmt: skip
        """Compute weights and gradient of the logits of r queries from ``at``, row m of a block; add to grad_query."""
        tile, size, width = self.registers.tile, call.head_words, call.value_words
        own = b.plus(at, call.query_offset)
        distance = b.minus(own, c)
        if self.word == 1:
            weights, gradient = (b.at(x, b.times(m, tile)) for x in (part.weights, part.gradient))
        else:
            weights, gradient = part.microtiles

        def compute() -> None:
            query, keys = b.at(of_head.query, b.times(at, call.query_n)), b.at(part.keys, b.times(c, size))
            self.call(b, self.product, (r,), [query, call.query_n, keys, size, weights, tile])
            self._weights(
                b, call, of_head, at, c,
                [
                    r, call.scale, b.at(of_head.bias, b.times(at, call.bias_n)), call.bias_n, of_head.slopes, distance,
                    b.minus(distance, call.left), b.plus(distance, call.right), existing, weights, tile,
                ],
            )  # fmt: skip

        def read() -> None:
            row = self._row_of_weights(b, call)
            saved = b.at(of_head.saved, b.times(at, row), b.sdiv(c, int64(self.word)))
            self.call(b, self.read_weights, (), [r, saved, row, weights])

        def read_or_clear() -> None:
            is_written = self._may_see(b, call, own, r, b.round_down(c, 2 * tile))
            b.when(is_written, read)
            b.when(b.not_(is_written), lambda: self.call(b, self.clear, (), [r, weights]))

        b.when(b.equal(call.saves, 0), compute)
        b.when(b.equal(call.saves, 1), read_or_clear)
        grad, values = b.at(of_head.grad_out, b.times(at, call.grad_out_n)), b.at(part.values, b.times(c, width))
        self.call(b, self.product, (r,), [grad, call.grad_out_n, values, width, gradient, tile])
        self._drop(b, call, r, of_head.hashes, at, c, gradient, tile)
        sums = b.at(of_head.sums, b.times(at, 3))
        for number in (0, 1, 3):
            arguments = [r, weights, call.scale, distance, gradient, sums]
            b.when(b.equal(call.sums, number), partial(self.call, b, self.score_gradient, (number,), arguments))
        self._drop(b, call, r, of_head.hashes, at, c, weights, tile)  # of the gradient of the values
        if self.word == 2:
            for source, block in ((weights, part.weights), (gradient, part.gradient)):
                self.call(b, self.pairs_of_rows, (r,), [source, b.at(block, b.times(b.sdiv(m, int64(2)), tile))])
            self.call(b, self.pairs_of_columns, (), [r, gradient, tile, gradient, tile])
        key = self._rows(b, part.key, call.key_n, part.key_pairs, call.head_dim, c, existing)
        target = b.at(of_head.grad_query, b.times(at, of_head.grad_query_stride))
        arguments = [gradient, tile, 1, *key, target, of_head.grad_query_stride, call.head_dim]
        self.call(b, self.add_product, (r,), arguments)
