"""Strategies of context parallelism: the exchange of parts between processes, forward and backward.

Softmax attention must rescale its partial outputs when further keys arrive. With a sigmoid, partial outputs over
disjoint sets of keys add (Sect. 4), and so do partial gradients. Three strategies compute the same result:

    ring     K and V are passed from process to process; the next part is sent while the current one is used. In the
             backward pass their gradients are passed on as well.
    gather   every process gathers K and V and computes its own queries; the gradients of K and V are reduce-scattered.
    reduce   every process gathers Q and computes with its own keys; the partial outputs are reduce-scattered. (With
             softmax, a plain sum is not enough.) Least traffic, forward and backward together, if there are as many
             key/value heads as query heads (``predicted_traffic``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from sigattn.distributed import collectives
from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.ops.attention import DENSE
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import Problem, select_rows

Strategy = Literal["ring", "gather", "reduce"]


class Exchange(NamedTuple):
    """Processes that share sequences, and how they exchange their parts.

    Attributes:
        sharding: distribution of the positions. group: the processes. strategy: see the module.
        backend: backend of the partial attention; None for the default.
    """

    sharding: SequenceSharding
    group: ProcessGroup
    strategy: Strategy
    backend: str | None

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""
        return dist.get_rank(self.group)

    @property
    def is_ring(self) -> bool:
        """True if parts are passed from process to process."""
        return self.strategy == "ring" and self.sharding.ranks > 1

    def all_gather(self, local: Tensor) -> list[Tensor]:
        """Return every process's part of a tensor, by rank, given the local one, (B, H, n, E)."""
        b, h, _, e = local.shape
        shapes = [(b, h, self.sharding.size(r), e) for r in range(self.sharding.ranks)]
        return collectives.all_gather(local, shapes, self.group)

    def send_to_next(self, parts: Sequence[Tensor], owner: int) -> collectives.Transfer:
        """Start sending the parts of process ``owner`` to the next process, and receiving those of ``owner`` - 1."""
        ranks = self.sharding.ranks
        n = self.sharding.size((owner - 1) % ranks)
        received = [t.new_empty(*t.shape[:2], n, t.shape[3]) for t in parts]
        return collectives.Transfer(parts, received, (self.rank + 1) % ranks, (self.rank - 1) % ranks, self.group)

    def keys_and_values(self, key: Tensor, value: Tensor) -> Iterable[tuple[int, Sequence[Tensor]]]:
        """Iterate over (rank, (key, value)) of all processes, as "ring" or "gather" does."""
        if self.is_ring:
            return self._ring_pass((key, value))
        return enumerate(zip(self.all_gather(key), self.all_gather(value), strict=True))

    def _ring_pass(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Iterate over (rank, parts), starting with the local ones; the next are received while these are in use."""
        ranks = self.sharding.ranks
        for step in range(ranks):
            owner = (self.rank - step) % ranks
            transfer = self.send_to_next(parts, owner) if step < ranks - 1 else None
            yield owner, parts
            if transfer is not None:
                parts = transfer.wait()


_SAVED = ("query", "key", "value", "bias", "alibi_slopes")
_NO_TENSORS: dict[str, Any] = dict.fromkeys(_SAVED)


class ShardedAttention(torch.autograd.Function):
    """Attention of the local queries (B, Hq, n, D) to the keys and values (B, Hkv, n, ·) of all processes.

    The tensors are those of the problem, which has the options.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        slopes: Tensor | None,
        problem: Problem,
        exchange: Exchange,
    ) -> Tensor:
        """Return the output, (B, Hq, n, Dv)."""
        ctx.save_for_backward(query, key, value, bias, slopes)
        ctx.options, ctx.exchange = problem._replace(**_NO_TENSORS), exchange
        with torch.autocast(query.device.type, enabled=False):
            return _forward(exchange, problem).to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """Return the gradients of the tensors."""
        tensors = ctx.saved_tensors
        problem = ctx.options._replace(**dict(zip(_SAVED, tensors, strict=True)))
        needs = NeedsGrad(bias=ctx.needs_input_grad[3], alibi_slopes=ctx.needs_input_grad[4])
        with torch.autocast(grad_out.device.type, enabled=False):
            g = _backward(ctx.exchange, problem, grad_out, needs)
        sums = (g.query, g.key, g.value, g.bias, g.alibi_slopes)
        return (*(None if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)), None, None)


def _forward(exchange: Exchange, problem: Problem) -> Tensor:
    """Return the output of the local queries, in float32 or float64."""
    rank, width = exchange.rank, problem.value.shape[3]
    if exchange.strategy == "reduce":
        partial = []
        for r, query in enumerate(exchange.all_gather(problem.query)):
            partial.append(_zeros(query, width))
            _add_output(exchange, partial[r], problem._replace(query=query), r, rank)
        return collectives.reduce_scatter(partial, exchange.group)
    out = _zeros(problem.query, width)
    for r, (key, value) in exchange.keys_and_values(problem.key, problem.value):
        _add_output(exchange, out, problem._replace(key=key, value=value), rank, r)
    return out


