"""Processes of a run that torchrun started, and reductions over them."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sigattn.ops.statistics import AttentionStatistics
from sigattn.validation import SettingsError


@dataclass(frozen=True)
class ProcessMesh:
    """Processes of a run, and the rank of this one.

    Attributes:
        rank, world_size: this process's rank, and the number of all processes. device: this process's device.
        mesh: mesh (data, tensor) of all processes; None for a single process. Processes along "data" see different
            samples, or different parts of the same ones.
        dp_rank, dp_size: rank and number of the processes, or groups of processes, that see different samples.
        tp_size: number of processes that share each layer (tensor parallelism).
        cp_mesh: mesh of the processes that share each sequence (context parallelism); None without.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    dp_rank: int = 0
    dp_size: int = 1
    tp_size: int = 1
    cp_mesh: DeviceMesh | None = None

    @property
    def is_main_process(self) -> bool:
        """True for the main process, which writes logs and checkpoints."""
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """Rank and number of the parts of the data."""
        return self.dp_rank, self.dp_size

    @property
    def cp_size(self) -> int:
        """Number of processes that share each sequence."""
        return 1 if self.cp_mesh is None else self.cp_mesh.size()

    @property
    def num_replicas(self) -> int:
        """Number of processes whose gradients are averaged: those with different samples or parts of samples."""
        return self.dp_size * self.cp_size

    def with_mesh(self, tensor_parallel: int, context_parallel: int = 1) -> "ProcessMesh":
        """Return the processes with meshes, so many of which share each layer and each sequence.

        Raises:
            SettingsError: a ValueError, if the product does not divide the number of processes.
        """
        if self.world_size % (tensor_parallel * context_parallel):
            others = f" and context_parallel={context_parallel} do" if context_parallel > 1 else " does"
            raise SettingsError(f"tensor_parallel={tensor_parallel}{others} not divide the {self.world_size} processes")
        if self.world_size == 1:
            return self
        data, kind = self.world_size // (tensor_parallel * context_parallel), self.device.type
        mesh = init_device_mesh(kind, (data * context_parallel, tensor_parallel), mesh_dim_names=("data", "tensor"))
        shared = None
        if context_parallel > 1:
            sizes, names = (data, context_parallel, tensor_parallel), ("batch", "context", "tensor")
            shared = init_device_mesh(kind, sizes, mesh_dim_names=names)["context"]
        return replace(
            self, mesh=mesh, dp_rank=mesh.get_local_rank("data") // context_parallel, dp_size=data,
            tp_size=tensor_parallel, cp_mesh=shared,
        )  # fmt: skip

    def reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes with different samples or parts of samples."""
        if self.num_replicas > 1 and self.mesh is not None:
            value = value.clone()
            dist.all_reduce(value, group=self.mesh.get_group("data"))
        return value

    def reduce_norm(self, norm: Tensor) -> Tensor:
        """Return norms over all heads and positions, given those over this process's heads and positions."""
        if self.tp_size == self.cp_size == 1:
            return norm
        square = norm.square()
        if self.mesh is not None and self.tp_size > 1:
            dist.all_reduce(square, group=self.mesh.get_group("tensor"))
        if self.cp_mesh is not None:
            dist.all_reduce(square, group=self.cp_mesh.get_group())
        return square.sqrt()

    def reduce_statistics(self, statistics: Sequence[AttentionStatistics]) -> dict[str, float]:
        """Return means of row mass and sparsity over layers, heads and samples of all processes, and the largest logit.

        ``statistics`` are those of this process's layers and micro-batches, perhaps none. NaN is left out.
        """
        none, lowest = torch.zeros(0, device=self.device), torch.full((1,), -math.inf, device=self.device)
        sums = []
        for name in ("row_mass_mean", "hoyer_sparsity"):
            means = torch.cat([none, *(getattr(s, name).nanmean(1) for s in statistics)])  # (layers · samples,)
            sums += [means.nansum(), (~means.isnan()).sum().to(means.dtype)]
        total, largest = torch.stack(sums), torch.cat([lowest, *(s.max_logit.flatten() for s in statistics)]).max()
        if self.world_size > 1:
            dist.all_reduce(total)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        row_mass, sparsity = (total[0::2] / total[1::2]).tolist()
        return {"row_mass": row_mass, "hoyer_sparsity": sparsity, "max_logit": largest.item()}

    def reduce_max(self, value: int) -> int:
        """Return the largest value of all processes."""
        if self.world_size == 1:
            return value
        maximum = torch.tensor(float(value), device=self.device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return int(maximum.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank; they are pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def init_process_mesh() -> ProcessMesh:
    """Return the processes that torchrun started, or this process alone; initialise the process group if needed."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return ProcessMesh(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return ProcessMesh(dist.get_rank(), dist.get_world_size(), device)


def shutdown() -> None:
    """Destroy the process group, if it is initialised."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
