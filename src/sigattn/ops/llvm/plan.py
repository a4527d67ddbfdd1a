"""Launch plan of a call: what its shapes determine, computed once for each."""

import functools
from typing import TYPE_CHECKING, NamedTuple

from sigattn.ops.llvm.arguments import ANYWHERE, BACKWARD_ROWS, FORWARD_ROWS, KernelArguments
from sigattn.ops.problem import UNLIMITED, log_length_bias, scale_or_default

if TYPE_CHECKING:
    from sigattn.ops.llvm.calls import Kernels

_LINE = 64  # bytes of a cache line, and of the widest vector
_SLACK = 4096  # bytes with which freed memory is large enough for a tensor of the same size, which glibc aligns
# multiplications of a product below which one thread is faster than waking another, which may wait for a core
_ONE_THREAD = 1 << 18
# bytes for the gradients that each split of the keys has of its own, of as many queries at a time as fit
_SUMS = 2 << 20
# bytes of Q, dO and dQ of a key head that the backward pass multiplies with a group of keys. It reads them again for
# each tile: with those of 8,192 tokens, which the cache does not hold, it took 1.3 (Zen 1) to 1.6 times as long (Zen 3)
_QUERIES = 3 << 19
_KEYS = 1024  # of a group


class Plan(NamedTuple):
    """Arguments and memory of a call, as far as its shapes, its scale and its window determine them."""

    args: KernelArguments  # without addresses; ``bias_value`` is the paper's rule, -log M
    forward: dict[str, int]  # bytes of the memory of a pass, by the fields of the arguments that point to it
    backward: dict[str, int]
    threads: int


@functools.lru_cache(maxsize=1024)
def make_plan(
    kernels: "Kernels", threads: int, query: tuple[int, ...], value: tuple[int, ...], scale: float | None,
    left: int, right: int, query_offset: int,
) -> Plan:  # fmt: skip
    """Return the plan of a call, given the number of PyTorch's threads and the shapes of query and value, not empty."""
    (batch, heads, n, d), (_, kv_heads, m, dv) = query, value
    per_word, tile = kernels.per_word, kernels.tile
    if batch * heads * n * m * max(d, dv) < _ONE_THREAD:
        threads = 1
    splits = number_of_splits(batch * kv_heads, -(-m // tile), threads)
    head_dim, value_dim = (round_up(size, kernels.multiple) for size in (d, dv))
    args = KernelArguments(heads=heads, heads_per_kv=heads // kv_heads, n=n, m=m, splits=splits)
    args.scale, args.bias_value = scale_or_default(scale, d), log_length_bias(m)
    args.head_dim, args.value_dim, args.query_offset = head_dim, value_dim, query_offset
    args.left, args.right = (ANYWHERE if side == UNLIMITED else side for side in (left, right))
    # a task of "forward" has all queries of a key head, and packs the keys for itself
    args.packs_keys = n <= FORWARD_ROWS and heads == kv_heads
    args.part_size = round_up(n, kernels.rows)
    if splits > 1:
        fitting = _SUMS // (splits * batch * heads * head_dim * 4)
        args.part_size = min(args.part_size, round_up(max(fitting, BACKWARD_ROWS), kernels.rows))
    rows = n if UNLIMITED in (left, right) else min(n, left + right + 1)  # that see a key
    groups = -(-rows * (heads // kv_heads) * (2 * head_dim + value_dim) * 4 // _QUERIES)
    args.query_group, args.key_group = round_up(-(-n // groups), kernels.rows), tile if groups == 1 else _KEYS

    # rows of memory (``arguments``)
    tiles, parts = threads * tile, threads * heads // kv_heads * args.part_size
    packed = (min(threads, batch * kv_heads) if args.packs_keys else batch * kv_heads) * round_up(m, tile)
    itemsize = 4 // per_word
    forward = {"packed_keys": packed * head_dim * itemsize}
    backward = {"packed_keys": tiles * head_dim * itemsize, "packed_values": tiles * value_dim * itemsize}
    if per_word == 2:
        forward |= {"value_pairs": packed * value_dim * 2, "out_sums": threads * FORWARD_ROWS * value_dim * 4}
        sums = threads * args.key_group if splits == 1 else batch * kv_heads * m
        backward |= {"grad_key_sums": sums * head_dim * 4, "grad_value_sums": sums * value_dim * 4}
        backward |= {"key_pairs": tiles * head_dim * 2}
        backward |= {"query_pairs": parts * head_dim * 2, "grad_out_pairs": parts * value_dim * 2}
        if splits == 1:
            backward |= {"grad_query_sums": parts * head_dim * 4}
    forward, backward = (
        {name: round_up(size, _LINE) + _SLACK for name, size in sizes.items()} for sizes in (forward, backward)
    )
    return Plan(args, forward, backward, threads)


def number_of_splits(kv_heads: int, tiles: int, threads: int) -> int:
    """Return into how many parts the keys of each head are split, so that threads finish at about the same time.

    There are no more than needed, because each split has its own gradient of the queries, which are then added.
    kv_heads: of all samples. tiles: of a head's keys.
    """
    if kv_heads % threads == 0 or kv_heads >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // kv_heads), max(threads // kv_heads, 8), tiles))


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a size."""
    return -(-size // multiple) * multiple
