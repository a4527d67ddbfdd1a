"""Distribution of a model over processes with PyTorch's DDP, FSDP2 and tensor parallelism.

FSDP and ``torch.distributed.tensor`` take a second to import: functions that need them import them where a model is
distributed, so that commands of one process do not wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sigattn.distributed.process_mesh import ProcessMesh
from sigattn.validation import SettingsError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def distribute(module: nn.Module, processes: ProcessMesh, parallel: str, precision: str) -> nn.Module:
    """Return a module that is parallelised over the processes, with the same parameters on each before (same seed).

    Args:
        parallel: "ddp" or "fsdp", for the processes with different data. Tensor parallelism always uses FSDP.
        precision: "bfloat16" makes FSDP gather weights in it, except those of layers with ``full_precision``. Gradients
            are summed in float32.

    Raises:
        SettingsError: for another value of parallel, or if a layer cannot be split over so many processes.
    """
    if parallel not in ("ddp", "fsdp"):
        raise SettingsError(f'parallel must be "ddp" or "fsdp", got {parallel!r}')
    if processes.mesh is None:
        return module
    if processes.tp_size > 1:
        try:
            _apply_tensor_parallelism(module, processes.mesh["tensor"])
        except ValueError as error:
            raise SettingsError(f"tensor_parallel={processes.tp_size} is not possible: {error}") from error
    if processes.num_replicas == 1:
        return module
    if parallel == "fsdp" or processes.tp_size > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        narrow = torch.bfloat16 if precision == "bfloat16" else None
        # inputs are not cast: autocast casts the operands of products, and the residual stream stays in float32
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if narrow is not None:
            full = replace(policy, param_dtype=None)
            for layer in module.modules():
                if getattr(layer, "full_precision", False) and next(layer.parameters(), None) is not None:
                    # gathered until the backward pass, because ``scaled`` uses parameters after the forward
                    fully_shard(layer, mesh=processes.mesh["data"], mp_policy=full, reshard_after_forward=False)
        for block in getattr(module, "blocks", []):
            fully_shard(block, mesh=processes.mesh["data"], mp_policy=policy)
        fully_shard(module, mesh=processes.mesh["data"], mp_policy=policy)
        return module
    return DistributedDataParallel(module, process_group=processes.mesh.get_group("data"))


def _apply_tensor_parallelism(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers that have a ``tp_plan``: attention by heads, feed-forward layers by their hidden features."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    for layer in list(module.modules()):
        split = getattr(layer, "tp_plan", None)
        if split:
            shard_heads = getattr(layer, "shard_heads", None)
            if shard_heads is not None:
                shard_heads(mesh.get_local_rank(), mesh.size())
            for name, way in split.items():
                linear: Any = layer.get_submodule(name)
                features = linear.out_features if way == "columns" else linear.in_features
                if features % mesh.size():
                    raise ValueError(f"{features} hidden features do not divide among {mesh.size()} processes")
            parallelize_module(layer, mesh, {name: styles[way]() for name, way in split.items()})


def total_grad_norm(module: nn.Module, processes: ProcessMesh) -> Tensor:
    """Return the norm of the whole gradient, after summing the gradients that tensor parallelism left partial.

    The gradient of a QK-norm's scale in a split attention layer is partial: it comes from this process's heads only.
    """
    if processes.mesh is not None and processes.tp_size > 1:
        group = processes.mesh.get_group("tensor")
        for layer in module.modules():
            split: Any = getattr(layer, "tp_plan", ())
            if split and hasattr(layer, "shard_heads"):
                for name, parameter in layer.named_parameters():
                    if name.split(".")[0] not in split and parameter.grad is not None:
                        dist.all_reduce(to_local(parameter.grad), group=group)
    groups: dict[Any, list[Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    if not groups:
        return torch.zeros((), device=processes.device)
    norms = [torch.nn.utils.get_total_norm(g) for g in groups.values()]
    norms = [n.full_tensor() if _is_dtensor(n) else n for n in norms]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_grad_norm(module: nn.Module, max_norm: float, norm: Tensor) -> None:
    """Scale the gradient, whose norm is ``norm``, down to a norm of ``max_norm``."""
    gradients = [to_local(p.grad) for p in module.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def to_local(t: Tensor) -> Tensor:
    """Return the local part of a ``DTensor``, and any other tensor as it is."""
    return t.to_local() if _is_dtensor(t) else t


def _is_dtensor(t: Tensor) -> TypeGuard["DTensor"]:
    return hasattr(t, "device_mesh")


@contextmanager
def gradient_sync(module: nn.Module, now: bool) -> Iterator[None]:
    """Reduce the gradients over the processes in backward passes within the context only if ``now`` is True."""
    set_sync = getattr(module, "set_requires_gradient_sync", None)  # a method of FSDP's modules
    if set_sync is not None:
        set_sync(now)
    with module.no_sync() if isinstance(module, DistributedDataParallel) and not now else nullcontext():
        yield


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a ``DistributedDataParallel``, and any other module as it is."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return all weights, on the CPU of the main process. This is a collective: all processes must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(module, options=options))


def load_full_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Load all weights into a module that may be sharded; every process passes all of them."""
    if dist.is_available() and dist.is_initialized():
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)
