"""Sharing a run out over processes: started by torchrun, on PyTorch's own DDP, FSDP2 and tensor parallelism."""

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
class Processes:
    """Who takes part in a run, and which part this process has.

    Attributes:
        rank, count: of all processes. device: this one's.
        mesh: all processes, as (data, tensor); None for a single one. Those along "data" see different samples, or
            different parts of the same ones.
        data_rank, data_count: of the processes, or groups of them, that see different samples.
        tensor_count: processes that share each layer.
        context: the processes that share each sequence; None where none do.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    data_rank: int = 0
    data_count: int = 1
    tensor_count: int = 1
    context: DeviceMesh | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """This process's part of the data."""
        return self.data_rank, self.data_count

    @property
    def context_count(self) -> int:
        """Processes that share each sequence."""
        return 1 if self.context is None else self.context.size()

    @property
    def replicas(self) -> int:
        """Processes whose gradients are averaged: those with different samples or parts of them."""
        return self.data_count * self.context_count

    def arranged(self, tensor: int, context: int = 1) -> Processes:
        """The same processes, in groups of so many that share each layer, and so many that share each sequence.

        Raises:
            ValueError: if groups do not divide the processes.
        """
        if self.count % (tensor * context):
            both = f" and context_parallel={context} do" if context > 1 else " does"
            raise SettingsError(f"tensor_parallel={tensor}{both} not divide the {self.count} processes")
        if self.count == 1:
            return self
        data, kind = self.count // (tensor * context), self.device.type
        mesh = init_device_mesh(kind, (data * context, tensor), mesh_dim_names=("data", "tensor"))
        shared = None
        if context > 1:
            shared = init_device_mesh(kind, (data, context, tensor), mesh_dim_names=("batch", "context", "tensor"))
        return replace(
            self,
            mesh=mesh,
            data_rank=mesh.get_local_rank("data") // context,
            data_count=data,
            tensor_count=tensor,
            context=None if shared is None else shared["context"],
        )

    def sum(self, value: Tensor) -> Tensor:
        """Over the processes with different samples or parts of them."""
        if self.replicas > 1 and self.mesh is not None:
            value = value.clone()
            dist.all_reduce(value, group=self.mesh.get_group("data"))
        return value

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Norms over all heads and positions, from those over this process's."""
        if self.tensor_count == self.context_count == 1:
            return norm
        square = norm.square()
        if self.mesh is not None and self.tensor_count > 1:
            dist.all_reduce(square, group=self.mesh.get_group("tensor"))
        if self.context is not None:
            dist.all_reduce(square, group=self.context.get_group())
        return square.sqrt()

    def statistics(self, found: Sequence[AttentionStatistics]) -> dict[str, float]:
        """Of attention layers' weights, over all processes: means over heads and samples, and the largest logit."""
        means = [
            torch.stack([getattr(s, n).float().mean() for s in found]) for n in ("row_mass_mean", "hoyer_sparsity")
        ]
        mean = torch.stack(means).mean(1)  # (2,)
        largest = torch.stack([s.max_logit.float().max() for s in found]).max()
        if self.count > 1:
            dist.all_reduce(mean)
            mean /= self.count
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {"row_mass": mean[0].item(), "hoyer_sparsity": mean[1].item(), "max_logit": largest.item()}

    def largest(self, value: int) -> int:
        """Return the largest value of all processes."""
        if self.count == 1:
            return value
        found = torch.tensor(float(value), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found.item())

    def wait(self) -> None:
        """For all processes."""
        if self.count > 1:
            dist.barrier()


def processes() -> Processes:
    """Who takes part: what torchrun says, or this process alone. Joins the others if that has not been done."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Processes(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def leave() -> None:
    """Part from the other processes, where this one joined them."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def distribute(module: nn.Module, processes: Processes, parallel: str, precision: str) -> nn.Module:
    """A module whose work the processes share.

    Args:
        module: the same on each process (same seed).
        processes: as ``arranged``.
        parallel: "ddp" or "fsdp", for the processes with different data.
        precision: "bfloat16" lets FSDP gather weights in it, gradients being added in float32.

    Raises:
        SettingsError: a ValueError, for something else, or if a model cannot be shared out that way.
    """
    if parallel not in ("ddp", "fsdp"):
        raise SettingsError(f'parallel must be "ddp" or "fsdp", got {parallel!r}')
    if processes.mesh is None:
        return module
    if processes.tensor_count > 1:
        _share_layers(module, processes.mesh["tensor"])
    if processes.replicas == 1:
        return module
    if parallel == "fsdp" or processes.tensor_count > 1:
        narrow = torch.bfloat16 if precision == "bfloat16" else None
        # inputs stay as they are: autocast narrows what products need, and the residual stream keeps float32
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in getattr(module, "blocks", []):
            fully_shard(block, mesh=processes.mesh["data"], mp_policy=policy)
        fully_shard(module, mesh=processes.mesh["data"], mp_policy=policy)
        return module
    return DistributedDataParallel(module, process_group=processes.mesh.get_group("data"))


def _share_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers that say how (``SPLIT``): attention by heads, feed-forward layers by their inner features."""
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    for part in list(module.modules()):
        split = getattr(part, "SPLIT", None)
        if split:
            keep_heads = getattr(part, "keep_heads", None)
            if keep_heads is not None:
                keep_heads(mesh.get_local_rank(), mesh.size())
            parallelize_module(part, mesh, {name: styles[way]() for name, way in split.items()})


def gradient_norm(module: nn.Module, processes: Processes) -> Tensor:
    """The norm of the whole gradient, which it completes first where processes share layers.

    A norm's scale within a shared attention layer has seen this process's heads only.
    """
    if processes.mesh is not None and processes.tensor_count > 1:
        group = processes.mesh.get_group("tensor")
        for part in module.modules():
            split: Any = getattr(part, "SPLIT", ())
            if split and hasattr(part, "keep_heads"):
                for name, parameter in part.named_parameters():
                    if name.split(".")[0] not in split and parameter.grad is not None:
                        dist.all_reduce(local(parameter.grad), group=group)
    groups: dict[Any, list[Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    if not groups:
        return torch.zeros((), device=processes.device)
    norms = [torch.nn.utils.get_total_norm(g) for g in groups.values()]
    norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_gradient(module: nn.Module, largest: float, norm: Tensor) -> None:
    """Scale the gradient down to a largest norm."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    if not any(isinstance(g, DTensor) for g in gradients):
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), largest, norm)
        return
    factor = largest / (norm.item() + 1e-6)
    for g in gradients:
        if factor < 1:
            g.mul_(factor)


def local(t: Tensor) -> Tensor:
    """Return this process's part of a tensor that processes may share."""
    return t.to_local() if isinstance(t, DTensor) else t


@contextmanager
def synchronised(module: nn.Module, now: bool) -> Iterator[None]:
    """Within, whether a backward pass adds gradients over the processes: at the last of several micro-batches."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
    with module.no_sync() if isinstance(module, DistributedDataParallel) and not now else nullcontext():
        yield


def unwrap(module: nn.Module) -> nn.Module:
    """The module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """All weights, on the CPU of the first process (which all processes must ask for together)."""
    if not (dist.is_available() and dist.is_initialized()):
        return module.state_dict()
    state: Any = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole: dict[str, Tensor] = state
    return whole


def load_whole_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load all weights, which every process passes, into a module that processes may share."""
    if dist.is_available() and dist.is_initialized():
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)
