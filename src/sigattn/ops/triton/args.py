"""Arguments of the portable kernels, in groups. A group or a pointer that a problem does not need is None.

Integers that vary from call to call (lengths, window, offsets) are arguments of their own: ``do_not_specialize``, which
keeps Triton from compiling for each kind of integer (1, a multiple of 16, another), takes no part of a tuple.
"""

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Strides of a tensor (B, H, N, D); b = 0 for a packed tensor (T, H, D)."""

    b: int
    h: int
    n: int
    d: int


class Sizes(NamedTuple):
    """Numbers of queries, keys and query heads of a sample, position of its first query, and its window."""

    len_q: Any
    len_k: Any
    heads: Any
    query_offset: Any
    left: Any
    right: Any


class Scales(NamedTuple):
    """Factors: z = z · Q Kᵀ + …, or with a soft cap z · tanh(cap · Q Kᵀ) + …; of P V and dV; of dQ and dK."""

    z: float
    cap: float
    out: float
    logit: float = 0.0


class Bias(NamedTuple):
    """The bias b, by ``Options.BIAS``, and the exponent of float16 weights, by ``Options.SHIFT`` (activation.py)."""

    pointer: Any
    value: float  # -log₂e · b, or what is added to that of a "length"
    row_stride: int  # from a query's entry to the next one's
    shift_pointer: Any
    shift: float


class Mask(NamedTuple):
    """A mask broadcast to (B, H, N, M), or its gradient: pointer and strides."""

    pointer: Any
    b: int
    h: int
    q: int
    k: int


class Alibi(NamedTuple):
    """Slopes (B, H, 2) for keys before and after the query: pointer and strides."""

    pointer: Any
    b: int
    h: int
    s: int


class Blocks(NamedTuple):
    """Blocks of a ``BlockMask`` (ops/block_mask.py): table of the blocks, with its strides, and masks of blocks."""

    table: Any
    b: int
    h: int
    q: int
    tiles: Any


class Sequences(NamedTuple):
    """Lengths of the samples' keys, or offsets of packed sequences."""

    key_lengths: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


class Options(NamedTuple):
    """Compile-time arguments. The defaults are those of a plain call."""

    D: int  # features of query and key
    DV: int  # of value
    BLOCK_M: int = 0  # queries of a tile
    BLOCK_N: int = 0  # keys of a tile
    GROUP: int = 1  # query heads that share a key head
    BIAS: str = "number"  # "scalar" (a tensor's only entry), "tensor", or "length" (-log of the number of keys, …)
    # "bool", "added", or "keys": a bool mask that is the same for all queries and heads. Without TMA, keys and values
    # that it hides are loaded as zeros; key lengths are those up to the last that it does not.
    MASK: str = "none"
    MASK_ORDER: str = "queries, keys"  # of memory: also "keys, queries", or "keys" if all queries have the same entries
    SHIFT: str = "none"  # origin of the exponent of float16 weights, or as BIAS
    SIGMOID: str = "accurate"  # form of σ (activation.py)
    # of float32 products: also, by several products, "tf32x3", "bf16x6", and "bf16x3" if TF32 is allowed
    PRECISION: str = "ieee"
    SLOPES: bool = False  # ALiBi
    DROPOUT: bool = False
    SOFTCAP: str = "none"  # accuracy of tanh: "relative", or "absolute" where that is enough (activation.py)
    NORMALIZE: bool = False
    REPAIR: bool = False  # with NORMALIZE: only rows whose sum underflowed in another forward kernel
    LENGTHS: bool = False  # samples have key lengths
    VARLEN: bool = False  # sequences are packed
    HAS_LEFT: bool = False  # sides of the window that have a limit
    HAS_RIGHT: bool = False
    BLOCK_Q: int = 0  # queries and keys of a block of a ``BlockMask``; 0 without one
    BLOCK_K: int = 0
    TMA: bool = False  # query, key, value and grad_out are TMA descriptors
    WGMMA: bool = False  # on Hopper
    UNIT: int = 1  # divisor of all strides of rows that the compiler cannot find out
    NEED_MASK: str = "none"  # gradient of the mask: "stored" (each entry has one writer) or "added" atomically
    SUM_ROWS: bool = False  # the mask is broadcast along queries, along keys
    SUM_COLUMNS: bool = False


def padded_head_dim(head_dim: int) -> int:
    """Return the width of a tile: a power of two, and at least 16, which ``tl.dot`` needs."""
    return max(16, 1 << (head_dim - 1).bit_length())
