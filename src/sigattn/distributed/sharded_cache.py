"""Decoding with a cache of keys and values that several processes share: each has some of the positions.

Every process attends to what it has, and the outputs are added: one all-reduce, no rescaling (Sect. 4; a softmax would
have to exchange its row statistics as well).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sigattn.distributed import exchange
from sigattn.ops import cached, checks, flash_checks
from sigattn.ops.attention import bias_operand, sides, two_sided
from sigattn.ops.cached import CachedProblem
from sigattn.ops.settings import is_fast

_NAME = "sharded_cache_attention"


def sharded_cache_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    mesh: DeviceMesh,
    cache_seqlens: Tensor,
    sigmoid_bias: float | Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """``sigattn.flash.flash_attn_with_kvcache`` whose cache is shared out over the processes of a mesh.

    All processes call it together with the same arguments, but for the caches: process r has places r·C … (r + 1)·C - 1
    of each sample. New keys and values are written by whose place it is.

    Args:
        q: (B, N, Hq, D), the same on all processes.
        k_cache: (B, C, Hkv, D), C the same on all processes. v_cache: (B, C, Hkv, Dv).
        k, v: (B, N_new, Hkv, D) and (B, N_new, Hkv, Dv), the same on all processes; or None.
        mesh: one-dimensional.
        cache_seqlens: (B,) integers, how many keys each sample has over all processes, before the new ones.
        sigmoid_bias: a number, or a tensor: 0-d, (B,) or (B or 1, Hq or 1). What the model was trained with.
        softmax_scale, causal, window_size, alibi_slopes, softcap, backend: as there.

    Returns:
        (B, N, Hq, Dv), the same on all processes; added in float32.

    Raises:
        ValueError, TypeError: as there. RuntimeError: if a process is gone, or the group's timeout is over.
    """
    flash_checks.cache(_NAME, q, k_cache, v_cache, k, v, None, None)
    flash_checks.of_samples(_NAME, "cache_seqlens", cache_seqlens, q)
    flash_checks.bias(_NAME, sigmoid_bias, q, len(q))
    _, softmax_scale, window = checks.numbers(_NAME, 0.0, softmax_scale, window_size)
    softcap = checks.softcap(softcap, _NAME)
    checks.choice("backend", backend, tuple(cached.KERNELS), _NAME)
    if alibi_slopes is not None:
        flash_checks.slopes(_NAME, alibi_slopes, q, len(q))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k_cache, v_cache, k, v)):
        raise RuntimeError(f"{_NAME} has no gradient: call it under torch.no_grad() or torch.inference_mode()")
    capacity, rank, new = k_cache.shape[1], mesh.get_local_rank(), 0 if k is None else k.shape[1]
    cached.check_places(cache_seqlens, None, None, len(k_cache), capacity * mesh.size())
    cached.check_places(cache_seqlens + new, None, None, len(k_cache), capacity * mesh.size())
    start = rank * capacity
    if k is not None and v is not None:
        for i in range(new):  # one by one: two might be told to leave the same place as it is
            _write(k_cache, v_cache, k[:, i], v[:, i], cache_seqlens.long() + i - start)
    ends = cache_seqlens + new - start  # of each sample, from this process's first place on
    left, right = sides(window, causal)
    problem = CachedProblem(
        q,
        k_cache,
        v_cache,
        ends.clamp(0, capacity),
        _bias(sigmoid_bias, q.device),
        None,
        None,
        None if alibi_slopes is None else two_sided(alibi_slopes),
        softmax_scale,
        left,
        right,
        is_fast(None),
        0,
        ends,
        softcap,
    )
    out = cached.call(problem, cached.choose(problem, backend)).to(torch.promote_types(q.dtype, torch.float32))
    exchange.count(out)
    dist.all_reduce(out, group=mesh.get_group())
    return out.to(q.dtype)


def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, place: Tensor) -> None:
    """(B, Hkv, ·) at each sample's place, where that is this process's; no value is read that the host waits for."""
    sample, slot = torch.arange(len(k), device=k.device), place.clamp(0, k_cache.shape[1] - 1)
    own = (place == slot)[:, None, None]
    for cache, t in ((k_cache, k), (v_cache, v)):
        cache[sample, slot] = torch.where(own, t, cache[sample, slot])


def _bias(bias: float | Tensor, device: torch.device) -> Tensor:
    """0-d for a number, or (B or 1, Hq or 1, 1)."""
    if not isinstance(bias, Tensor):
        number = bias_operand(bias, device, 3)
        assert number is not None
        return number
    return bias.reshape(1, 1, 1) if bias.dim() == 0 else bias.reshape(len(bias), -1, 1)
