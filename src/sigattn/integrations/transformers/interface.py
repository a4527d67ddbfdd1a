"""The attention function that ``attn_implementation="sigmoid"`` selects in transformers, and its registration."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from sigattn.integrations.transformers.check import KeptSoftmax
from sigattn.integrations.transformers.configured import error_of, follow_replaced_layers, layer_settings
from sigattn.integrations.transformers.mask import is_plain_causal, same_document, selected_keys, sigmoid_mask
from sigattn.integrations.transformers.saving import NAME, NORMALIZE, wrap_saving
from sigattn.integrations.transformers.selection import wrap_selection
from sigattn.nn.bias import AttentionBias
from sigattn.nn.observer import CallObserver
from sigattn.nn.visible_keys import evaluate_bias, join_masks
from sigattn.ops import reference
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.problem import Problem, make_problem

_SINKS = ("s_aux", "sinks")  # logits of an attention sink, which takes a part of each row's sum and has no value
# keywords that are supported, and those that transformers passes to attention and that do not change its result; masks
# alone hide keys, as in eager
_KNOWN = {
    "cu_seq_lens_q", "cu_seq_lens_k", "indices", *_SINKS,
    "cache_position", "deterministic", "grid_thw", "input_ids", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "seq_idx", "sliding_window", "tokenizer", "use_cache",
}  # fmt: skip


class Call(NamedTuple):
    """One call of attention, after its keywords were resolved; its options are those of ``sigmoid_attention``."""

    query: Tensor  # (B, Hq, N, D)
    key: Tensor  # (B, Hkv, M, D)
    value: Tensor  # (B, Hkv, M, Dv)
    mask: Tensor | None  # boolean (True = visible) or added to the logits, broadcastable to (B, Hq, N, M)
    causal: bool  # True if query i sees keys j ≤ i only; then mask is None
    dropout: float
    scale: float | None
    softcap: float

    def attend(self, bias: AttentionBias | float | CallObserver | KeptSoftmax, normalize: bool) -> Tensor:
        """Return the output, (B, Hq, N, Dv), for the settings of a layer (``layer_settings``)."""
        if isinstance(bias, KeptSoftmax):
            return self.softmax()
        if isinstance(bias, CallObserver):
            return bias.answer(
                self.query, self.key, self.value, self.mask, softmax=self.softmax,
                normalized=lambda b: self.attend(b, True), is_causal=self.causal, scale=self.scale,
                softcap=self.softcap,
            )  # fmt: skip
        options: dict[str, Any] = {"normalize": normalize, "is_causal": self.causal}
        b = bias if isinstance(bias, float) else evaluate_bias(bias, self.query, self.key, self.mask, **options)
        options |= {"dropout_p": self.dropout, "scale": self.scale, "softcap": self.softcap, "enable_gqa": True}
        return sigmoid_attention(self.query, self.key, self.value, self.mask, bias=b, **options)

    def softmax(self) -> Tensor:
        """Return the output of softmax attention, (B, Hq, N, Dv)."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        if not self.softcap:
            options: dict[str, Any] = {"is_causal": self.causal, "scale": self.scale, "enable_gqa": True}
            return F.scaled_dot_product_attention(query, key, value, mask, self.dropout, **options)
        problem = make_problem(
            Problem, query, key, value, attn_mask=mask, is_causal=self.causal, scale=self.scale, softcap=self.softcap
        )
        weights = reference.attention_weights(problem, "softmax")
        return reference.combine(problem, F.dropout(weights, self.dropout)).to(query.dtype)


