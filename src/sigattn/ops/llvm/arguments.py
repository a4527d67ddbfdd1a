"""Arguments of the kernels of backend "llvm", and what the shapes of a call determine of them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.llvm.kernels import ANYWHERE, FIELDS, INDEX
from sigattn.ops.llvm.launch import Kernels, float_bits
from sigattn.ops.problem import UNLIMITED

Fields = ctypes.c_int64 * len(FIELDS)
_LINE = 64  # bytes of a cache line, and of the widest vector
# Bytes up to which the memory of a call is one tensor, which takes 2 µs less for each other one. More is returned to
# the system after the call where it is one, and each of its pages is a page fault in the next.
_ONE_TENSOR = 4 << 20
# Multiplications of a product for which one thread is faster than waking another, which may have to wait for a core
_ONE_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class Memory:
    """Uninitialised memory of a call: indices of the fields that point to it, with their sizes in bytes."""

    sizes: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def of(cls, **sizes: int) -> Memory:
        """Return the memory of fields, given their sizes in bytes."""
        lines = tuple((INDEX[name], round_up(size, _LINE)) for name, size in sizes.items())
        return cls(lines, sum(size for _, size in lines))


@dataclass(frozen=True, slots=True)
class Layout:
    """What the shapes and strides of a call, its scale and its window determine.

    Attributes:
        fields: arguments of both passes, without addresses.
        forward, backward: memory of the passes.
        parts: the number of parts into which the backward pass divides the keys of a head.
        threads: the number of threads.
    """

    fields: ctypes.Array[ctypes.c_int64]
    forward: Memory
    backward: Memory
    parts: int
    threads: int


@functools.lru_cache(maxsize=1024)
def layout(
    compiled: Kernels,
    threads: int,
    query: tuple[int, ...],
    value: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    scale: float,
    left: int,
    right: int,
    query_offset: int,
) -> Layout:
    """Return the layout of a call.

    Args:
        threads: number of PyTorch's threads. query, value: shapes. strides: of query, key and value, from ``readable``.
    """
    (batch, heads, n, d), (_, kv, m, dv) = query, value
    word, tile = compiled.word, compiled.registers.tile
    if batch * heads * n * m * max(d, dv) < _ONE_THREAD:
        threads = 1
    head_dim, value_dim = (round_up(size, compiled.multiple) for size in (d, dv))
    fields = Fields()
    sides = (ANYWHERE if side == UNLIMITED else side for side in (left, right))
    numbers = [float_bits(scale), heads, heads // kv, n, m, head_dim, value_dim, *sides, query_offset]
    for index, number in enumerate(numbers, INDEX["scale"]):
        fields[index] = number
    for name, own in zip(("query", "key", "value"), strides, strict=True):
        fields[INDEX[name] + 1 : INDEX[name] + 4] = list(own)
    parts = number_of_parts(batch * kv, -(-m // tile), threads)
    fields[INDEX["parts"]] = parts

    itemsize, tiles, even = 4 // word, batch * kv * round_up(m, tile), round_up(m, 2)
    forward = {"keys": tiles * head_dim * itemsize}
    backward = {"keys": tiles * head_dim * itemsize, "values": tiles * value_dim * itemsize}
    if word == 2:  # pairs of bfloat16, and sums in float32
        queries = batch * heads * round_up(n, 2)
        forward |= {"value_pairs": batch * kv * even * value_dim * 2, "out_sums": batch * heads * n * value_dim * 4}
        backward |= {"query_pairs": queries * head_dim * 2, "grad_pairs": queries * value_dim * 2}
        backward |= {"key_pairs": batch * kv * even * head_dim * 2, "grad_key_sums": batch * kv * m * head_dim * 4}
        backward |= {"grad_value_sums": batch * kv * m * value_dim * 4}
        if parts == 1:
            backward |= {"grad_query_sums": batch * heads * n * head_dim * 4}
    return Layout(fields, Memory.of(**forward), Memory.of(**backward), parts, threads)


def number_of_parts(key_heads: int, tiles: int, threads: int) -> int:
    """Return into how many parts the keys of a head are divided, so that the threads finish at about the same time.

    Each part has its own gradient of the queries; these are added. So there are no more than needed.

    Args:
        key_heads: number of heads of all samples. tiles: number of tiles of keys of a head.
    """
    if key_heads % threads == 0 or key_heads >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // key_heads), max(threads // key_heads, 8), tiles))


class Arguments:
    """Arguments of a kernel (``kernels.FIELDS``), and tensors that must outlive its call.

    Args:
        compiled: the kernels that take them. fields: those that are known already; they are copied.
    """

    def __init__(self, compiled: Kernels, fields: ctypes.Array[ctypes.c_int64]) -> None:
        self.word, self.tile, self.multiple = compiled.word, compiled.registers.tile, compiled.multiple
        self.data = Fields.from_buffer_copy(fields)
        self._kept: list[Tensor] = []

    def set(self, name: str, *values: int) -> None:
        """Set the fields from ``name`` on."""
        index = INDEX[name]
        self.data[index : index + len(values)] = list(values)

    def set_field_as_tensor(self, name: str, field: str) -> None:
        """Let a tensor be one number, the value of a field, with strides of 0."""
        self.data[INDEX[name]] = ctypes.addressof(self.data) + 8 * INDEX[field]

    def keep(self, name: str, tensor: Tensor, *strides: int) -> None:
        """Set a tensor's address and strides."""
        self._kept.append(tensor)
        self.set(name, tensor.data_ptr(), *strides)

    def allocate(self, memory: Memory, like: Tensor) -> None:
        """Set fields to memory on a tensor's device."""
        if memory.total > _ONE_TENSOR:
            for index, size in memory.sizes:
                self._kept.append(like.new_empty(size, dtype=torch.uint8))
                self.data[index] = self._kept[-1].data_ptr()
            return
        self._kept.append(like.new_empty(memory.total, dtype=torch.uint8))
        address = self._kept[-1].data_ptr()
        for index, size in memory.sizes:
            self.data[index] = address
            address += size

    def new_sums(self, name: str, *shape: int, like: Tensor) -> Tensor:
        """Set a field to a new tensor of float32 and return it."""
        sums = like.new_empty(shape, dtype=torch.float32)
        self.keep(name, sums)
        return sums

    def set_readable(self, name: str, tensor: Tensor) -> None:
        """Set a tensor to read, and its strides."""
        self.keep(name, *readable(tensor, self.multiple))

    def set_weights(self, weights: Tensor) -> None:
        """Let the kernels save the weights, or read them."""
        self.set("saves", 1)
        self.keep("weights", weights)

    def set_result(self, name: str, result: Tensor) -> Tensor:
        """Set a result and return it, or if its rows are not contiguous or whole vectors, a larger tensor instead."""
        if result.shape[-1] % self.multiple or result.stride(-1) != 1:
            result = result.new_empty(*result.shape[:-1], round_up(result.shape[-1], self.multiple))
        self.set(name, result.data_ptr(), *result.stride()[:3])
        return result


def readable(tensor: Tensor, multiple: int) -> tuple[Tensor, int, int, int]:
    """Return a tensor and its strides in words, copied unless its rows are contiguous and whole vectors of words."""
    if missing := -tensor.shape[-1] % multiple:
        tensor = F.pad(tensor, (0, missing))
    elif tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    b, h, n, _ = tensor.stride()
    if tensor.itemsize == 4:
        return tensor, b, h, n
    if (b | h | n) % 2 or tensor.data_ptr() % 4:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        b, h, n, _ = tensor.stride()
    return tensor, b // 2, h // 2, n // 2


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a size."""
    return -(-size // multiple) * multiple
