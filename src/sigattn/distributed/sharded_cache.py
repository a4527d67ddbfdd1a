"""Decoding with a key/value cache whose positions are sharded over processes.

Every process attends to its own positions, and one all-reduce adds the outputs without rescaling (Sect. 4). With
``normalize``, as with softmax attention, the levels of the rows are exchanged first.
"""

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sigattn.flash import validation as flash_validation
from sigattn.ops import validation
from sigattn.ops.kvcache import KV_CACHE, check_cache_bounds
from sigattn.ops.problem import KVCacheProblem, make_problem

_NAME = "sharded_cache_attention"


def sharded_cache_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, mesh: DeviceMesh,
    cache_seqlens: Tensor, sigmoid_bias: float | Tensor, softmax_scale: float | None = None, causal: bool = True,
    window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None, softcap: float = 0.0,
    normalize: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``sigattn.flash.flash_attn_with_kvcache`` with a cache that is sharded over the processes of a mesh.

    This is a collective: all processes call it with the same arguments, except for the caches. Process r holds
    positions r·C … (r + 1)·C - 1 of each sample; the process that holds a new key's position writes it.

    Args:
        q: (B, N, Hq, D), the same on all processes.
        k_cache: (B, C, Hkv, D), C the same on all processes. v_cache: (B, C, Hkv, Dv).
        k, v: (B, N_new, Hkv, D) and (B, N_new, Hkv, Dv), the same on all processes; or None.
        mesh: one-dimensional mesh of the processes.
        cache_seqlens: (B,) integers, number of keys of each sample over all processes, before the new ones.
        sigmoid_bias: a number, or a tensor: 0-d, (B,) or (B or 1, Hq or 1); the bias that the model was trained with.
        softmax_scale, causal, window_size, alibi_slopes, softcap, normalize, backend: as in
            ``flash_attn_with_kvcache``; with normalize not "reference".

    Returns:
        Attention output, (B, N, Hq, Dv), the same on all processes; summed in float32.

    Raises:
        ValueError, TypeError: as in ``flash_attn_with_kvcache``.
        RuntimeError: if a tensor requires a gradient, a process has ended, or the group's timeout has expired.
    """
    flash_validation.cache(_NAME, q, k_cache, v_cache, k, v, None, None)
    batch = q.shape[0]
    validation.integers(_NAME, "cache_seqlens", cache_seqlens, (batch,), "(B,)", q.device)
    flash_validation.bias(_NAME, sigmoid_bias, q, batch)  # required
    options = flash_validation.options(
        _NAME, q, batch, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, sigmoid_bias, None,
        backend, normalize,
    )  # fmt: skip
    validation.refuse_gradients(_NAME, q, k_cache, v_cache, k, v)
    capacity, rank, new = k_cache.shape[1], mesh.get_local_rank(), 0 if k is None else k.shape[1]
    for seqlens in (cache_seqlens, cache_seqlens + new):
        check_cache_bounds(_NAME, seqlens, None, None, k_cache.shape[0], capacity * mesh.size())
    start = rank * capacity
    ends = cache_seqlens + new - start  # end of each sample, relative to this process's first position
    seqlens = ends.clamp(0, capacity)
    problem = make_problem(KVCacheProblem, q, k_cache, v_cache, seqlens=seqlens, query_ends=ends, **options)
    if normalize and KV_CACHE.choose(problem, backend) == "reference":
        raise ValueError(f"{_NAME}: backend 'reference' does not support normalize=True here: pass another or None")
    if k is not None and v is not None:
        for i in range(new):  # one at a time, because several positions of other processes clamp to the same slot
            _write(k_cache, v_cache, k[:, i], v[:, i], cache_seqlens.long() + i - start)
    group, wide = mesh.get_group(), torch.promote_types(q.dtype, torch.float32)
    if not normalize:
        out = KV_CACHE(problem, backend).to(wide)
        dist.all_reduce(out, group=group)
        return out.to(q.dtype)
    result = KV_CACHE.forward(problem, backend)
    sums, lifts = result.row_sums.unbind(-1)
    lift = torch.where(sums == 0, torch.inf, lifts)  # as ``add_parts``
    dist.all_reduce(lift, dist.ReduceOp.MIN, group=group)
    shares = torch.where(sums == 0, 0, sums * torch.exp(lift - lifts)).unsqueeze(-1)
    total = torch.cat([result.out * shares, shares], -1)
    dist.all_reduce(total, group=group)
    out, weights = total[..., :-1], total[..., -1:]
    return torch.where(weights == 0, 0, out / weights).to(q.dtype)


def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor) -> None:
    """Write k and v (B, Hkv, ·) at each sample's position if this process holds it, without synchronising."""
    sample, slot = torch.arange(k.shape[0], device=k.device), position.clamp(0, k_cache.shape[1] - 1)
    is_local = (position == slot)[:, None, None]
    for cache, t in ((k_cache, k), (v_cache, v)):
        cache[sample, slot] = torch.where(is_local, t, cache[sample, slot])
