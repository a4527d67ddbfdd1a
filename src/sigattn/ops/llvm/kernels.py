"""Kernels of sigmoid attention in float32 for the vector units of a CPU, as LLVM's intermediate representation.

The forward pass computes σ where a microtile of logits is complete, and multiplies it with the values at once
(Algorithm 1). The backward pass goes over tiles of keys (Algorithm 2): it computes the weights again, and all five
products of a tile while its numbers are in the nearest cache. A kernel takes tasks from a counter until none is left,
so that it may run on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from sigattn.ops.llvm.builder import FLOAT, INT64, POINTER, Builder, function, int64
from sigattn.ops.llvm.microtiles import Kind, Microtiles

_TENSORS = ("query", "key", "value", "bias", "slopes", "lengths", "keys", "values", "out")
_GRADIENTS = ("grad_out", "grad_query", "grad_key", "grad_value", "row_sums")
_STRIDED = ("query", "key", "value", "bias", "out", "grad_out", "grad_query", "grad_key", "grad_value")
_NUMBERS = ("scale", "heads", "repeat", "n", "m", "left", "right", "query_offset", "parts")
# Arguments of a kernel, 64 bits each. Strides are those of samples, heads and rows. Packed ``keys`` and ``values`` have
# room for m rounded up to a tile. ``row_sums`` is (parts, B, Hq, N, 3), ``grad_query`` has a part's stride as well.
FIELDS = (
    "counter", "tasks", *_TENSORS, *_GRADIENTS, *(f"{name}_{axis}" for name in _STRIDED for axis in "bhn"), "slopes_b",
    "grad_query_part", *_NUMBERS,
)  # fmt: skip

FORWARD_ROWS = 192  # queries of a task
_BACKWARD_ROWS = 96  # queries whose weights are kept until the products of the transposed tile
ANYWHERE = 1 << 40  # a window side without a limit


def make_module(kind: Kind, direction: str) -> ir.Module:
    """Return the module with the kernels ``pack`` and ``forward``, or with ``backward``."""
    module = ir.Module("sigattn")
    kernels = _Kernels(module, kind)
    if direction == "forward":
        kernels.pack()
        kernels.forward()
    else:
        kernels.backward()
    return module


def _read_arguments(builder: Builder, data: Any) -> SimpleNamespace:
    """Read the arguments of a kernel, by name."""

    def read(index: int, name: str) -> Any:
        kind = POINTER if name in (*_TENSORS, *_GRADIENTS) else FLOAT if name == "scale" else INT64
        return builder.load(builder.gep(data, [int64(index)], source_etype=INT64), typ=kind)

    return SimpleNamespace(**{name: read(index, name) for index, name in enumerate(FIELDS) if name != "counter"})


class _Kernels(Microtiles):
    """Kernels of one module."""

    def _kernel(
        self, name: str, emit: Callable[[Builder, SimpleNamespace, Any, list[Any]], None], scratch: tuple[int, ...]
    ) -> None:
        """Make a kernel, which calls ``emit`` for each task with the task's number and scratch memory."""
        b, (data,) = function(self.module, name, (POINTER,), self.registers.lanes)
        call = _read_arguments(b, data)
        memory = [b.alloca(FLOAT, size) for size in scratch]
        head, inside, after = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        task = b.atomic_rmw("add", data, int64(1), "monotonic")
        b.cbranch(b.less(task, call.tasks), inside, after)
        b.position_at_end(inside)
        emit(b, call, task, memory)
        b.branch(head)
        b.position_at_end(after)
        b.ret_void()

    def _head(self, b: Builder, call: SimpleNamespace, name: str, sample: Any, head: Any) -> Any:
        """Return the address of a head of a tensor."""
        strides = (getattr(call, f"{name}_{axis}") for axis in "bh")
        return b.at(getattr(call, name), *(b.times(i, s) for i, s in zip((sample, head), strides, strict=True)))

    def _length(self, b: Builder, call: SimpleNamespace, sample: Any) -> Any:
        return b.load(b.gep(call.lengths, [sample], source_etype=INT64), typ=INT64)

    def _slopes(self, b: Builder, call: SimpleNamespace, sample: Any, head: Any) -> Any:
        return b.at(call.slopes, b.times(sample, call.slopes_b), b.times(head, 2))

    def _pack(self, b: Builder, rows: Any, stride: Any, size: int, first: Any, last: Any, count: Any, out: Any) -> None:
        """Write rows first … last - 1 as microtiles' right factors, (size, tile) each; 0 beyond ``count`` rows."""
        tile = self.registers.tile

        def one(start: Any) -> None:
            target = b.at(out, b.times(start, size))
            existing = b.most(b.least(b.minus(count, start), tile), 0)

            def row(i: Any) -> None:
                source = b.at(rows, b.times(b.plus(start, i), stride))
                b.loop(
                    0, size, 1, lambda d: b.store(b.read(b.at(source, d)), b.at(target, b.times(d, tile), i)) and None
                )

            def nothing(i: Any) -> None:
                zero = ir.Constant(FLOAT, 0.0)
                b.loop(0, size, 1, lambda d: b.store(zero, b.at(target, b.times(d, tile), i)) and None)

            b.loop(0, existing, 1, row)
            b.loop(existing, tile, 1, nothing)

        b.loop(first, last, tile, one)

    def _clear(self, b: Builder, rows: Any, stride: Any, first: Any, last: Any, width: int) -> None:
        """Write zeros to rows first … last - 1."""

        def row(i: Any) -> None:
            for at in range(0, width, b.lanes):
                b.write_vector(b.constant(0.0), b.at(rows, b.times(i, stride), at))

        b.loop(first, last, 1, row)

    def _tiles(self, b: Builder, count: Any) -> Any:
        """Return a number of keys rounded up to whole tiles."""
        return b.round_down(b.plus(count, self.registers.tile - 1), self.registers.tile)

    def pack(self) -> None:
        """Make the kernel ``pack``, with a task for each key head."""
        size = self.kind.head_dim

        def head(b: Builder, call: SimpleNamespace, task: Any, _: list[Any]) -> None:
            kv = b.sdiv(call.heads, call.repeat)
            source = self._head(b, call, "key", b.sdiv(task, kv), b.srem(task, kv))
            whole = self._tiles(b, call.m)
            out = b.at(call.keys, b.times(task, b.times(whole, size)))
            self._pack(b, source, call.key_n, size, 0, whole, call.m, out)

        self._kernel("pack", head, ())

    def forward(self) -> None:
        """Make the kernel ``forward``, with a task for each block of queries of each head."""
        tile, rows = self.registers.tile, self.registers.rows
        wide = 2 * tile
        size, width = self.kind.head_dim, self.kind.value_dim

        def block(b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
            blocks = b.sdiv(b.plus(call.n, FORWARD_ROWS - 1), int64(FORWARD_ROWS))
            number, index = b.sdiv(task, blocks), b.srem(task, blocks)
            sample, head = b.sdiv(number, call.heads), b.srem(number, call.heads)
            first = b.times(b.minus(b.minus(blocks, 1), index), FORWARD_ROWS)  # the longest rows of a causal mask first
            count = b.least(b.minus(call.n, first), FORWARD_ROWS)
            kv = b.sdiv(head, call.repeat)
            query = b.at(self._head(b, call, "query", sample, head), b.times(first, call.query_n))
            bias = b.at(self._head(b, call, "bias", sample, head), b.times(first, call.bias_n))
            out = b.at(self._head(b, call, "out", sample, head), b.times(first, call.out_n))
            value = self._head(b, call, "value", sample, kv)
            slopes = self._slopes(b, call, sample, head)
            key_head = b.plus(b.times(sample, b.sdiv(call.heads, call.repeat)), kv)
            keys = b.at(call.keys, b.times(key_head, b.times(self._tiles(b, call.m), size)))
            length = self._length(b, call, sample)
            position = b.plus(first, call.query_offset)  # of the first query
            self._clear(b, out, call.out_n, 0, count, width)
            start = b.round_down(b.most(b.minus(position, call.left), 0), wide)
            stop = b.least(length, b.plus(position, count, call.right))

            def columns(c: Any) -> None:
                def microtile(m: Any, r: int) -> None:
                    own = b.plus(position, m)
                    sees = b.and_(
                        b.less(c, b.plus(own, r, call.right)), b.less(b.minus(own, call.left), b.plus(c, wide))
                    )

                    def products() -> None:
                        existing = b.least(b.minus(length, c), wide)

                        def part(w: Any) -> None:
                            at = b.plus(c, w)
                            self.call(
                                b, self.weights, (r,),
                                [
                                    b.at(query, b.times(m, call.query_n)), call.query_n, b.at(keys, b.times(at, size)),
                                    call.scale, b.at(bias, b.times(m, call.bias_n)), call.bias_n, slopes,
                                    b.minus(own, at), b.minus(b.minus(own, call.left), at),
                                    b.minus(b.plus(own, call.right), at), b.minus(length, at), b.at(memory[0], w),
                                    wide,
                                ],
                            )  # fmt: skip

                        b.loop(0, existing, tile, part)
                        self.call(
                            b, self.add_product, (r, width),
                            [
                                memory[0], wide, 1, b.at(value, b.times(c, call.value_n)), call.value_n,
                                existing, b.at(out, b.times(m, call.out_n)), call.out_n,
                            ],
                        )  # fmt: skip

                    b.when(sees, products)

                b.by_rows(count, rows, microtile)

            b.loop(start, stop, wide, columns)

        self._kernel("forward", block, (rows * wide,))

    def backward(self) -> None:
        """Make the kernel ``backward``, with ``parts`` tasks for each key head, one for each part of its keys."""
        tile, rows = self.registers.tile, self.registers.rows
        size, width = self.kind.head_dim, self.kind.value_dim

        def part(b: Builder, call: SimpleNamespace, task: Any, memory: list[Any]) -> None:
            kv_heads = b.sdiv(call.heads, call.repeat)
            part, number = b.srem(task, call.parts), b.sdiv(task, call.parts)
            sample, kv = b.sdiv(number, kv_heads), b.srem(number, kv_heads)
            whole, length = self._tiles(b, call.m), self._length(b, call, sample)
            step = self._tiles(b, b.sdiv(b.plus(call.m, b.minus(call.parts, 1)), call.parts))
            first = b.least(b.times(part, step), call.m)
            last = b.least(b.plus(first, step), call.m)  # of the keys
            key, value = (self._head(b, call, name, sample, kv) for name in ("key", "value"))
            grad_key, grad_value = (self._head(b, call, name, sample, kv) for name in ("grad_key", "grad_value"))
            keys = b.at(call.keys, b.times(number, b.times(whole, size)))
            values = b.at(call.values, b.times(number, b.times(whole, width)))
            self._pack(b, key, call.key_n, size, first, last, call.m, keys)
            self._pack(b, value, call.value_n, width, first, last, call.m, values)
            self._clear(b, grad_key, call.grad_key_n, first, last, size)
            self._clear(b, grad_value, call.grad_value_n, first, last, width)

            def query_head(i: Any) -> None:
                head = b.plus(b.times(kv, call.repeat), i)
                tensors = {name: self._head(b, call, name, sample, head) for name in ("query", "bias", "grad_out")}
                grad_query = b.at(self._head(b, call, "grad_query", sample, head), b.times(part, call.grad_query_part))
                samples = b.sdiv(b.sdiv(call.tasks, call.parts), kv_heads)
                row = b.plus(b.times(b.plus(b.times(part, samples), sample), call.heads), head)
                sums = b.at(call.row_sums, b.times(row, b.times(call.n, 3)))
                slopes = self._slopes(b, call, sample, head)
                self._clear(b, grad_query, call.grad_query_n, 0, call.n, size)

                def columns(c: Any) -> None:
                    top = b.minus(b.minus(c, call.query_offset), call.right)  # the first query that sees a key
                    start = b.round_down(b.most(top, 0), _BACKWARD_ROWS)
                    end = b.minus(b.plus(c, tile, call.left), call.query_offset)
                    existing = b.least(b.minus(length, c), tile)

                    def block(at: Any) -> None:
                        count = b.least(b.minus(call.n, at), _BACKWARD_ROWS)
                        query, grad = (
                            b.at(tensors[n], b.times(at, getattr(call, f"{n}_n"))) for n in ("query", "grad_out")
                        )

                        def scores(m: Any, r: int) -> None:
                            own = b.plus(at, m, call.query_offset)
                            weights, gradient = (b.at(x, b.times(m, tile)) for x in memory)
                            self.call(
                                b, self.weights, (r,),
                                [
                                    b.at(query, b.times(m, call.query_n)), call.query_n, b.at(keys, b.times(c, size)),
                                    call.scale, b.at(tensors["bias"], b.times(b.plus(at, m), call.bias_n)), call.bias_n,
                                    slopes, b.minus(own, c), b.minus(b.minus(own, call.left), c),
                                    b.minus(b.plus(own, call.right), c), existing, weights, tile,
                                ],
                            )  # fmt: skip
                            self.call(
                                b, self.score_gradient, (r,),
                                [
                                    b.at(grad, b.times(m, call.grad_out_n)), call.grad_out_n,
                                    b.at(values, b.times(c, width)), weights, call.scale, b.minus(own, c), gradient,
                                    b.at(sums, b.times(b.plus(at, m), 3)),
                                ],
                            )  # fmt: skip
                            self.call(
                                b, self.add_product, (r, size),
                                [
                                    gradient, tile, 1, b.at(key, b.times(c, call.key_n)), call.key_n,
                                    existing, b.at(grad_query, b.times(b.plus(at, m), call.grad_query_n)),
                                    call.grad_query_n,
                                ],
                            )  # fmt: skip

                        def transposed(m: Any, r: int) -> None:
                            for left, right, name, wide in (
                                (memory[0], grad, "grad_value", width), (memory[1], query, "grad_key", size)
                            ):  # fmt: skip
                                other = "grad_out" if name == "grad_value" else "query"
                                target = grad_value if name == "grad_value" else grad_key
                                stride = getattr(call, f"{name}_n")
                                self.call(
                                    b, self.add_product, (r, wide),
                                    [
                                        b.at(left, m), 1, tile, right, getattr(call, f"{other}_n"), count,
                                        b.at(target, b.times(b.plus(c, m), stride)), stride,
                                    ],
                                )  # fmt: skip

                        b.by_rows(count, rows, scores)
                        b.by_rows(existing, rows, transposed)

                    b.loop(start, b.least(call.n, end), _BACKWARD_ROWS, block)

                b.loop(first, b.least(last, length), tile, columns)

            b.loop(0, call.repeat, 1, query_head)

        self._kernel("backward", part, (_BACKWARD_ROWS * tile,) * 2)
