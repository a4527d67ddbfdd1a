"""Sigmoid attention with the functions and arguments of flash-attn 2.8.

Change ``from flash_attn import flash_attn_func`` into ``from sigattn.flash import flash_attn_func``, and the weights
are σ(softmax_scale · Q Kᵀ + sigmoid_bias) instead of a softmax. Layouts are flash-attn's, (batch, length, heads,
head_dim) and packed (total, heads, head_dim). So is the alignment of causal masks, windows and ALiBi: the last query is
aligned with the last key. As in flash-attn, several query heads may share a key/value head.

Every function has five more arguments, after those of flash-attn:

- ``sigmoid_bias``: b. None is the paper's rule, -log n, where n is the number of keys of the sample or sequence (App.
  E), 6 less with ``normalize``; else a number, or a floating-point tensor, with gradient: 0-d, (B,) one per sample or
  sequence, or (B or 1, Hq or 1). (``flash_attn_with_kvcache`` has no default, because -log n would change as the cache
  grows. The default of the paper's own kernel is 0.)
- ``sigmoid_precision``: "accurate" or "fast"; None for the setting of ``sigattn.set_sigmoid_precision``.
- ``backend``: as in ``sigattn.sigmoid_attention``; None selects the fastest that supports the call.
- ``attn_mask``: a mask, bool or added to the logits, of the shape that each function documents; None for none.
- ``normalize``: True divides the weights of each row by their sum, as in ``sigattn.sigmoid_attention``.

``unpad_input``, ``pad_input`` and ``index_first_axis`` are those of ``flash_attn.bert_padding``.

``return_attn_probs=True`` is not supported, because a sigmoid has no log-sum-exp; see ``sigattn.attention_statistics``.
"""

from sigattn.flash.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from sigattn.flash.kvcache import flash_attn_with_kvcache
from sigattn.flash.padding import index_first_axis, pad_input, unpad_input
from sigattn.flash.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
    "index_first_axis", "pad_input", "unpad_input",
]  # fmt: skip
