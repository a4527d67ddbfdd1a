"""Context parallelism: sigmoid attention over sequences that are sharded over processes, forward and backward.

Softmax attention must rescale its partial outputs when further keys arrive. With a sigmoid, partial outputs over
disjoint sets of keys add (Sect. 4), and so do partial gradients. Three strategies compute the same result:

    ring     K and V are passed from process to process; the next part is sent while the current one is used. In the
             backward pass their gradients are passed on as well.
    gather   every process gathers K and V and computes its own queries; the gradients of K and V are reduce-scattered.
    reduce   every process gathers Q and computes with its own keys; the partial outputs are reduce-scattered. (With
             softmax, a plain sum is not enough.) Least traffic, forward and backward together, if there are as many
             key/value heads as query heads (see ``traffic``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sigattn.distributed import collectives
from sigattn.distributed.placement import Segment, SequenceSharding, infer_sequence_sharding
from sigattn.ops import custom_ops, validation
from sigattn.ops.attention import autocast, bias_operand, sides, two_sided
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import Problem, log_length_bias
from sigattn.ops.settings import is_fast

Strategy = Literal["ring", "gather", "reduce"]
_NAME = "context_parallel_attention"


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    bias: float | Tensor | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | None = None,
    length: int | None = None,
    balanced: bool | None = None,
    strategy: Strategy = "ring",
    softcap: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Compute self-attention over sequences whose positions are sharded over the processes of a mesh.

    This is a collective: all processes of the mesh must call it, each with its own part.

    Args:
        query: (B, Hq, n, D), this process's positions (``SequenceSharding.shard``).
        key: (B, Hkv, n, D). value: (B, Hkv, n, Dv).
        mesh: one-dimensional mesh of the processes that share the sequence.
        is_causal, scale, enable_gqa, window: as in ``sigattn.sigmoid_attention``, over the whole sequence.
        bias: b: a number, or a tensor broadcastable to (B, Hq, n, 1) over this process's queries, with gradient. None
            is -log of the *whole* length, or of each sample's under ``key_lengths``.
        alibi_slopes: as in ``sigmoid_attention``. The gradients of bias and slopes are those of this process's queries
            and keys: for values that are equal on all processes they must be summed, as for any parameter.
        key_lengths: (B,), number of keys of each padded sample, over the whole sequence.
        length: length of the whole sequence; None if all processes have the same number of positions.
        balanced: True if each process has one segment of the first and one of the second half
            (``SequenceSharding``); None for is_causal.
        strategy: "ring", "gather" or "reduce".
        softcap: as in ``sigmoid_attention``.
        backend: as in ``sigmoid_attention``, but not "reference".

    Returns:
        Attention output of this process's queries, (B, Hq, n, Dv).

    Raises:
        ValueError: shapes or values that do not fit, or an unknown strategy.
        TypeError: arguments of the wrong type.
        RuntimeError: if another process has ended, or the group's timeout has expired.
    """
    if isinstance(query, Tensor) and custom_ops.is_autocast_enabled(query.device.type):
        query, key, value = (autocast(t) for t in (query, key, value))
    validation.operands(query, key, value, enable_gqa)
    if strategy not in get_args(Strategy):
        raise ValueError(f"{_NAME}: strategy must be one of {get_args(Strategy)}, got {strategy!r}")
    if mesh.ndim != 1:
        raise ValueError(f"{_NAME}: the mesh must have one dimension, got {mesh.mesh_dim_names or mesh.shape}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"{_NAME}: query and key must have the same number of positions; got "
                         f"{validation.describe(query=query, key=key)}")  # fmt: skip
    group = mesh.get_group()
    placement = infer_sequence_sharding(query.shape[2], length, group, is_causal if balanced is None else balanced)
    whole = key.new_empty(()).expand(*key.shape[:2], placement.length, key.shape[3])  # only its shape is checked
    _, scale, window = validation.options(query, whole, None, 0.0, bias, window, alibi_slopes, None, scale)
    if key_lengths is not None:
        validation.options(whole, whole, None, 0.0, None, None, None, key_lengths, None)
    softcap = validation.softcap(softcap, _NAME)
    validation.choice("backend", backend, tuple(custom_ops.KERNELS), _NAME)
    if strategy == "reduce" and isinstance(bias, Tensor) and bias.dim() > 1 and bias.shape[-2] > 1:
        raise ValueError(f'{_NAME}: a bias for each query needs strategy="ring" or "gather", got "reduce"')
    left, right = sides(window, is_causal)
    shared = _Shared(
        placement,
        group,
        dist.get_rank(group),
        strategy,
        backend,
        scale,
        left,
        right,
        key_lengths,
        is_fast(None),
        softcap,
    )
    if bias is None:
        bias = log_length_bias(placement.length)
        if key_lengths is not None:
            wide = torch.promote_types(query.dtype, torch.float32)
            bias = log_length_bias(key_lengths.to(query.device, wide).clamp(min=1)).view(-1, 1, 1, 1)
    slopes = None if alibi_slopes is None else two_sided(alibi_slopes)
    out: Tensor = _ContextParallel.apply(query, key, value, bias_operand(bias, query), slopes, shared)
    return out


