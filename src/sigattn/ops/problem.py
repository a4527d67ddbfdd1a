"""Canonical form of a call of the operator, the argument of every backend.

The public function accepts several forms of an argument (a float or a tensor as bias, ``is_causal`` or a window, one
slope or two). ``Problem`` has one form for each, so that backends do not distinguish them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from sigattn.ops import settings, validation
from sigattn.ops.block_mask import Blocks
from sigattn.ops.gradients import Gradients, NeedsGrad, Result, Saved

UNLIMITED = -1  # a window side without a limit
# b below -log M where the weights of a row are divided by their sum: with it small language models of three kinds were
# equivalent to softmax, also at half the length of their training (docs/results/causal-bias)
NORMALIZED_MARGIN = 6.0


@overload
def log_length_bias(n: int) -> float: ...
@overload
def log_length_bias(n: Tensor) -> Tensor: ...
def log_length_bias(n: int | Tensor) -> float | Tensor:
    """Return the paper's bias ``b = -log n`` for n keys (Sect. 2 and App. E).

    With it σ(z + b) = e^z / (e^z + n): the weights of each row sum to about one, as with softmax, so that the size of
    the output does not depend on the length.

    Args:
        n: number of keys, at least 1: an int, or a tensor of lengths of any shape and dtype.

    Returns:
        A float for an int; for a tensor, a floating-point tensor of its shape (float32 for integer lengths).

    Raises:
        ValueError: if an int below 1 is given. The values of a tensor are not checked: 0 gives +inf.
        TypeError: if n is neither an int nor a tensor.

    >>> round(log_length_bias(1024), 4)
    -6.9315
    """
    if isinstance(n, Tensor):
        return -(n if n.is_floating_point() else n.to(torch.float32)).log()
    if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
        raise TypeError(f"log_length_bias: n must be an int or a tensor of lengths, got {n!r} ({type(n).__name__})")
    if n < 1:
        raise ValueError(f"log_length_bias: n is a number of keys and must be at least 1, got {n}")
    return -math.log(n)


def log_size_bias(n: int, device: torch.device) -> float | Tensor:
    """Return ``log_length_bias`` of a size of a tensor, 0 of size 0; while compiling as a 0-d tensor on ``device``."""
    if torch.compiler.is_compiling():  # the logarithm of a Python number would fix the size in the program
        return log_length_bias(torch.full((), n, device=device).clamp(min=1))
    return log_length_bias(max(n, 1))


def scale_or_default(scale: float | None, head_dim: int) -> float:
    """Return the factor of Q Kᵀ: D^-1/2 (1 if D = 0) for a scale of None."""
    # sym_float, because torch.jit.trace has tensors for sizes, whose power is of float32
    return torch.sym_float(max(head_dim, 1)) ** -0.5 if scale is None else torch.sym_float(scale)


class Problem(NamedTuple):
    """Canonical arguments. Shapes: B batch, Hq / Hkv query / key heads, N queries, M keys, D and Dv head sizes."""

    query: Tensor  # (B, Hq, N, D), Hq a multiple of Hkv
    key: Tensor  # (B, Hkv, M, D)
    value: Tensor  # (B, Hkv, M, Dv)
    bias: Tensor | None = None  # 4-D, broadcastable to (B, Hq, N, 1); 0-d on the CPU (a number); None: the paper's rule
    attn_mask: Tensor | None = None  # 4-D, broadcastable to (B, Hq, N, M): bool (True = attend) or float (added)
    alibi_slopes: Tensor | None = None  # (B or 1, Hq, 2), one for keys before the query and one for keys after it
    key_lengths: Tensor | None = None  # (B,) integers
    # 0-d int64 on the query's device, so that kernels need no synchronisation and a CUDA graph draws a new seed at each
    # replay; None without dropout
    seed: Tensor | None = None
    mask_table: Tensor | None = None  # with mask_tiles, the blocks of a ``BlockMask`` (``block_mask.Blocks``)
    mask_tiles: Tensor | None = None
    scale: float | None = None  # factor of Q Kᵀ; None for D^-1/2
    left: int = UNLIMITED  # query i attends to keys i - left ≤ j ≤ i + right
    right: int = UNLIMITED  # 0 if causal
    dropout_p: float = 0.0  # probability of dropping a weight
    query_offset: int = 0  # position of the first query relative to the keys; M - N aligns last query and last key
    fast: bool = False  # the error of σ may be small relative to 1 only, not relative to P
    deterministic: bool = False  # results must repeat bitwise
    softcap: float = 0.0  # c > 0 replaces scale · Q Kᵀ by c · tanh(scale · Q Kᵀ / c), before anything is added
    first_head: int = 0  # index b·Hq + h of the first head, if the heads are a slice of a larger problem (for dropout)
    normalize: bool = False  # the weights of each row are divided by their sum, before dropout

    @property
    def blocks(self) -> Blocks | None:
        """Blocks of a ``BlockMask``, or None."""
        if self.mask_table is None or self.mask_tiles is None:
            return None
        return Blocks(self.mask_table, self.mask_tiles)

    def bias_value(self) -> float | Tensor:
        """Return the bias, for None the paper's rule, as a number or a tensor broadcastable to (B, Hq, N, 1)."""
        if self.bias is not None:
            return self.bias if self.bias.dim() else self.bias.item()
        margin = NORMALIZED_MARGIN if self.normalize else 0.0
        if self.key_lengths is None:
            return log_size_bias(self.key.shape[-2], self.key.device) - margin
        wide = torch.promote_types(self.query.dtype, torch.float32)  # not always float64, which some devices lack
        lengths = self.key_lengths.to(self.query.device, wide).clamp(min=1)  # the bias of an empty sample is not used
        return log_length_bias(lengths).view(-1, 1, 1, 1) - margin

    def rows(self, start: int, stop: int) -> Problem:
        """Return the problem restricted to the queries start … stop - 1; it must not have a ``BlockMask``."""
        assert self.mask_table is None
        rows = slice(start, stop)
        return self._replace(
            query=self.query[:, :, rows],
            bias=select_rows(self.bias, rows),
            attn_mask=select_rows(self.attn_mask, rows),
            query_offset=self.query_offset + start,
        )


