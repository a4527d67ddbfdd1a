"""Sigmoid attention in the code of softmax models: references that share nothing with the library's operators."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class SigmoidReference(TorchFunctionMode):
    """Mode that computes sigmoid attention where layers call a softmax, or PyTorch's attention functions.

    Args:
        layers: the attention layers. Calls from elsewhere stay as they are.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers, self.calls = set(layers), 0

    def weights(self, logits: Tensor, *, written: bool) -> Tensor | None:
        """Return the weights that replace a softmax over the last dimension; None to keep it.

        Args:
            logits: logits, with the mask applied.
            written: the layer calls the softmax, not a function of PyTorch.
        """
        raise NotImplementedError

    def calling_layer(self) -> Any:
        """Return the attention layer whose code, or that of a layer in it, is running; or None."""
        layers = (frame.f_locals.get("self") for frame in calling_frames())
        return next((m for m in layers if isinstance(m, nn.Module) and m in self.layers), None)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute ``F.scaled_dot_product_attention`` with these weights."""
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        weights = self.weights(masked(logits, attn_mask), written=False)
        assert weights is not None
        self.calls += 1
        return weights @ value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.calling_layer() is not None:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward and self.calling_layer() is not None:
            return _multi_head_attention(self.attend, *args, **kwargs)
        if getattr(func, "__name__", "") == "softmax":
            logits, dim = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs.get("dim")
            if dim in (-1, logits.dim() - 1) and (weights := self.weights(logits, written=True)) is not None:
                self.calls += 1
                return weights.to(kwargs.get("dtype") or logits.dtype)
        return func(*args, **kwargs)


def calling_frames() -> Iterator[FrameType]:
    """Iterate over the frames of the functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _multi_head_attention(attend: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute ``F.multi_head_attention_forward`` of (N, B, E) with another attention function."""
    call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    num_heads = call["num_heads"]
    separate = call.get("use_separate_proj_weight", False)
    weights = [call[f"{n}_proj_weight"] for n in "qkv"] if separate else call["in_proj_weight"].chunk(3)
    inputs = call["query"], call["key"], call["value"]
    q, k, v = (  # (B, H, N, D)
        F.linear(x, w, b).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, weights, call["in_proj_bias"].chunk(3), strict=True)
    )
    mask, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if mask is not None:
        mask = (~mask if mask.dtype is torch.bool else mask).view(-1, num_heads, *mask.shape[-2:])
    if padding is not None:
        visible = (~padding if padding.dtype is torch.bool else padding >= -90)[:, None, None]
        mask = visible if mask is None else mask & visible if mask.dtype is torch.bool else masked(mask, visible)
    out = attend(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
    return F.linear(out, call["out_proj_weight"], call["out_proj_bias"]), None


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask of PyTorch's attention function to logits: bool (True = attend), or numbers to add."""
    if mask is None:
        return logits
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min) if mask.dtype is torch.bool else logits + mask


class SoftmaxOperators(TorchDispatchMode):
    """Mode that records the names of the operators that compute a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(s in name for s in ("softmax", "attention", "transformer_encoder")) and "log_softmax" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