@dataclass(frozen=True)
class ContextParallelShard:
    """Part of each sequence that this process holds: a ``SequenceShard`` of ``sigattn.nn.Attention``.

    Attributes:
        mesh: processes that share the sequences. placement: distribution of the positions. strategy: see the module.
    """

    mesh: DeviceMesh
    placement: SequenceSharding
    strategy: Strategy = "ring"

    @property
    def length(self) -> int:
        """Length of the whole sequence."""
        return self.placement.length

    def positions(self, device: torch.device) -> Tensor:
        """Return this process's positions, (n,) integers."""
        return self.placement.positions(self.mesh.get_local_rank(), device)

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor (B, N, …)."""
        return self.placement.shard(whole, self.mesh.get_local_rank())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        window: tuple[int, int] | None,
        bias: float | Tensor,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        """Call ``context_parallel_attention`` with this process's part."""
        return context_parallel_attention(
            query,
            key,
            value,
            mesh=self.mesh,
            is_causal=is_causal,
            enable_gqa=True,
            bias=bias,
            window=window,
            alibi_slopes=alibi_slopes,
            length=self.length,
            balanced=self.placement.balanced,
            strategy=self.strategy,
        )


@contextmanager
def context_parallel(module: nn.Module, share: ContextParallelShard | None) -> Iterator[None]:
    """Set the attribute ``share`` of all layers of a module that have one, within the context."""
    layers: list[Any] = [m for m in module.modules() if share is not None and "share" in vars(m)]
    try:
        for layer in layers:
            layer.share = share
        yield
    finally:
        for layer in layers:
            layer.share = None


def traffic(
    strategy: Strategy, placement: SequenceSharding, rank: int, elements: tuple[int, int, int], itemsize: int
) -> tuple[int, int]:
    """Return the number of bytes that a process sends in the forward and in the backward pass, by formula.

    Let R be the number of processes, M the length, and n the number of this process's positions. Forward, ring and
    gather send K and V R - 1 times; reduce sends Q R - 1 times, and partial outputs of M - n positions. Backward, ring
    sends K and V as before, and gradients of M positions (the last transfer returns them to their owner); gather sends
    K and V, and gradients of M - n positions; reduce sends Q and dO, and dQ of M - n positions. Partial sums are in
    float32 or float64.

    Args:
        strategy, placement, rank: strategy, distribution of the positions, and the process.
        elements: sizes, over batch and heads, of a position's query, of its key and value together, and of its output.
        itemsize: bytes of an element of the inputs.
    """
    query, keys, output = elements
    partial = max(itemsize, 4)
    n, others = placement.size(rank), placement.ranks - 1
    remaining = placement.length - n
    if strategy == "ring":
        passed = sum(placement.size((rank - step) % placement.ranks) for step in range(others))
        return passed * keys * itemsize, passed * keys * itemsize + placement.length * keys * partial
    if strategy == "gather":
        return others * n * keys * itemsize, others * n * keys * itemsize + remaining * keys * partial
    forward = others * n * query * itemsize + remaining * output * partial
    return forward, others * n * (query + output) * itemsize + remaining * query * partial


class _Shared(NamedTuple):
    """Arguments of a call other than differentiable tensors."""

    placement: SequenceSharding
    group: ProcessGroup
    rank: int
    strategy: Strategy
    backend: str | None
    scale: float | None
    left: int
    right: int
    key_lengths: Tensor | None
    fast: bool
    softcap: float

    def sizes(self) -> list[int]:
        return [self.placement.size(r) for r in range(self.placement.ranks)]

    def shapes(self, local: Tensor) -> list[list[int]]:
        """Return the shape of every process's tensor, given this process's, (B, H, n, E)."""
        b, h, _, e = local.shape
        return [[b, h, n, e] for n in self.sizes()]


