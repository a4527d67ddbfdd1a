"""Autograd of the registered ops, as kernels for the dispatch key "Autograd", for eager, traced and exported calls.

    forward op ──derivative──▶ backward op ──derivative──▶ the formula, materialised

``torch.library.register_autograd`` does not suffice: its kernels do not work under ``torch.func``, and they return a
forward-mode tangent of zero without an error.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

NO_FORWARD_MODE = (
    'sigmoid_attention: forward-mode derivatives need backend="reference", which is the default inside of '
    "torch.func.jvp and forward_ad.dual_level: pass that or None (it materialises the weights)"
)


def needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if autograd records operations on these tensors."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:  # noqa: SIM110 (a generator would take longer than the rest)
        if t is not None and t.requires_grad:
            return True
    return False


def below_autograd(op: OpOverload, keyset: torch._C.DispatchKeySet) -> Callable[..., Any]:
    """Return what an op's kernel for the key "Autograd" calls, within ``torch._C._AutoDispatchBelowAutograd``."""
    return functools.partial(op.redispatch, keyset & torch._C._after_autograd_keyset)


def recording() -> contextlib.AbstractContextManager[Any]:
    """Return a context for the ``apply`` of a node, which records a call of an op in autograd's graph."""
    transforms = torch._C._are_functorch_transforms_active()
    return enable_single_level_autograd_function() if transforms else contextlib.nullcontext()


def node(
    name: str,
    setup: Callable[[Any, tuple[Any, ...], Sequence[Any], Any], Any],
    derivative: Callable[..., Sequence[Tensor | None]],
) -> Any:
    """Return the class of nodes of autograd's graph that stand for calls of an op.

    ``apply`` takes what it calls, the op's kernel or ``below_autograd``, the op's other arguments, and its leading
    tensors. ``setup`` saves what the derivative needs, given the context, the tensors, the other arguments and the
    result, and returns the result of the call; ``derivative`` returns the gradients of the tensors, given the context
    and those of the outputs.
    """

    def forward(ctx: Any, call: Callable[..., Any], rest: Sequence[Any], *tensors: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            if torch._C._are_functorch_transforms_active():
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # the next level records the op, too
                    result = call(*tensors, *rest)
            else:
                result = call(*tensors, *rest)
        ctx.set_materialize_grads(False)  # saved weights have no gradient, which would be as large as they are
        return setup(ctx, tensors, rest, result)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *derivative(ctx, *grads))

    # a function of a single level, because the dispatcher calls the kernel once per level of torch.func
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return types.new_class(name, (_SingleLevelFunction,), exec_body=lambda namespace: namespace.update(methods))


def register_without(library: torch.library.Library, op: OpOverload, name: str) -> None:
    """Register an op without a derivative: called with a tensor that requires a gradient, it raises RuntimeError."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if exporting_to_onnx():
            refuse_onnx(str(op))
        tensors = [t for t in args if isinstance(t, Tensor)]
        refuse_tangents(tensors)
        if needs_grad(tensors):
            raise RuntimeError(f"{name} has no gradient: call it under torch.no_grad() or torch.inference_mode()")
        with torch._C._AutoDispatchBelowAutograd():
            return below_autograd(op, keyset)(*args)

    library.impl(op, kernel, "Autograd", with_keyset=True)


def refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError if a tensor has a forward-mode tangent, which only the backend "reference" supports."""
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(NO_FORWARD_MODE)


def exporting_to_onnx() -> bool:
    """Return True while ``torch.onnx.export`` traces a call (without importing ``torch.onnx``, which takes 0.1 s).

    It traces the ops again when it decomposes an exported program; the formula, in operators of ONNX, replaces them.
    """
    tracing = torch._C._len_torch_dispatch_stack() > 0
    return tracing and "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def refuse_onnx(name: str) -> NoReturn:
    """Raise RuntimeError for an op that cannot be exported to ONNX."""
    raise RuntimeError(
        f"{name} cannot be exported to ONNX: packed sequences and caches written in place are not supported; use "
        "sigmoid_attention with key_lengths or a mask"
    )