def select_rows(t: Any, rows: slice) -> Any:
    """Return rows of a tensor (B, H, N, E), a view; None, a number, and a tensor with no other rows as they are."""
    return t if t is None or t.dim() < 4 or t.shape[2] <= rows.stop - rows.start else t[:, :, rows]


def select_samples(t: Any, samples: slice) -> Any:
    """Return samples of a tensor (B, …), a view; None, a number, and a tensor of one sample as they are."""
    return t if t is None or not t.dim() or t.shape[0] == 1 else t[samples]


class VarlenProblem(NamedTuple):
    """Canonical arguments for B packed sequences; s has the rows cu_seqlens[s] … cu_seqlens[s + 1] - 1.

    The last query of a sequence is aligned with its last key (bottom-right alignment). Other fields as in ``Problem``.
    """

    query: Tensor  # (Tq, Hq, D)
    key: Tensor  # (Tk, Hkv, D)
    value: Tensor  # (Tk, Hkv, Dv)
    bias: Tensor | None  # (B or 1, Hq or 1, 1, 1); a number is 0-d on the CPU; None: -log of each sequence's keys
    attn_mask: Tensor | None  # 4-D, broadcastable to (B, Hq, max_seqlen_q, max_seqlen_k), by position in the sequence
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor  # (B + 1,) non-descending integers from 0; rows beyond the last belong to no sequence
    cu_seqlens_k: Tensor
    seed: Tensor | None
    max_seqlen_q: int  # upper bound of the sequences' lengths
    max_seqlen_k: int
    scale: float | None = None
    left: int = UNLIMITED
    right: int = UNLIMITED
    dropout_p: float = 0.0
    fast: bool = False
    deterministic: bool = False
    softcap: float = 0.0
    normalize: bool = False

    @property
    def sequences(self) -> int:
        """Number of sequences, B."""
        return self.cu_seqlens_q.shape[0] - 1

    def row_ranges(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield the index of each sequence, its rows of queries and its rows of keys; reads (synchronises) offsets."""
        starts_q, starts_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for s in range(self.sequences):
            yield s, slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])

    def sequence(self, index: int, query_rows: slice, key_rows: slice) -> Problem:
        """Return a sequence, with these rows of queries and keys, as a problem with a batch of one."""

        def heads_first(t: Tensor, part: slice) -> Tensor:  # (T, H, E) → (1, H, n, E)
            return t[part].transpose(0, 1).unsqueeze(0)

        query, key = heads_first(self.query, query_rows), heads_first(self.key, key_rows)
        n, m, samples = query.shape[2], key.shape[2], slice(index, index + 1)
        mask = select_samples(self.attn_mask, samples)
        if mask is not None:  # (1, Hq or 1, n or 1, m or 1)
            mask = mask if mask.shape[2] == 1 else mask[:, :, :n]
            mask = mask if mask.shape[3] == 1 else mask[..., :m]
        return Problem(
            query,
            key,
            heads_first(self.value, key_rows),
            select_samples(self.bias, samples),
            mask,
            select_samples(self.alibi_slopes, samples),
            query_offset=m - n,
            first_head=index * query.shape[1],
            **_shared_options(self),
        )

    def sum_rows(self, per_row: Tensor) -> Tensor:  # (Tq, Hq, …) → (B, Hq, …)
        """Sum values per query over each sequence."""
        offsets = self.cu_seqlens_q.to(per_row.device, torch.int64)
        return torch.segment_reduce(per_row.contiguous(), "sum", offsets=offsets, axis=0, initial=0.0, unsafe=True)


class KVCacheProblem(NamedTuple):
    """Canonical arguments for N new queries of B samples, against a cache of P pages; the rest as in ``Problem``."""

    query: Tensor  # (B, N, Hq, D)
    key: Tensor  # (P, page, Hkv, D)
    value: Tensor  # (P, page, Hkv, Dv)
    seqlens: Tensor  # (B,) integers, one past the index of each sample's last key
    bias: Tensor  # 0-d on the CPU (a number), or (B or 1, Hq or 1, N or 1, 1)
    # (B or 1, Hq or 1, N or 1, K), for the last K keys of each sample; earlier keys are not masked
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    left_padding: Tensor | None = None  # (B,) integers, the index of each sample's first key; None for 0
    block_table: Tensor | None = None  # (B, pages), the pages of each sample in order; None: page b is that of sample b
    # (B,) integers, one past the position of each sample's last query, relative to the keys and not limited to their
    # range; None for ``seqlens``, which aligns the last query with the last key
    query_ends: Tensor | None = None
    scale: float | None = None
    left: int = UNLIMITED
    right: int = UNLIMITED
    fast: bool = False
    softcap: float = 0.0
    num_splits: int = 0  # number of parts into which GPU kernels split the keys; 0 for automatic
    normalize: bool = False

    @property
    def capacity(self) -> int:
        """Largest number of keys of a sample."""
        return self.key.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    def key_ranges(self) -> list[tuple[int, int, int]]:
        """Return each sample's first key, and one past its last key and last query; reads (synchronises) lengths."""
        stops = self.seqlens.tolist()
        firsts = [0] * len(stops) if self.left_padding is None else self.left_padding.tolist()
        ends = stops if self.query_ends is None else self.query_ends.tolist()
        return list(zip(firsts, stops, ends, strict=True))

    def samples(self, samples: slice, first: int, stop: int, length: int, end: int) -> Problem:
        """Return samples (one, if there is a ``block_table``) as a problem of the keys first … stop - 1.

        length, end: one past the last key and the last query of each of the samples.
        """
        mask = select_samples(self.attn_mask, samples)
        if mask is not None:  # of the last K keys; earlier ones are visible
            start = length - mask.shape[3]
            mask = mask[..., max(first - start, 0) : max(stop - start, 0)]
            visible = 1.0 if mask.dtype is torch.bool else 0.0
            mask = torch.nn.functional.pad(mask, (stop - first - mask.shape[3], 0), value=visible)
        return Problem(
            self.query[samples].transpose(1, 2),
            self._keys(self.key, samples, first, stop),
            self._keys(self.value, samples, first, stop),
            select_samples(self.bias, samples),
            mask,
            select_samples(self.alibi_slopes, samples),
            query_offset=end - self.query.shape[1] - first,
            **_shared_options(self),
        )

    def _keys(self, cache: Tensor, samples: slice, first: int, stop: int) -> Tensor:  # (nb, Hkv, M, E)
        """Return keys or values first … stop - 1 of samples, a view unless they are in several pages."""
        if self.block_table is None:
            return cache[samples, first:stop].transpose(1, 2)
        page = cache.shape[1]
        pages = self.block_table[samples.start, first // page : -(-stop // page)]
        keys = cache[int(pages)] if len(pages) == 1 else cache.index_select(0, pages).flatten(0, 1)
        start = first - first // page * page
        return keys[start : start + stop - first].transpose(0, 1).unsqueeze(0)


P = TypeVar("P", bound=Problem | VarlenProblem | KVCacheProblem)
_SHARED = ("seed", "scale", "left", "right", "dropout_p", "fast", "deterministic", "softcap", "normalize")


def scale_of(problem: Problem | VarlenProblem | KVCacheProblem) -> float:
    """Return the factor of Q Kᵀ."""
    return scale_or_default(problem.scale, problem.query.shape[-1])


def _shared_options(problem: VarlenProblem | KVCacheProblem) -> dict[str, Any]:
    """Return the fields that a sequence or sample has in common with its problem."""
    return {name: getattr(problem, name) for name in _SHARED if hasattr(problem, name)}


# -- memory and layout of outputs -------------------------------------------------------------------------------------


@functools.cache
def keep_memory_warm() -> None:
    """Make glibc's allocator keep freed memory of up to 31 MiB for reuse, once per process.

    It returns larger freed blocks than a threshold to the system, so that each new one causes page faults, which
    doubled the time of a forward pass (docs/log.md). The threshold is the size of the largest block freed so far, up to
    32 MiB; allocating that much and freeing it, without touching it, raises it. Other allocators are not affected.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def memory_order(t: Tensor) -> list[int]:
    """Return the dimensions of t but the last, from the outermost in memory to the innermost."""
    stride, order = t.stride(), [0]
    for dim in range(1, t.dim() - 1):
        index = len(order)
        while index and _is_less(stride[order[index - 1]], stride[dim]):
            index -= 1
        order.insert(index, dim)
    return order


def new_output(query: Tensor, width: int) -> Tensor:  # (B, Hq, N, width), or packed (T, Hq, width)
    """Return an uninitialised output whose dimensions but the last have the memory order of the query.

    A model that obtained its heads as a view of a projection can then view the output in the same way.
    """
    shape = (*query.shape[:-1], width)
    if query.is_contiguous():
        return query.new_empty(shape)
    strides, stride = [1] * len(shape), width
    for dim in reversed(memory_order(query)):
        strides[dim], stride = stride, stride * shape[dim]
    return query.new_empty_strided(shape, strides)  # not a permuted tensor, which autograd would take for a view


def new_row_sums(query: Tensor) -> Tensor:
    """Return uninitialised memory for the sum and the lift (``normalization``) of each row of a query."""
    return query.new_empty(*query.shape[:-1], 2, dtype=torch.promote_types(query.dtype, torch.float32))


def new_result(query: Tensor, width: int, has_sums: bool, saved: Saved | None = None) -> Result:
    """Return uninitialised memory for the results of a forward pass; query: (B, Hq, N, D), or packed (T, Hq, D)."""
    # the first case of ``new_output``, without its call
    out = query.new_empty((*query.shape[:-1], width)) if query.is_contiguous() else new_output(query, width)
    shape, dtype = saved or ((0,), query.dtype)
    row_sums = new_row_sums(query) if has_sums else query.new_empty(0)
    return Result(out, query.new_empty(shape, dtype=dtype), row_sums)


def new_gradients(problem: Problem | VarlenProblem, needs_grad: NeedsGrad) -> Gradients:
    """Return memory for the gradients: zeros, in float32 or better, for the sums of bias, mask and slopes."""
    wide, tensors = torch.promote_types(problem.query.dtype, torch.float32), zip(problem[:6], needs_grad, strict=True)
    needed = [t if is_needed else None for t, is_needed in tensors]
    operands = [t if t is None else torch.empty_like(t) for t in needed[:3]]
    return Gradients(*operands, *[t if t is None else t.new_zeros(t.shape, dtype=wide) for t in needed[3:]])


def in_dtypes(gradients: Gradients, problem: Problem | VarlenProblem) -> Gradients:
    """Return gradients in the dtypes of the problem's tensors."""
    tensors: Any = problem[:6]
    return Gradients(*[g if g is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True)])


def in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """Return an output with the strides of ``new_output``, differentiable."""
    order = memory_order(query)
    out = out.permute(*order, len(order)).contiguous()
    return out.permute(*(order.index(dim) for dim in range(len(order))), len(order))


def _is_less(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Return a < b; False if that is unknown for symbolic sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(a < b)


# -- construction -----------------------------------------------------------------------------------------------------


def make_problem(
    kind: type[P], query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, bias: float | Tensor | None = None,
    window: tuple[int, int] | None = None, alibi_slopes: Tensor | None = None, precision: str | None = None,
    deterministic: bool = False, **fields: Any,
) -> P:  # fmt: skip
    """Return the problem that backends receive: bias, mask, slopes and window in one form.

    Defaults that depend on a size (scale, bias) stay None and are computed inside the op, where sizes are numbers, so
    that a graph compiled for any length does not specialise on one.

    precision: "accurate" or "fast"; None for the process-wide setting. deterministic: if True, gradients repeat
    bitwise. fields: fields of ``kind`` that are the same in the operator's arguments.
    """
    left, right = combine_window(window, is_causal)
    if precision is None:
        precision = settings.current_precision
    else:
        validation.choice("sigattn", "sigmoid precision", precision, settings.PRECISIONS, optional=False)
    for name, field in fields.items():
        if isinstance(field, Tensor):
            fields[name] = as_index(field)
    fields |= {"query": query, "key": key, "value": value}
    fields |= {"bias": bias, "attn_mask": attn_mask, "alibi_slopes": alibi_slopes}
    if kind is not KVCacheProblem:  # has neither dropout nor a gradient
        fields |= {"seed": dropout_p, "dropout_p": dropout_p}
        fields["deterministic"] = deterministic or torch.are_deterministic_algorithms_enabled()
    for name, form in CANONICAL_FORMS.items():
        if fields.get(name) is not None:
            fields[name] = form(fields[name], query)
    return kind(**fields, left=left, right=right, fast=precision == "fast")


def cast_operands(*operands: Any) -> tuple[Any, ...]:
    """Return operands in autocast's dtype if autocast is enabled on the device of the first, else unchanged."""
    if not torch._C._is_any_autocast_enabled():
        return operands
    first = operands[0]
    if not isinstance(first, Tensor) or not settings.is_autocast_enabled(first.device.type):
        return operands
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in operands
    )


def as_index(t: Tensor) -> Tensor:
    """Return integers in int64, unless they are int32: operators of PyTorch take no others as indices."""
    is_index = t.dtype in (torch.int32, torch.int64, torch.bool) or t.is_floating_point()
    return t if is_index else t.long()


def combine_window(window: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    """Return the window (left, right) that combines ``window`` and ``is_causal``."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if is_causal:
        right = 0 if right == UNLIMITED else min(right, 0)
    return left, right


def new_seed(device: torch.device) -> Tensor:
    """Return the seed of a call's dropout, drawn from PyTorch's generator of a device."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


def bias_tensor(bias: Any, query: Tensor) -> Tensor:
    """Return the bias as an operand of an op, with at least four dimensions if it is a tensor.

    A number becomes a 0-d tensor on the CPU, so that backends read it without synchronising. In a graph compiled for
    another device it becomes a tensor on the query's device, because a CUDA graph would replay the number it was
    recorded with; in float32, or the query's dtype if that is wider.
    """
    if isinstance(bias, Tensor):
        return at_least(bias, 4)
    if not isinstance(bias, (float, int, torch.SymFloat, torch.SymInt)):  # another library's number
        bias = float(bias)
    if not torch.compiler.is_compiling():
        return torch.full((), bias, dtype=torch.float64, device="cpu")  # half the time of torch.tensor
    # a sum, because the compiler keeps a number symbolic in a sum
    if query.device.type == "cpu":
        return torch.zeros((), dtype=torch.float64, device="cpu") + bias
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros((1, 1, 1, 1), dtype=dtype, device=query.device) + bias


def at_least(t: Tensor, dimensions: int) -> Tensor:
    """Return t with leading dimensions of size 1, so that it has at least this number of dimensions."""
    missing = dimensions - t.dim()
    return t if missing <= 0 else t.expand((1,) * missing + (-1,) * t.dim())  # one operator


def two_sided_slopes(slopes: Tensor | None) -> Tensor | None:  # (B or 1, Hq, 2)
    """Return slopes of any allowed shape as one slope for keys before the query and one for keys after it."""
    if slopes is None or slopes.dim() == 3:
        return slopes
    slopes = at_least(slopes, 2)
    return slopes.unsqueeze(-1).expand(*slopes.shape, 2)


# fields of problems, and their values for an argument of a call (that of the seed is dropout_p) and the query
CANONICAL_FORMS: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "bias": bias_tensor,
    "attn_mask": lambda mask, _: at_least(mask, 4),
    "alibi_slopes": lambda slopes, _: two_sided_slopes(slopes),
    "seed": lambda dropout_p, query: new_seed(query.device) if dropout_p else None,
}
