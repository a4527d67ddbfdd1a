"""Attention masks for ``attn_implementation="sigmoid"`` in transformers.

transformers omits a causal mask if PyTorch's SDPA can be called with ``is_causal``, and then relies on
``module.is_causal``, which is wrong in models that do not support SDPA. The mask function here never omits one: a mask
of None hides nothing, as in transformers' eager attention. A plain causal mask is marked, so that it can be recognised
without reading its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

_MARK = "sigattn_causal"
ADDED = "_sigattn_added_masks"  # attribute of configurations: True if layers add their masks to the logits


def sigmoid_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return a boolean mask, (B, 1, N, M), True where a key is visible, or None if all keys are.

    It is one of numbers, as for transformers' eager attention, where a layer of the configuration adds it to logits.
    The arguments are those of ``transformers.masking_utils.sdpa_mask``. ``allow_is_causal_skip`` says that
    ``mask_function`` hides nothing beyond causality and a window (or chunk) of ``local_size`` keys. A plain causal mask
    is marked, see ``is_plain_causal``; it takes N·M bytes whatever the batch size.
    """
    arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if getattr(kwargs.get("config"), ADDED, False):
        return eager_mask(*arguments, local_size=local_size, **kwargs)
    # while tracing, values must not be read nor objects marked: torch.compile, torch.jit.trace, torch.export
    tracing = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    tracing = tracing or isinstance(attention_mask, torch._subclasses.FakeTensor)
    skippable = allow_is_causal_skip and not tracing and (local_size is None or kv_length < local_size)
    if skippable and isinstance(q_offset, int):
        if q_offset == kv_offset == 0 and _all_visible(attention_mask, 0, min(q_length, kv_length)):
            dense = torch.ones(q_length, kv_length, dtype=torch.bool, device=kwargs.get("device", "cpu")).tril()
            mask = dense.expand(batch_size, 1, q_length, kv_length)
            if not mask.is_inference():  # tensors of inference mode have no version, which detects a change in place
                setattr(mask, _MARK, mask._version)
            return mask
        last_query_only = q_length == 1 and q_offset + 1 == kv_offset + kv_length
        if last_query_only and _all_visible(attention_mask, kv_offset, kv_offset + kv_length):
            return None
    return sdpa_mask(*arguments, local_size=local_size, allow_is_causal_skip=False, **kwargs)


def is_plain_causal(mask: Tensor | None) -> bool:
    """Return True if ``mask`` is the marked result of ``sigmoid_mask``, not changed since: query i sees keys j ≤ i.

    Whatever a model computes from the mask is a new tensor without the mark; a change in place raises its version.
    """
    if mask is None or torch.compiler.is_compiling():
        return False
    version = getattr(mask, _MARK, None)  # not set in inference mode, where tensors have no version
    return version is not None and version == mask._version


def same_document(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, num_keys: int
) -> Tensor:  # (1, 1, N, M)
    """Return True where query and key belong to the same of several sequences that are concatenated in a row."""
    query, key = (
        torch.searchsorted(cu, torch.arange(n, device=cu.device, dtype=cu.dtype), right=True)
        for cu, n in ((cu_seqlens_q.contiguous(), num_queries), (cu_seqlens_k.contiguous(), num_keys))
    )
    return (query.unsqueeze(-1) == key).view(1, 1, num_queries, num_keys)


def selected_keys(indices: Tensor, num_keys: int) -> Tensor:  # (B, 1, N, M)
    """Return True at the keys that ``indices`` (B, N, any number) lists; negative entries are empty."""
    count = indices.new_zeros(*indices.shape[:-1], num_keys, dtype=torch.int32)
    count.scatter_add_(-1, indices.long().clamp(min=0), (indices >= 0).int())
    return count.gt(0).unsqueeze(1)


def _all_visible(attention_mask: Tensor | None, start: int, stop: int) -> bool:
    """Return True if no key from ``start`` to ``stop`` is padding; (B, M) masks are 0 at padding."""
    if attention_mask is None:
        return True
    return attention_mask.shape[-1] >= stop and bool(attention_mask[:, start:stop].all())
