"""Sigmoid weights in the place of a softmax that a layer writes out: a function of its logits with their masks.

A logit of ``MASKED_BELOW`` or less is masked: masks add -inf, the smallest number, -1e9 or -1e4. A mask of -100, as in
Swin, is a logit like others, as it is for softmax.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.nn.bias import AttentionBias, VisibleKeysBias

MASKED_BELOW = -1000.0
_HEADS = re.compile("heads?$")  # ends of the names of attributes: num_heads, n_head, num_attention_heads
_FUNCTIONS = (F.softmax, torch.softmax, Tensor.softmax)
_DEFAULT = VisibleKeysBias()


class WrittenSoftmax(NamedTuple):
    """One call of a softmax over keys."""

    logits: Tensor  # of any number of rows, (..., M)
    dtype: torch.dtype  # of the weights
    num_heads: int = 1  # size of dimension -3, if it is known to be that of the heads

    @property
    def hidden(self) -> Tensor:
        """True where a key is masked, (..., M). NaN is not masked."""
        return self.logits <= MASKED_BELOW

    def num_visible(self, hidden: Tensor) -> Tensor:
        """Return the number of visible keys of each row, at least 1, (..., 1), float32."""
        return (self.logits.shape[-1] - hidden.sum(-1, keepdim=True)).clamp(min=1).float()

    def weights(self, bias: AttentionBias | None, normalize: bool) -> Tensor:
        """Return σ(logits + b), 0 where masked; or with ``normalize`` divided by the sum of its row.

        With ``normalize`` logits of any size are numbers, as for softmax: a row of masked ones has weights, too, which
        are 0 in a row of -inf only.

        A bias of None is -log of the number of visible keys of each row, 6 less with ``normalize``. ValueError is
        raised if the bias has other numbers of heads or queries than the logits.
        """
        if not self.logits.shape[-1]:  # whose largest element does not exist
            return self.logits.to(self.dtype)
        wide = torch.promote_types(torch.promote_types(self.logits.dtype, self.dtype), torch.float32)
        logits, hidden = self.logits.to(wide), self.hidden
        b = self._evaluate(bias, normalize, self.num_visible(hidden))
        if not normalize:
            return (logits + b).sigmoid().masked_fill(hidden, 0).to(self.dtype)
        # log σ(x) = -softplus(-x); the gradient of a softmax of infinite numbers would be NaN
        is_empty = logits.amax(-1, keepdim=True) == -torch.inf
        negative = (-b - logits).masked_fill_(is_empty, 0)
        weights = F.softplus(negative, threshold=40).neg_().softmax(-1)
        return weights.masked_fill(is_empty, 0).to(self.dtype)

    def _evaluate(self, bias: AttentionBias | None, normalize: bool, count: Tensor) -> float | Tensor:
        bias, shape = _DEFAULT if bias is None else bias, self.logits.shape
        rows = shape[-2] if len(shape) > 1 else 1
        try:
            b = bias(rows, shape[-1], device=count.device, visible=count if bias.needs_visible else None)
            b = bias.of_call(b, normalize)
            if not isinstance(b, Tensor) or b.numel() == 1:
                return b.view(()) if isinstance(b, Tensor) else b
            return b.view(count.shape) if b.numel() == count.numel() else b.expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"the values of {type(bias).__name__} do not broadcast to the logits {tuple(shape)} of a layer that "
                "writes its softmax out: take one bias for the layer"
            ) from error


def with_heads(call: WrittenSoftmax, layer: nn.Module) -> WrittenSoftmax:
    """Return a call with the number of heads, if a layer has it as an attribute, and one dimension has this size."""
    shape = call.logits.shape[1:-2]  # without a first dimension, which is the batch, or batch and heads
    heads = {v for name, v in vars(layer).items() if _HEADS.search(name) and isinstance(v, int)}
    known = shape and shape[-1] in heads and shape.count(shape[-1]) == 1
    return call._replace(num_heads=shape[-1]) if known else call


def written_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WrittenSoftmax | None:
    """Return the softmax that a call of PyTorch computes over the last dimension; None for all other calls."""
    if not any(func is f for f in _FUNCTIONS):
        return None
    names = ("input", "dim", "_stacklevel", "dtype") if func is F.softmax else ("input", "dim", "dtype")
    arguments = dict(zip(names, args, strict=False)) | {("input" if k == "self" else k): v for k, v in kwargs.items()}
    logits, dim = arguments["input"], arguments.get("dim")
    if not isinstance(dim, int) or dim not in (-1, logits.dim() - 1) or not logits.is_floating_point():
        return None
    dtype = arguments.get("dtype") or logits.dtype
    if torch.is_autocast_enabled(logits.device.type):
        dtype = torch.promote_types(dtype, torch.float32)
    return WrittenSoftmax(logits, dtype)
