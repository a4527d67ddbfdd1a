"""Ring attention: keys and values pass from process to process, forward and backward.

Softmax attention must rescale its partial outputs when further keys arrive. With a sigmoid, partial outputs over
disjoint sets of keys add (Sect. 4), and so do partial gradients; with ``normalize`` outputs are averaged by their sums
of weights. The next part is sent while the current one is used; in the backward pass the gradients of K and V are
passed on as well.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.ops.attention import DENSE
from sigattn.ops.gradients import Gradients, NeedsGrad, Result
from sigattn.ops.normalization import add_parts
from sigattn.ops.problem import Problem, new_row_sums, select_rows


class Ring(NamedTuple):
    """Processes that share sequences."""

    sharding: SequenceSharding  # distribution of the positions
    group: ProcessGroup
    backend: str | None  # of the partial attention; None for the default

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def send_to_next(self, parts: Sequence[Tensor], owner: int) -> Callable[[], Sequence[Tensor]]:
        """Start sending the parts of process ``owner`` to the next process, and receiving those of ``owner`` - 1.

        The function that is returned waits for the latter and returns them. It raises RuntimeError if the other process
        has ended, or after the group's timeout.
        """
        ranks, processes = self.sharding.ranks, dist.get_process_group_ranks(self.group)
        n = self.sharding.size((owner - 1) % ranks)
        sent = [t.contiguous() for t in parts]
        received = [t.new_empty(*t.shape[:2], n, t.shape[3]) for t in parts]
        following, preceding = (processes[(self.rank + step) % ranks] for step in (1, -1))
        operations = [dist.P2POp(dist.isend, t, following, self.group) for t in sent if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, preceding, self.group) for t in received if t.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Sequence[Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # until then the memory was in use
            return received

        return wait

    def parts(self, parts: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Iterate over (rank, parts), starting with the local ones; the next are received while these are in use."""
        ranks = self.sharding.ranks
        for step in range(ranks):
            owner = (self.rank - step) % ranks
            receive = self.send_to_next(parts, owner) if step < ranks - 1 else None
            yield owner, parts
            if receive is not None:
                parts = receive()


_SAVED = ("query", "key", "value", "bias", "alibi_slopes")
_NO_TENSORS: dict[str, Any] = dict.fromkeys(_SAVED)


class ShardedAttention(torch.autograd.Function):
    """Attention of the local queries (B, Hq, n, D) to the keys and values (B, Hkv, n, ·) of all processes.

    The tensors are those of the problem, which has the options.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, slopes: Tensor | None, problem: Problem,
        ring: Ring,
    ) -> Tensor:  # fmt: skip
        ctx.options, ctx.ring = problem._replace(**_NO_TENSORS), ring
        with torch.autocast(query.device.type, enabled=False):
            total = _forward(ring, problem)
        out = total.out.to(query.dtype)
        nothing = out.new_empty(0)
        saved = (out, nothing, total.row_sums) if problem.normalize else (nothing, nothing, nothing)
        ctx.save_for_backward(query, key, value, bias, slopes, *saved)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        *tensors, out, weights, row_sums = ctx.saved_tensors
        problem = ctx.options._replace(**dict(zip(_SAVED, tensors, strict=True)))
        needs = NeedsGrad(bias=ctx.needs_input_grad[3], alibi_slopes=ctx.needs_input_grad[4])
        with torch.autocast(grad_out.device.type, enabled=False):
            g = _backward(ctx.ring, problem, grad_out, Result(out, weights, row_sums), needs)
        sums = (g.query, g.key, g.value, g.bias, g.alibi_slopes)
        return (*(None if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)), None, None)


def _forward(ring: Ring, problem: Problem) -> Result:
    """Return the output of the local queries, in float32 or float64, and with ``normalize`` the sums of its rows."""
    out = _zeros(problem.query, problem.value.shape[3])
    nothing = out.new_empty(0)
    total = Result(out, nothing, new_row_sums(problem.query).zero_() if problem.normalize else nothing)
    for owner, (key, value) in ring.parts((problem.key, problem.value)):
        for part, rows, _ in _visible_parts(ring, problem._replace(key=key, value=value), owner):
            of_rows = _of_rows(total, rows)
            result = DENSE.forward(part, ring.backend)
            add_parts((of_rows, result), of_rows)
    return total


def _of_rows(result: Result, rows: slice) -> Result:
    return Result(*(select_rows(t, rows) for t in result))


def _backward(ring: Ring, problem: Problem, grad_out: Tensor, result: Result, needs: NeedsGrad) -> Gradients:
    """Return the gradients of the local tensors, in float32 or float64."""
    p = problem
    bias = _zeros(p.bias) if p.bias is not None and needs.bias else None
    slopes = _zeros(p.alibi_slopes) if p.alibi_slopes is not None and needs.alibi_slopes else None
    dq, receive = _zeros(p.query), None
    for owner, (key, value) in ring.parts((p.key, p.value)):
        dk, dv = _zeros(key), _zeros(value)
        for part, rows, columns in _visible_parts(ring, p._replace(key=key, value=value), owner):
            g = DENSE.backward(part, ring.backend, grad_out[:, :, rows], _of_rows(result, rows), needs)
            for total, gradient in (
                (select_rows(dq, rows), g.query),
                (select_rows(dk, columns), g.key),
                (select_rows(dv, columns), g.value),
                (select_rows(bias, rows), g.bias),
                (slopes, g.alibi_slopes),
            ):
                if total is not None and gradient is not None:
                    total.add_(gradient)
        # dK and dV follow their keys and values round the ring, one step later
        if receive is not None:
            for total, received in zip((dk, dv), receive(), strict=True):
                total.add_(received)
        if ring.sharding.ranks > 1:
            receive = ring.send_to_next((dk, dv), owner)
    if receive is not None:
        dk, dv = receive()
    return Gradients(dq, dk, dv, bias, None, slopes)


def _visible_parts(ring: Ring, problem: Problem, owner: int) -> Iterator[tuple[Problem, slice, slice]]:
    """Iterate over the pairs of local segments and those of ``owner`` that the mask does not hide, and their slices."""
    pairs = ring.sharding.visible_pairs(ring.rank, owner, problem.left, problem.right)
    for rows, columns, q, k in pairs:
        lengths = None if problem.key_lengths is None else (problem.key_lengths - k.start).clamp(0, len(k))
        part = problem._replace(
            query=problem.query[:, :, rows], key=problem.key[:, :, columns], value=problem.value[:, :, columns],
            bias=select_rows(problem.bias, rows), key_lengths=lengths, query_offset=q.start - k.start,
        )  # fmt: skip
        yield part, rows, columns


def _zeros(t: Tensor, width: int | None = None) -> Tensor:
    """Return zeros of t's shape, or with another last dimension, in float32 or float64."""
    shape = t.shape if width is None else (*t.shape[:-1], width)
    return torch.zeros(shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)
