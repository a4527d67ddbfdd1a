"""Autograd functions around a softmax, such as ``XSoftmax`` of DeBERTa's first code, in layers of sigmoid attention."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sigattn.nn.observer import without_function_modes
from sigattn.nn.written_softmax import written_softmax

_TOLERANCE = 0.02  # of the norm of a derivative, for bfloat16


@functools.cache  # once for each class
def run_as_code(kind: Any, is_within: Callable[[], object]) -> None:
    """Let autograd differentiate the forward of a function where ``is_within()``, instead of its own backward pass.

    Its backward pass is that of the softmax in its forward, which sigmoid weights replace there. A function whose
    backward pass is not the derivative of its forward is left as it is, because it may scale or stop a gradient.
    torch.compile does not call this ``apply`` where there are gradients, and the layer refuses the call.
    """
    is_derivative: bool | None = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_derivative
        if cls is kind and not kwargs and is_within():
            if is_derivative is None and not torch.compiler.is_compiling():
                is_derivative = _is_derivative(kind, args)
            if is_derivative is not False:
                return _forward(kind, *args)
        return super(kind, cls).apply(*args, **kwargs)

    if "apply" not in vars(kind):
        kind.apply = classmethod(apply)


def _forward(kind: Any, *args: Any) -> Any:
    if kind.setup_context is not torch.autograd.Function.setup_context:
        return kind.forward(*args)
    context: Any = FunctionCtx()
    context.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    return kind.forward(context, *args)


def _is_derivative(kind: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the backward pass of a function is the derivative of its forward, with softmax in it."""
    with without_function_modes(), torch.inference_mode(False), torch.enable_grad():
        own = _gradients(super(kind, kind).apply, args)
        with _CopiedSoftmax():
            code = _gradients(functools.partial(_forward, kind), args)
    return own is not None and code is not None and all(map(_is_close, own, code))


class _CopiedSoftmax(TorchFunctionMode):
    """Mode in which code may change the result of a softmax in place, as it may change that of sigmoid attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clone() if written_softmax(func, args, kwargs or {}) is not None else result


def _gradients(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor | None] | None:
    """Return the derivatives of a fixed projection of the outputs by the arguments; None if there are none."""
    copies: list[Any] = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    inputs = [a.requires_grad_() for a in copies if isinstance(a, Tensor) and a.is_floating_point()]
    try:
        outputs = [t for t in tree_leaves(function(*copies)) if isinstance(t, Tensor) and t.requires_grad]
        cosines = [torch.arange(t.numel(), device=t.device).cos().view(t.shape).to(t.dtype) for t in outputs]
        return list(torch.autograd.grad(outputs, inputs, cosines, allow_unused=True))
    except (RuntimeError, NotImplementedError):  # no backward pass
        return None


def _is_close(own: Tensor | None, code: Tensor | None) -> bool:
    if own is None or code is None:
        return own is code
    return bool((own.double() - code.double()).norm() <= _TOLERANCE * code.double().norm())