class _Ring:
    """Ring of processes: each sends the tensors that it received to the next one."""

    def __init__(self, shared: _Shared) -> None:
        self.shared, self.ranks = shared, shared.placement.ranks

    def start(self, held: Sequence[Tensor], owner: int) -> collectives.Transfer:
        """Start sending the tensors of process ``owner``, and receiving those of process ``owner`` - 1."""
        s = self.shared
        n = s.placement.size((owner - 1) % self.ranks)
        received = [t.new_empty(*t.shape[:2], n, t.shape[3]) for t in held]
        to, source = (s.rank + 1) % self.ranks, (s.rank - 1) % self.ranks
        return collectives.Transfer(held, received, to, source, s.group)


def _pairs(shared: _Shared, queries: int, keys: int) -> list[tuple[slice, slice, Segment, Segment]]:
    """Return the pairs of query and key segments of two processes that the mask does not hide entirely.

    Args:
        queries, keys: ranks of the processes that hold them.

    Returns:
        For each pair, the slices of the local queries and keys, and the segments of the whole sequence.
    """

    def local_segments(rank: int) -> list[tuple[slice, Segment]]:
        segments, start = [], 0
        for s in shared.placement.segments(rank):
            segments.append((slice(start, start + s.size), s))
            start += s.size
        return segments

    pairs = []
    for rows, q in local_segments(queries):
        for columns, k in local_segments(keys):
            after = shared.right >= 0 and k.start > q.stop - 1 + shared.right
            before = shared.left >= 0 and k.stop - 1 < q.start - shared.left
            if q.size and k.size and not after and not before:
                pairs.append((rows, columns, q, k))
    return pairs


