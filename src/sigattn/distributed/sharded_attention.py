"""Context parallelism: self-attention over sequences whose positions are sharded over processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sigattn.distributed.ring import Ring, ShardedAttention
from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.ops import validation
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import NORMALIZED_MARGIN, Problem, cast_operands, log_length_bias, make_problem
from sigattn.ops.settings import BACKENDS

_NAME = "context_parallel_attention"


def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mesh: DeviceMesh, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, bias: float | Tensor | None = None, window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None, key_lengths: Tensor | None = None, length: int | None = None,
    balanced: bool | None = None, softcap: float = 0.0, normalize: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Compute self-attention over sequences whose positions are sharded over the processes of a mesh.

    This is a collective: all processes of the mesh must call it, each with its own part.

    Args:
        query: (B, Hq, n, D), this process's positions (``SequenceSharding.shard``).
        key: (B, Hkv, n, D). value: (B, Hkv, n, Dv).
        mesh: one-dimensional mesh of the processes that share the sequence.
        is_causal, scale, enable_gqa, window: as in ``sigattn.sigmoid_attention``, over the whole sequence.
        bias: b: a number, or a tensor broadcastable to (B, Hq, n, 1) over this process's queries, with gradient. None
            is -log of the *whole* length, or of each sample's under ``key_lengths``; 6 less with ``normalize``.
        alibi_slopes: as in ``sigmoid_attention``. The gradients of bias and slopes are those of this process's queries
            and keys: for values that are equal on all processes they must be summed, as for any parameter.
        key_lengths: (B,), number of keys of each padded sample, over the whole sequence.
        length: length of the whole sequence; None if all processes have the same number of positions.
        balanced: True if each process has one segment of the first and one of the second half
            (``SequenceSharding``); None for is_causal.
        softcap, normalize: as in ``sigmoid_attention``.
        backend: as in ``sigmoid_attention``; with ``normalize`` not "reference".

    Returns:
        Attention output of this process's queries, (B, Hq, n, Dv).

    Raises:
        ValueError: shapes or values that do not fit.
        TypeError: arguments of the wrong type.
        RuntimeError: if another process has ended, or the group's timeout has expired.
    """
    query, key, value = cast_operands(query, key, value)
    validation.operands(_NAME, validation.HEADS_FIRST, enable_gqa=enable_gqa, query=query, key=key, value=value)
    options = validation.options(
        _NAME, query, (*query.shape[:3], 1), (), is_causal=is_causal, scale=scale, bias=bias, window=window,
        alibi_slopes=alibi_slopes, key_lengths=key_lengths, softcap=softcap, normalize=normalize,
    )  # fmt: skip
    if mesh.ndim != 1:
        raise ValueError(f"{_NAME}: the mesh must have one dimension, got {mesh.mesh_dim_names or mesh.shape}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"{_NAME}: query and key must have the same number of positions; got "
                         f"{validation.describe(query=query, key=key)}")  # fmt: skip
    ranks, rank, local = mesh.size(), mesh.get_local_rank(), query.shape[2]
    whole = local * ranks if length is None else length
    sharding = SequenceSharding(whole, ranks, is_causal if balanced is None else balanced)
    if sharding.size(rank) != local:
        raise ValueError(
            f"{_NAME}: of {whole} positions over {ranks} processes, balanced={sharding.balanced}, process {rank} has "
            f"{sharding.size(rank)}, but got {local} (length={length}): shard the sequence by SequenceSharding.shard "
            "and pass length"
        )
    validation.choice(_NAME, "backend", backend, BACKENDS)
    if bias is None:
        bias = log_length_bias(sharding.length)
        if key_lengths is not None:
            wide = torch.promote_types(query.dtype, torch.float32)
            bias = log_length_bias(key_lengths.to(query.device, wide).clamp(min=1)).view(-1, 1, 1, 1)
        options["bias"] = bias - NORMALIZED_MARGIN if normalize else bias
    problem = make_problem(Problem, query, key, value, **options)
    if normalize and DENSE.choose(problem, backend) == "reference":
        raise ValueError(f"{_NAME}: backend 'reference' does not support normalize=True here: pass another or None")
    ring = Ring(sharding, mesh.get_group(), backend)
    return ShardedAttention.apply(query, key, value, problem.bias, problem.alibi_slopes, problem, ring)


@dataclass(frozen=True)
class ContextParallelShard:
    """Part of each sequence that this process holds: a ``SequenceShard`` of ``sigattn.nn.Attention``.

    Attributes:
        mesh: processes that share the sequences. sharding: distribution of the positions.
    """

    mesh: DeviceMesh
    sharding: SequenceSharding

    @property
    def length(self) -> int:
        """Length of the whole sequence."""
        return self.sharding.length

    def positions(self, device: torch.device) -> Tensor:
        """Return this process's positions, (n,) integers."""
        return self.sharding.positions(self.mesh.get_local_rank(), device)

    def shard(self, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor (B, N, …)."""
        return self.sharding.shard(whole, self.mesh.get_local_rank())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        options |= {"mesh": self.mesh, "length": self.length, "balanced": self.sharding.balanced}
        return context_parallel_attention(query, key, value, enable_gqa=True, **options)


@contextmanager
def context_parallel(module: nn.Module, shard: ContextParallelShard | None) -> Iterator[None]:
    """Set the attribute ``sequence_shard`` of all layers of a module that have one, within the context."""
    layers: list[Any] = [m for m in module.modules() if shard is not None and "sequence_shard" in vars(m)]
    try:
        for layer in layers:
            layer.sequence_shard = shard
        yield
    finally:
        for layer in layers:
            layer.sequence_shard = None
