"""Attention masks that are Tensor subclasses: PyTorch's ``CausalBias`` is supported, others raise TypeError."""

import sys
from typing import Any

import torch
from torch import Tensor


def resolve(
    caller: str, attn_mask: Any, is_causal: Any, window: Any, query: Any, key: Any, query_offset: Any = 0
) -> tuple[Any, Any, Any]:
    """Return attn_mask, is_causal and window, with a ``CausalBias`` for query (…, N, D) and key (…, M, D) replaced.

    It becomes ``is_causal``, a window or a bool mask. Its attributes define it; its memory is uninitialised.
    """
    if attn_mask is None or type(attn_mask) is Tensor or not isinstance(attn_mask, Tensor):
        return attn_mask, is_causal, window
    module = sys.modules.get("torch.nn.attention.bias")  # without it, no instance exists
    if module is None or not isinstance(attn_mask, module.CausalBias):
        refuse_subclass(caller, "attn_mask", attn_mask)
        return attn_mask, is_causal, window
    if min(getattr(t, "ndim", 0) for t in (query, key)) < 2:
        return None, is_causal, window  # later checks of query and key raise
    if query_offset:
        raise ValueError(
            f"{caller}: attn_mask is a CausalBias, which aligns queries and keys itself, with query_offset"
        )
    n, m = query.shape[-2], key.shape[-2]
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (n, m):
        made_for = f"{attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys"
        raise ValueError(f"{caller}: attn_mask is a CausalBias of {made_for}, but query and key have {n} and {m}")
    offset = m - n if attn_mask.variant.name == "LOWER_RIGHT" else 0
    if offset == 0:
        return None, True, window
    if offset > 0 and window is None:
        return None, is_causal, (-1, offset)
    return torch.ones(n, m, dtype=torch.bool, device=query.device).tril(offset), is_causal, window


def refuse_subclass(caller: str, name: str, t: Any) -> None:
    """Raise TypeError for a Tensor subclass that redefines operations, such as ``MaskedTensor``.

    Such a class overrides ``__torch_function__``, and its memory may not hold its values. Parameters, and the
    subclasses that trace or distribute (FakeTensor, DTensor and other wrappers), disable ``__torch_function__``.
    """
    if type(t) is Tensor or not isinstance(t, Tensor):  # torch.compile of PyTorch 2.11 cannot trace the rest
        return
    method: Any = type(t).__torch_function__
    plain = (torch._C._disabled_torch_function_impl, Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]
    if getattr(method, "__func__", method) not in plain:
        raise TypeError(
            f"{caller}: {name} is a {type(t).__module__}.{type(t).__qualname__}, a Tensor subclass that is not "
            "supported; pass a plain tensor"
        )