def register() -> None:
    """Register ``attn_implementation="sigmoid"`` with transformers, as the import of the package does."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sigmoid_mask)
    follow_replaced_layers()
    wrap_selection()
    wrap_saving()


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
    softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute sigmoid attention for transformers; return the output, (B, N, Hq, Dv), and None instead of weights.

    Args:
        module: the layer. query: (B, Hq, N, D). key: (B, Hkv, M, D). value: (B, Hkv, M, Dv).
        attention_mask: boolean (True = visible), floating point (added to the logits), or None, which hides nothing.
        dropout: probability of dropping a weight. scaling: factor of the logits.
        is_causal: ignored if there is a mask, as in eager attention.
        position_bias: added to the logits.
        softcap: bound of the logits, softcap · tanh(logits / softcap), before mask and bias are added.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` separate several sequences in a row, and ``indices``, (B, N, any
            number), selects the visible keys. ``s_aux`` or ``sinks``, (Hq,) or (B, Hq, N, 1), are the logits of an
            attention sink: one more key that every query sees, with the value 0. Keywords that cannot change the result
            are ignored.

    Raises:
        ValueError: for any other keyword that is neither None nor False, naming module and keyword; or for a sink
            without ``config.sigmoid_normalize``, because it acts by the sum of a row only.
    """
    num_queries = query.shape[2]
    if unknown := [n for n, v in kwargs.items() if n not in _KNOWN and v is not None and v is not False]:
        raise error_of(module, f"{unknown[0]}: the keyword may change the result, and is not supported")
    if attention_mask is not None and not (attention_mask.dtype is torch.bool or attention_mask.is_floating_point()):
        raise error_of(module, f"a mask must be boolean or floating point, got {attention_mask.dtype}")
    if attention_mask is None and is_causal and num_queries > 1:
        raise error_of(module, "is_causal=True without a mask: eager attention would hide nothing, SDPA the future")
    causal = is_plain_causal(attention_mask) and num_queries > 1
    mask, limits = attention_mask, _visible_by_kwargs(module, query, key, kwargs)
    if causal and position_bias is None and limits is None:  # cut off a static cache's empty end
        mask, key, value = None, key[:, :, :num_queries], value[:, :, :num_queries]
    else:
        mask, causal = join_masks(position_bias, mask, limits), False
    scaling = float(scaling) if isinstance(scaling, int) else scaling  # 1 in Dia
    call = Call(query, key, value, mask, causal, dropout, scaling, softcap or 0.0)
    bias, normalize = layer_settings(module)
    if (name := next((n for n in _SINKS if kwargs.get(n) is not None), None)) is not None:
        if not normalize:
            raise error_of(module, f"{name}: an attention sink acts by the sum of a row: set config.{NORMALIZE} = True")
        call = _with_sink(call, kwargs[name])
    return call.attend(bias, normalize).transpose(1, 2).contiguous(), None


def _with_sink(call: Call, logits: Tensor) -> Call:
    """Return a call with one more key, which has these logits, (Hq,) or (B, Hq, N, 1), for every query, and value 0."""
    query, mask, num_keys = call.query, call.mask, call.key.shape[2]
    key, value = (F.pad(t, (0, 0, 0, 1)) for t in (call.key, call.value))
    shape = *query.shape[:3], num_keys
    if call.causal:
        mask = torch.ones(shape[2:], dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype is torch.bool:
        bias = query.new_zeros(shape, dtype=torch.promote_types(query.dtype, logits.dtype))
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    sink = (logits.view(-1, 1, 1) if logits.dim() == 1 else logits).expand(*shape[:3], 1)
    mask = torch.cat([mask.expand(shape), sink.to(mask.dtype)], -1)
    return call._replace(key=key, value=value, mask=mask, causal=False)


def _visible_by_kwargs(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the keys that the keywords make visible, boolean (B or 1, 1, N, M); None if there are no such keywords."""
    limits: Tensor | None = None
    cu_q, cu_k, indices = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"), kwargs.get("indices")
    if cu_q is not None or cu_k is not None:
        if cu_q is None or cu_k is None or query.shape[0] != 1:
            raise error_of(
                module, f"cu_seq_lens_q and cu_seq_lens_k are for a batch of one row, got shape {tuple(query.shape)}"
            )
        limits = same_document(cu_q, cu_k, query.shape[2], key.shape[2])
    return limits if indices is None else join_masks(limits, selected_keys(indices, key.shape[2]))
