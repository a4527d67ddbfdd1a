"""Rules by which DTensor shards the dense operator: over the batch or over heads, without communication."""

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sigattn.ops.gradients import Gradients, Result
from sigattn.ops.problem import Problem

_has_rules = False


def add_rules(forward: Any, backward: Any, problem: Problem) -> None:
    """Register the rules of the two ops at the first call with a DTensor; raise ValueError for one with dropout."""
    global _has_rules
    if not isinstance(problem.query, DTensor):
        return
    if problem.seed is not None:  # copies of a query would get different masks
        raise ValueError("sigmoid_attention: dropout_p is not supported with DTensor: pass 0, or .to_local() tensors")
    if not _has_rules:
        first = 1 + len(Result._fields)  # argument of the backward op that is the first field of a problem
        register_sharding(forward)(lambda *args: [_of_forward(dim, *args) for dim in _dimensions(args)])
        register_sharding(backward)(lambda *args: [_of_backward(dim, *args) for dim in _dimensions(args[first:])])
        _has_rules = True


def _dimensions(fields: Any) -> list[int | None]:
    """Return the dimensions over which a problem can be sharded: None, batch (0) and heads (1).

    The sizes must be multiples of the mesh's. With unequal parts, query heads would get other key heads.
    """
    query, key = fields[:2]
    parts = query.mesh.size()
    return [None, *(dim for dim in (0, 1) if not query.shape[dim] % parts and not key.shape[dim] % parts)]


def _of_forward(dim: int | None, *args: Any) -> tuple[list[Any], list[Any]]:
    """Return the placements of the forward op's results and arguments, sharded over a dimension."""
    problem = Problem(*args[: len(Problem._fields)])
    sharded = Replicate() if dim is None else Shard(dim)
    has_sums = problem.normalize and args[len(Problem._fields)] != "reference"
    return [sharded, Replicate(), sharded if has_sums else Replicate()], _of_arguments(dim, args)


def _of_backward(dim: int | None, *args: Any) -> tuple[list[Any], list[Any]]:
    """As above, of the backward op, whose results are partial sums where a tensor broadcasts over the dimension."""
    first = 1 + len(Result._fields)
    arguments = _of_arguments(dim, args)
    gradients: list[Any] = [Replicate()] * len(Gradients._fields)
    for i, needed in enumerate(args[-1]):
        if needed:
            gradients[i] = arguments[first + i]
            if dim is not None and args[first + i].shape[dim] == 1:
                gradients[i] = Partial()
    return gradients, arguments


def _of_arguments(dim: int | None, args: Any) -> list[Any]:
    """Return the placements of tensors: sharded, or the same everywhere if they are empty or broadcast."""
    placements: list[Any] = []
    for arg in args:
        shape = getattr(arg, "shape", None)
        if shape is None:
            placements.append(None)
        elif dim is not None and (len(shape) > 2 or (dim == 0 and len(shape) == 1)) and shape[dim] > 1:
            placements.append(Shard(dim))
        else:
            placements.append(Replicate())
    return placements
