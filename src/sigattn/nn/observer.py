"""Observation of a layer's attention calls, before a conversion."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily

from sigattn.nn.bias import AttentionBias
from sigattn.nn.visible_keys import is_visible
from sigattn.nn.written_softmax import WrittenSoftmax
from sigattn.ops.problem import Problem, make_problem


@dataclass(frozen=True)
class AttentionCall:
    """One call of a softmax attention, which its receiver answers with ``softmax()`` or ``normalized(bias)``.

    Both return the layer's result: the output, or of a softmax that is written out the weights.
    """

    name: str  # of the layer within the model
    problem: Problem | WrittenSoftmax  # without a bias
    softmax: Callable[[], Any]
    normalized: Callable[[AttentionBias], Any]  # sigmoid attention, whose weights are divided by their sum

    @property
    def num_heads(self) -> int:
        """Number of query heads; 1 if it is not known which dimension of the logits has them."""
        return self.problem.query.shape[1] if isinstance(self.problem, Problem) else self.problem.num_heads


Attend = Callable[[AttentionCall], Any]  # returns the result of a call


class CallObserver:
    """Receiver of a layer's attention calls, which takes the place of its bias; ``attend`` answers them."""

    def __init__(self, name: str, attend: Attend) -> None:
        self.name: str = name
        self.attend: Attend = attend

    def answer(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Callable[[], Any],
        normalized: Callable[[AttentionBias], Any], **options: Any,
    ) -> Any:  # fmt: skip
        """Return the result of a call, with is_causal, window, scale and softcap of ``sigmoid_attention`` as options.

        query is (B, Hq, N, D), key (B, Hkv, M, D), value (B, Hkv, M, Dv); the mask, bool (True = attend) or added to
        the logits, broadcasts to (B, Hq, N, M).
        """
        if query.is_nested or not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError(
                f"the attention of {self.name!r} must be called with plain tensors of shape (B, H, N, D), got "
                f"{'nested ones' if query.is_nested else tuple(query.shape)}"
            )
        if mask is not None and mask.is_floating_point():
            mask = mask.masked_fill(~is_visible(mask), -torch.inf)
        problem = make_problem(Problem, query, key, value, attn_mask=mask, **options)
        with without_function_modes():
            return self.attend(AttentionCall(self.name, problem, softmax, normalized))

    def answer_written(self, call: WrittenSoftmax) -> Tensor:
        """Return the weights of a softmax that is written out, (..., M)."""
        softmax = functools.partial(torch.softmax, call.logits, -1, dtype=call.dtype)
        with without_function_modes():
            return self.attend(AttentionCall(self.name, call, softmax, lambda b: call.weights(b, True)))


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Within the context no ``TorchFunctionMode`` is active: those of the layers around a call refuse its softmax."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
