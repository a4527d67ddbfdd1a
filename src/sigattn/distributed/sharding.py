"""Distributed training of a model with torchrun, on PyTorch's DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

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

    def with_mesh(self, tensor_parallel: int, context_parallel: int = 1) -> ProcessMesh:
        """Return the processes with meshes for tensor and context parallelism.

        Args:
            tensor_parallel: number of processes that share each layer.
            context_parallel: number of processes that share each sequence.

        Raises:
            SettingsError: a ValueError, if their product does not divide the number of processes.
        """
        if self.world_size % (tensor_parallel * context_parallel):
            both = f" and context_parallel={context_parallel} do" if context_parallel > 1 else " does"
            raise SettingsError(f"tensor_parallel={tensor_parallel}{both} not divide the {self.world_size} processes")
        if self.world_size == 1:
            return self
        data, kind = self.world_size // (tensor_parallel * context_parallel), self.device.type
        mesh = init_device_mesh(kind, (data * context_parallel, tensor_parallel), mesh_dim_names=("data", "tensor"))
        shared = None
        if context_parallel > 1:
            shared = init_device_mesh(
                kind, (data, context_parallel, tensor_parallel), mesh_dim_names=("batch", "context", "tensor")
            )
        return replace(
            self,
            mesh=mesh,
            dp_rank=mesh.get_local_rank("data") // context_parallel,
            dp_size=data,
            tp_size=tensor_parallel,
            cp_mesh=None if shared is None else shared["context"],
        )

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

    def reduce_statistics(self, layers: Sequence[AttentionStatistics]) -> dict[str, float]:
        """Return means of row mass and sparsity over layers, heads, samples and processes, and the largest logit."""
        means = [
            torch.stack([getattr(s, n).float().mean() for s in layers]) for n in ("row_mass_mean", "hoyer_sparsity")
        ]
        mean = torch.stack(means).mean(1)  # (2,)
        largest = torch.stack([s.max_logit.float().max() for s in layers]).max()
        if self.world_size > 1:
            dist.all_reduce(mean)
            mean /= self.world_size
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {"row_mass": mean[0].item(), "hoyer_sparsity": mean[1].item(), "max_logit": largest.item()}

    def reduce_max(self, value: int) -> int:
        """Return the largest value of all processes."""
        if self.world_size == 1:
            return value
        maximum = torch.tensor(float(value), device=self.device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return int(maximum.item())

    def barrier(self) -> None:
        """Wait for all processes (barrier)."""
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


def distribute(module: nn.Module, processes: ProcessMesh, parallel: str, precision: str) -> nn.Module:
    """Return a module that is parallelised over the processes.

    Args:
        module: the model, with the same parameters on each process (same seed).
        processes: from ``ProcessMesh.with_mesh``.
        parallel: "ddp" or "fsdp", for the processes with different data. Tensor parallelism always uses FSDP.
        precision: "bfloat16" makes FSDP gather weights in it; gradients are summed in float32.

    Raises:
        SettingsError: a ValueError, for another value of parallel.
        ValueError: if a layer does not support tensor parallelism over so many processes.
    """
    if parallel not in ("ddp", "fsdp"):
        raise SettingsError(f'parallel must be "ddp" or "fsdp", got {parallel!r}')
    if processes.mesh is None:
        return module
    if processes.tp_size > 1:
        _apply_tensor_parallelism(module, processes.mesh["tensor"])
    if processes.num_replicas == 1:
        return module
    if parallel == "fsdp" or processes.tp_size > 1:
        narrow = torch.bfloat16 if precision == "bfloat16" else None
        # inputs are not cast: autocast casts the operands of products, and the residual stream stays in float32
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in getattr(module, "blocks", []):
            fully_shard(block, mesh=processes.mesh["data"], mp_policy=policy)
        fully_shard(module, mesh=processes.mesh["data"], mp_policy=policy)
        return module
    return DistributedDataParallel(module, process_group=processes.mesh.get_group("data"))


def _apply_tensor_parallelism(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers that have a ``tp_plan``: attention by heads, feed-forward layers by their hidden features."""
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    for part in list(module.modules()):
        split = getattr(part, "tp_plan", None)
        if split:
            shard_heads = getattr(part, "shard_heads", None)
            if shard_heads is not None:
                shard_heads(mesh.get_local_rank(), mesh.size())
            parallelize_module(part, mesh, {name: styles[way]() for name, way in split.items()})


def total_grad_norm(module: nn.Module, processes: ProcessMesh) -> Tensor:
    """Return the norm of the whole gradient, after summing the gradients that tensor parallelism left partial.

    The gradient of a QK-norm's scale in a split attention layer is partial: it comes from this process's heads only.
    """
    if processes.mesh is not None and processes.tp_size > 1:
        group = processes.mesh.get_group("tensor")
        for part in module.modules():
            split: Any = getattr(part, "tp_plan", ())
            if split and hasattr(part, "shard_heads"):
                for name, parameter in part.named_parameters():
                    if name.split(".")[0] not in split and parameter.grad is not None:
                        dist.all_reduce(to_local(parameter.grad), group=group)
    groups: dict[Any, list[Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    if not groups:
        return torch.zeros((), device=processes.device)
    norms = [torch.nn.utils.get_total_norm(g) for g in groups.values()]
    norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_grad_norm(module: nn.Module, max_norm: float, norm: Tensor) -> None:
    """Scale the gradient, whose norm is ``norm``, down to a norm of ``largest``."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if not any(isinstance(g, DTensor) for g in gradients):
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
        return
    factor = max_norm / (norm.item() + 1e-6)
    for g in gradients:
        if factor < 1:
            g.mul_(factor)


def to_local(t: Tensor) -> Tensor:
    """Return the local part of a ``DTensor``, and any other tensor as it is."""
    return t.to_local() if isinstance(t, DTensor) else t


@contextmanager
def gradient_sync(module: nn.Module, now: bool) -> Iterator[None]:
    """Reduce the gradients over the processes in backward passes within the context only if ``now`` is True."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
    with module.no_sync() if isinstance(module, DistributedDataParallel) and not now else nullcontext():
        yield


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a ``DistributedDataParallel``, and any other module as it is."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return all weights, on the CPU of the main process. This is a collective: all processes must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return module.state_dict()
    state: Any = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole: dict[str, Tensor] = state
    return whole


def load_full_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Load all weights into a module that may be sharded; every process passes all of them."""
    if dist.is_available() and dist.is_initialized():
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)
