"""``nn.MultiheadAttention`` and ``F.multi_head_attention_forward`` with sigmoid attention."""

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.bias import AttentionBias
from sigattn.nn.observer import CallObserver
from sigattn.nn.visible_keys import evaluate_bias, join_masks
from sigattn.ops import reference
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.custom_ops import record_module
from sigattn.ops.mask import refuse_subclass
from sigattn.ops.problem import Problem, make_problem


class UnfusedMultihead(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` without PyTorch's fused encoder layer, which computes a softmax."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, which disables the fused layer, but for the initialisation and peft, which adapts only such layers."""
        if torch.compiler.is_compiling():
            return False
        caller = sys._getframe(1)
        if caller.f_code is nn.MultiheadAttention._reset_parameters.__code__:
            return self.in_proj_weight is not None
        from_peft = str(caller.f_globals.get("__name__", "")).startswith("peft.")
        return from_peft and caller.f_code.co_name != "_qkv_same_embed_dim"


class SigmoidMultiheadAttention(UnfusedMultihead):
    """``nn.MultiheadAttention`` with sigmoid attention: the same parameters, arguments and results.

    A ``sigmoid_bias`` of None is -log of the number of keys that at least one query of a sample sees: padding, in
    ``key_padding_mask`` or in ``attn_mask``, is not counted. With ``sigmoid_normalize`` the weights of each query are
    divided by their sum; without it ``add_zero_attn`` changes nothing, because a value of zero adds nothing to a sum.
    Weights that are returned are those before dropout.
    """

    sigmoid_bias: AttentionBias | None
    sigmoid_normalize: bool = False

    def attention_settings(self) -> tuple[Any, bool]:
        return self.sigmoid_bias, self.sigmoid_normalize

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
        return ", ".join(filter(None, (sizes, describe_settings(self))))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return output and weights as ``nn.MultiheadAttention.forward`` does."""
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        node = record_module(self, (query, key, value, *options), {})
        if node is not None:
            return node
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("SigmoidMultiheadAttention takes no nested tensors: pad them, and pass key_padding_mask")
        swap = self.batch_first and query.dim() == 3
        if swap:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        out, weights = multi_head_attention_forward(
            *self.attention_settings(), query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight,
            self.in_proj_bias, self.bias_k, self.bias_v, self.add_zero_attn, self.dropout, self.out_proj.weight,
            self.out_proj.bias, training=self.training, key_padding_mask=key_padding_mask, need_weights=need_weights,
            attn_mask=attn_mask, q_proj_weight=self.q_proj_weight, k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight, average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip
        return out.transpose(0, 1) if swap else out, weights


def describe_settings(layer: Any) -> str:
    """Return the settings of a converted layer's attention that no submodule shows."""
    rule = "sigmoid_bias=None (-log of the visible keys)" if getattr(layer, "sigmoid_bias", "") is None else ""
    return ", ".join(filter(None, (rule, "sigmoid_normalize=True" if layer.sigmoid_normalize else "")))


def multi_head_attention_forward(
    sigmoid_bias: AttentionBias | CallObserver | None, normalize: bool, query: Tensor, key: Tensor, value: Tensor,
    embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None, in_proj_bias: Tensor | None,
    bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
    out_proj_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None, static_v: Tensor | None = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute ``F.multi_head_attention_forward`` with sigmoid attention.

    Inputs are (N, B, E) and (M, B, E), or (N, E) and (M, E), as in PyTorch. The separate projections are used if
    ``in_proj_weight`` is None, too. A ``sigmoid_bias`` of None is -log of each sample's visible keys, 6 less with
    ``normalize``, which divides the weights of each query by their sum.

    Raises:
        ValueError: for ``static_k`` and ``static_v``, inputs of another embed_dim than ``embed_dim_to_check``, masks of
            shapes that PyTorch refuses, or ``is_causal`` without the mask that it describes.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("sigmoid_bias", "normalize")}
    if static_k is not None or static_v is not None:
        raise ValueError("sigmoid multi_head_attention_forward does not support static_k and static_v; pass None")
    if is_causal and attn_mask is None:
        raise ValueError("multi_head_attention_forward: is_causal only says that attn_mask is causal: pass attn_mask")
    if query.shape[-1] != embed_dim_to_check:
        raise ValueError(f"expected a query of embed_dim {embed_dim_to_check}, got {tuple(query.shape)}")
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    query, key, value = (t.transpose(0, 1) for t in (query, key, value))  # (B, N or M, E)
    is_separate = in_proj_weight is None or (use_separate_proj_weight and q_proj_weight is not None)
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = weights if is_separate or in_proj_weight is None else in_proj_weight.chunk(3)
    biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([t, b.expand(t.shape[0], 1, -1)], 1) for t, b in ((k, bias_k), (v, bias_v)))
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, N or M, D)
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        refuse_subclass("multi_head_attention_forward", name, mask)
    _check_masks(attn_mask, key_padding_mask, (key.shape[0], num_heads, q.shape[2], key.shape[1]))
    has_zero_key = add_zero_attn and normalize
    if has_zero_key:  # whose weight counts in the sum
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    mask = _joined(attn_mask, key_padding_mask, q, k.shape[2])
    if isinstance(sigmoid_bias, CallObserver):
        softmax = {**arguments, "use_separate_proj_weight": is_separate}
        return sigmoid_bias.answer(  # no lambda, whose variables torch.compile does not find in locals()
            *(q, k, v, mask),
            softmax=functools.partial(F.multi_head_attention_forward, **softmax),
            normalized=functools.partial(multi_head_attention_forward, normalize=True, **arguments),
        )
    # the learned key and that of zeros follow the causal ones
    masked_otherwise = key_padding_mask is not None or bias_k is not None or has_zero_key
    causal = is_causal and attn_mask is not None and not masked_otherwise and not need_weights
    options: dict[str, Any] = {
        "attn_mask": None if causal else mask,  # is_causal is faster than the same mask as a tensor
        "is_causal": causal,
        "bias": evaluate_bias(sigmoid_bias, q, k, mask, normalize=normalize),
        "normalize": normalize,
    }
    out = sigmoid_attention(q, k, v, dropout_p=dropout_p if training else 0.0, **options)
    result = F.linear(out.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)  # (N, B, E)
    attention_weights = None
    if need_weights:
        attention_weights = reference.attention_weights(make_problem(Problem, q, k, v, **options)).to(q.dtype)
        attention_weights = attention_weights.mean(1) if average_attn_weights else attention_weights
        attention_weights = attention_weights.squeeze(0) if unbatched else attention_weights
    return result.squeeze(1) if unbatched else result, attention_weights


def _check_masks(attn_mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int, int, int]) -> None:
    """Raise ValueError for masks that PyTorch refuses, given batch size, heads, queries and keys."""
    batch, heads, n, m = sizes
    allowed = [(n, m), (batch * heads, n, m)]
    # with the shape of as many dimensions only, because comparing symbolic sizes adds a guard
    if attn_mask is not None and not any(tuple(attn_mask.shape) == s for s in allowed if len(s) == attn_mask.dim()):
        raise ValueError(
            f"multi_head_attention_forward: attn_mask must be (queries, keys) = {allowed[0]} or (batch · heads, "
            f"queries, keys) = {allowed[1]}, got {tuple(attn_mask.shape)}"
        )
    if padding is not None and tuple(padding.shape) != (batch, m):
        raise ValueError(
            f"multi_head_attention_forward: key_padding_mask must be (batch, keys) = {(batch, m)}, or (keys,) without "
            f"a batch, got {tuple(padding.shape)}"
        )


def _joined(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
    """Join both masks of ``nn.MultiheadAttention`` (True = hidden, or added) to one of ``sigmoid_attention``."""
    parts = []
    if attn_mask is not None:
        parts.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (q.shape[0], -1)))
    if padding is not None:
        parts.append(padding[:, None, None, :])
    parts = [F.pad(p, (0, keys - p.shape[-1])) for p in parts]  # every query sees the learned key
    mask = join_masks(*(~p if p.dtype is torch.bool else p for p in parts))
    return mask if mask is None or mask.dtype is torch.bool else mask.to(q.dtype)