class _Tensors(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    slopes: Tensor | None


def _problem(shared: _Shared, t: _Tensors, rows: slice, columns: slice, q: Segment, k: Segment) -> Problem:
    """Return the attention problem of one segment of queries and one segment of keys."""
    bias = t.bias[:, :, rows] if t.bias.dim() and t.bias.shape[2] > 1 else t.bias
    lengths = None if shared.key_lengths is None else (shared.key_lengths - k.start).clamp(0, k.size)
    return Problem(
        t.query[:, :, rows],
        t.key[:, :, columns],
        t.value[:, :, columns],
        bias,
        alibi_slopes=t.slopes,
        key_lengths=lengths,
        scale=shared.scale,
        left=shared.left,
        right=shared.right,
        query_offset=q.start - k.start,
        fast=shared.fast,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        softcap=shared.softcap,
    )


def _accumulate(shared: _Shared, out: Tensor, t: _Tensors, queries: int, keys: int) -> None:
    """Add to out (B, Hq, n, Dv) the partial output of process ``queries``'s queries and process ``keys``'s keys."""
    for rows, columns, q, k in _pairs(shared, queries, keys):
        problem = _problem(shared, t, rows, columns, q, k)
        kernels = custom_ops.KERNELS[custom_ops.choose(problem, shared.backend)]
        out[:, :, rows] += kernels.forward(problem)


class _Sums(NamedTuple):
    """Accumulators of the gradients, in float32 or float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    slopes: Tensor | None


def _accumulate_gradients(shared: _Shared, sums: _Sums, t: _Tensors, grad_out: Tensor, queries: int, keys: int) -> None:
    """Add to sums the partial gradients of process ``queries``'s queries and process ``keys``'s keys."""
    needs_grad = NeedsGrad(True, True, True, sums.bias is not None, alibi_slopes=sums.slopes is not None)
    for rows, columns, q, k in _pairs(shared, queries, keys):
        problem = _problem(shared, t, rows, columns, q, k)
        kernels = custom_ops.KERNELS[custom_ops.choose(problem, shared.backend)]
        g = kernels.backward(problem, grad_out[:, :, rows], needs_grad)
        for total, part, segment in (
            (sums.query, g.query, rows),
            (sums.key, g.key, columns),
            (sums.value, g.value, columns),
        ):
            assert part is not None
            total[:, :, segment] += part
        if sums.bias is not None and g.bias is not None:
            total_bias = sums.bias[:, :, rows] if sums.bias.dim() and sums.bias.shape[2] > 1 else sums.bias
            total_bias += g.bias
        if sums.slopes is not None and g.alibi_slopes is not None:
            sums.slopes.add_(g.alibi_slopes)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _zeros(t: Tensor, length: int | None = None, width: int | None = None) -> Tensor:
    """Return zeros (B, H, length, width) in float32 or float64, by default of t's length and width."""
    b, h, n, e = t.shape
    return t.new_zeros(b, h, n if length is None else length, e if width is None else width, dtype=_wide(t))


def _forward(shared: _Shared, t: _Tensors) -> Tensor:
    ranks, rank = shared.placement.ranks, shared.rank
    width = t.value.shape[3]
    if shared.strategy == "reduce":
        queries = collectives.gather(t.query, shared.shapes(t.query), shared.group)
        partial = [_zeros(q, width=width) for q in queries]
        for r, (q, out) in enumerate(zip(queries, partial, strict=True)):
            _accumulate(shared, out, t._replace(query=q), r, rank)
        return collectives.reduce_scatter(partial, shared.group)
    out = _zeros(t.query, width=width)
    if shared.strategy == "gather":
        keys = collectives.gather(t.key, shared.shapes(t.key), shared.group)
        values = collectives.gather(t.value, shared.shapes(t.value), shared.group)
        for r in range(ranks):
            _accumulate(shared, out, t._replace(key=keys[r], value=values[r]), rank, r)
        return out
    ring, held = _Ring(shared), (t.key, t.value)
    for step in range(ranks):
        owner = (rank - step) % ranks
        transfer = ring.start(held, owner) if step < ranks - 1 else None
        _accumulate(shared, out, t._replace(key=held[0], value=held[1]), rank, owner)
        if transfer is not None:
            held = tuple(transfer.wait())  # type: ignore[assignment]
    return out


def _backward(shared: _Shared, t: _Tensors, grad_out: Tensor, needs_grad: Sequence[bool]) -> _Sums:
    ranks, rank = shared.placement.ranks, shared.rank
    bias = torch.zeros(t.bias.shape, dtype=_wide(t.query), device=t.bias.device) if needs_grad[3] else None
    slopes = torch.zeros_like(t.slopes, dtype=_wide(t.query)) if t.slopes is not None and needs_grad[4] else None
    sums = _Sums(_zeros(t.query), _zeros(t.key), _zeros(t.value), bias, slopes)
    if shared.strategy == "reduce":
        queries = collectives.gather(t.query, shared.shapes(t.query), shared.group)
        grads = collectives.gather(grad_out, shared.shapes(grad_out), shared.group)
        partial = [_zeros(q) for q in queries]
        for r in range(ranks):
            sums_of_r = sums._replace(query=partial[r])
            _accumulate_gradients(shared, sums_of_r, t._replace(query=queries[r]), grads[r], r, rank)
        return sums._replace(query=collectives.reduce_scatter(partial, shared.group))
    if shared.strategy == "gather":
        keys = collectives.gather(t.key, shared.shapes(t.key), shared.group)
        values = collectives.gather(t.value, shared.shapes(t.value), shared.group)
        grad_keys, grad_values = [_zeros(k) for k in keys], [_zeros(v) for v in values]
        for r in range(ranks):
            sums_of_r = sums._replace(key=grad_keys[r], value=grad_values[r])
            _accumulate_gradients(shared, sums_of_r, t._replace(key=keys[r], value=values[r]), grad_out, rank, r)
        key = collectives.reduce_scatter(grad_keys, shared.group)
        return sums._replace(key=key, value=collectives.reduce_scatter(grad_values, shared.group))
    return _backward_ring(shared, t, grad_out, sums)


def _backward_ring(shared: _Shared, t: _Tensors, grad_out: Tensor, sums: _Sums) -> _Sums:
    """Pass K and V round the ring again, followed one step later by the partial sums of their gradients."""
    ranks, rank = shared.placement.ranks, shared.rank
    ring, held = _Ring(shared), (t.key, t.value)
    grads_transfer: collectives.Transfer | None = None
    for step in range(ranks):
        owner = (rank - step) % ranks
        transfer = ring.start(held, owner) if step < ranks - 1 else None
        grads = (_zeros(held[0]), _zeros(held[1]))
        sums_of_owner = sums._replace(key=grads[0], value=grads[1])
        _accumulate_gradients(shared, sums_of_owner, t._replace(key=held[0], value=held[1]), grad_out, rank, owner)
        if grads_transfer is not None:
            for local, received in zip(grads, grads_transfer.wait(), strict=True):
                local += received
        grads_transfer = ring.start(grads, owner)
        if transfer is not None:
            held = tuple(transfer.wait())  # type: ignore[assignment]
    assert grads_transfer is not None
    key, value = grads_transfer.wait()
    return sums._replace(key=key, value=value)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, slopes: Any, shared: _Shared) -> Any:
        ctx.save_for_backward(query, key, value, bias, slopes)
        ctx.shared = shared
        with torch.autocast(query.device.type, enabled=False):
            return _forward(shared, _Tensors(query, key, value, bias, slopes)).to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        t = _Tensors(*ctx.saved_tensors)
        with torch.autocast(t.query.device.type, enabled=False):
            sums = _backward(ctx.shared, t, grad_out, ctx.needs_input_grad)
        pairs = zip(sums, t, strict=True)
        return (*(None if g is None or like is None else g.to(like.dtype) for g, like in pairs), None)
