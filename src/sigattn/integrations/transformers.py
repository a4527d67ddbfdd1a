"""Sigmoid attention in Hugging Face's transformers: ``attn_implementation="sigmoid"``.

    from sigattn.integrations import transformers as sigmoid
    sigmoid.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid")

The bias b is ``config.sigmoid_bias``: a number, or "log_visible", -log of the number of keys that each query sees,
which is -log n in an encoder and does not change as a cache grows. A configuration without it gets the one
``register`` was told.

A saved model is loaded as sigmoid attention again (see ``transformers_saving``). Models that accept the argument
and never look at it (Bloom, MPT, Falcon: they compute their softmax themselves) are refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sigattn.integrations.transformers_saving import LOG_VISIBLE, NAME, Bias, checked_bias, register_saved
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.problem import log_length_bias

__all__ = ["LOG_VISIBLE", "NAME", "Bias", "attention", "check", "register"]

_default: Bias = LOG_VISIBLE


def register(bias: Bias = LOG_VISIBLE) -> None:
    """Make ``attn_implementation="sigmoid"`` known, and saved with the models that use it.

    Args:
        bias: where a configuration has no ``sigmoid_bias``: a number, or "log_visible".

    Raises:
        ValueError: for another bias.
    """
    global _default
    _default = checked_bias(bias)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    own = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(own, "sigattn"):
        PreTrainedModel.get_correct_attn_implementation = _refusing(own)
    register_saved(_default)


def _refusing(own: Any) -> Any:
    """The same question to a model, refused where it would nod and stay a softmax."""

    @functools.wraps(own)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *more: Any, **named: Any) -> str:
        if requested_attention == NAME and not type(self)._can_set_attn_implementation():
            raise ValueError(
                f"{type(self).__name__} does not use transformers' attention interface: with "
                f'attn_implementation="{NAME}" it would silently stay a softmax. Take another model, or '
                "sigattn.models.LanguageModel"
            )
        found: str = own(self, requested_attention, *more, **named)
        return found

    get_correct_attn_implementation.sigattn = True  # type: ignore[attr-defined]
    return get_correct_attn_implementation


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: (B, Hq, N, D), (B, Hkv, M, D), (B, Hkv, M, Dv) → (B, N, Hq, Dv), and no weights.

    Raises:
        ValueError: for what has no meaning here (logit caps, attention sinks, weights asked for, paged caches).
    """
    _refuse(module, kwargs)
    for watch in _watching:
        watch.calls += 1
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # the prefill of an empty static cache: the rest is not there yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias if mask is None else position_bias.masked_fill(~mask, -torch.inf)
    out = sigmoid_attention(
        query,
        key,
        value,
        mask,
        dropout,
        causal,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        bias=_bias(module, query, key, attention_mask, causal),
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    meaningless = {
        "softcap": "a cap of logits",
        "s_aux": "attention sinks",
        "output_attentions": "weights: they are never formed",
        "cache": "a paged cache of continuous batching",
    }
    for name, what in meaningless.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f'{type(module).__name__} with attn_implementation="{NAME}" cannot have {what} ({name})')


def _bias(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> float | Tensor:
    """A number, or (B or 1, 1 or Hq, N, 1)."""
    config: Any = getattr(module, "config", None)
    bias = checked_bias(getattr(config, "sigmoid_bias", _default))
    if not isinstance(bias, str):
        return float(bias)
    if mask is not None:
        seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
        visible = seen.sum(-1, keepdim=True).clamp(min=1)
        return log_length_bias(visible.expand(*visible.shape[:2], query.shape[2], 1))
    if causal:
        return log_length_bias(torch.arange(1, query.shape[2] + 1, device=query.device)).unsqueeze(-1)
    return log_length_bias(key.shape[2])


# -- is it really a sigmoid? ------------------------------------------------------------------------------------------


def check(model: nn.Module, **inputs: Any) -> int:
    """Run a model once and see that no attention is a softmax any more.

    Args:
        model: any. inputs: of its forward.

    Returns:
        How often sigmoid attention was called.

    Raises:
        ValueError: naming the layers that computed a softmax, or if sigmoid attention was never called.
    """
    running: list[str] = []
    watch = _Watch(running)

    def enter(name: str) -> Any:
        def hook(*_: Any) -> None:
            running.append(name)

        return hook

    def leave(*_: Any) -> None:
        running.pop()

    hooks = [m.register_forward_pre_hook(enter(n)) for n, m in model.named_modules()]
    hooks += [m.register_forward_hook(leave, always_call=True) for m in model.modules()]
    training = model.training
    model.eval()
    _watching.append(watch)
    try:
        with torch.no_grad(), watch:
            model(**inputs)
    finally:
        _watching.remove(watch)
        model.train(training)
        for hook in hooks:
            hook.remove()
    if watch.softmax:
        raise ValueError(
            f"these layers of {type(model).__name__} compute a softmax: {', '.join(sorted(watch.softmax))}"
        )
    if not watch.calls:
        raise ValueError(f"{type(model).__name__} never called sigmoid attention")
    return watch.calls


_watching: list[_Watch] = []


class _Watch(TorchFunctionMode):
    """Counts calls of the operator, and notes attention layers that compute a softmax."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running, self.calls = running, 0
        self.softmax: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention or (
            name in ("softmax", "_softmax") and "att" in self._here().lower()
        ):
            self.softmax.add(self._here())
        return func(*args, **(kwargs or {}))

    def _here(self) -> str:
        return self.running[-1] if self.running else ""