def _backward(exchange: Exchange, problem: Problem, grad_out: Tensor, needs: NeedsGrad) -> Gradients:
    """Return the gradients of the local tensors, in float32 or float64."""
    rank, p = exchange.rank, problem
    bias = _zeros(p.bias) if p.bias is not None and needs.bias else None
    slopes = _zeros(p.alibi_slopes) if p.alibi_slopes is not None and needs.alibi_slopes else None
    sums = Gradients(_zeros(p.query), _zeros(p.key), _zeros(p.value), bias, None, slopes)
    if exchange.strategy == "reduce":
        partial = []
        gathered = zip(exchange.all_gather(p.query), exchange.all_gather(grad_out), strict=True)
        for r, (query, grad) in enumerate(gathered):
            partial.append(_zeros(query))
            _add_gradients(exchange, sums._replace(query=partial[r]), p._replace(query=query), grad, needs, r, rank)
        return sums._replace(query=collectives.reduce_scatter(partial, exchange.group))
    partial_keys, partial_values, transfer = [], [], None
    for r, (key, value) in exchange.keys_and_values(p.key, p.value):
        dk, dv = _zeros(key), _zeros(value)
        sums_of_r = sums._replace(key=dk, value=dv)
        _add_gradients(exchange, sums_of_r, p._replace(key=key, value=value), grad_out, needs, rank, r)
        if exchange.is_ring:  # dK and dV follow their keys and values round the ring, one step later
            if transfer is not None:
                for total, received in zip((dk, dv), transfer.wait(), strict=True):
                    total.add_(received)
            transfer = exchange.send_to_next((dk, dv), r)
        else:
            partial_keys.append(dk)
            partial_values.append(dv)
    if transfer is not None:
        dk, dv = transfer.wait()
    else:
        dk, dv = (collectives.reduce_scatter(parts, exchange.group) for parts in (partial_keys, partial_values))
    return sums._replace(key=dk, value=dv)


def _add_output(exchange: Exchange, out: Tensor, problem: Problem, query_rank: int, key_rank: int) -> None:
    """Add to out (B, Hq, n, Dv) the output of one process's queries with another's keys."""
    for part, rows, _ in _visible_parts(exchange, problem, query_rank, key_rank):
        out[:, :, rows] += DENSE.backends[DENSE.choose(part, exchange.backend)].forward(part, None)[0]


def _add_gradients(
    exchange: Exchange,
    sums: Gradients,
    problem: Problem,
    grad_out: Tensor,
    needs: NeedsGrad,
    query_rank: int,
    key_rank: int,
) -> None:
    """Add to sums the gradients of one process's queries with another's keys."""
    for part, rows, columns in _visible_parts(exchange, problem, query_rank, key_rank):
        backward = DENSE.backends[DENSE.choose(part, exchange.backend)].backward
        assert backward is not None
        g = backward(part, grad_out[:, :, rows], part.query.new_empty(0), needs)
        for total, gradient in (
            (select_rows(sums.query, rows), g.query),
            (select_rows(sums.key, columns), g.key),
            (select_rows(sums.value, columns), g.value),
            (select_rows(sums.bias, rows), g.bias),
            (sums.alibi_slopes, g.alibi_slopes),
        ):
            if total is not None and gradient is not None:
                total.add_(gradient)


def _visible_parts(
    exchange: Exchange, problem: Problem, query_rank: int, key_rank: int
) -> Iterator[tuple[Problem, slice, slice]]:
    """Iterate over the pairs of segments of two processes that the mask does not hide, and their local positions."""
    pairs = exchange.sharding.visible_pairs(query_rank, key_rank, problem.left, problem.right)
    for rows, columns, q, k in pairs:
        lengths = None if problem.key_lengths is None else (problem.key_lengths - k.start).clamp(0, len(k))
        part = problem._replace(
            query=problem.query[:, :, rows],
            key=problem.key[:, :, columns],
            value=problem.value[:, :, columns],
            bias=select_rows(problem.bias, rows),
            key_lengths=lengths,
            query_offset=q.start - k.start,
        )
        yield part, rows, columns


def _zeros(t: Tensor, width: int | None = None) -> Tensor:
    """Return zeros of t's shape, or with another last dimension, in float32 or float64."""
    shape = t.shape if width is None else (*t.shape[:-1], width)
    return torch.zeros(shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)


def predicted_traffic(
    strategy: Strategy, sharding: SequenceSharding, rank: int, elements: tuple[int, int, int], itemsize: int
) -> tuple[int, int]:
    """Return the number of bytes that a process sends in the forward and in the backward pass, by formula.

    Let R be the number of processes, M the length, and n the number of this process's positions. Forward, ring and
    gather send K and V R - 1 times; reduce sends Q R - 1 times, and partial outputs of M - n positions. Backward, ring
    sends K and V as before, and gradients of M positions (the last transfer returns them to their owner); gather sends
    K and V, and gradients of M - n positions; reduce sends Q and dO, and dQ of M - n positions. Partial sums are in
    float32 or float64.

    Args:
        strategy, sharding, rank: strategy, distribution of the positions, and the process.
        elements: sizes, over batch and heads, of a position's query, of its key and value together, and of its output.
        itemsize: bytes of an element of the inputs.
    """
    query, keys, output = elements
    partial = max(itemsize, 4)
    n, others = sharding.size(rank), sharding.ranks - 1
    remaining = sharding.length - n
    if strategy == "ring":
        passed = sum(sharding.size((rank - step) % sharding.ranks) for step in range(others))
        return passed * keys * itemsize, passed * keys * itemsize + sharding.length * keys * partial
    if strategy == "gather":
        return others * n * keys * itemsize, others * n * keys * itemsize + remaining * keys * partial
    forward = others * n * query * itemsize + remaining * output * partial
    return forward, others * n * (query + output) * itemsize + remaining * query * partial
