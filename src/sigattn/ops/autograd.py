"""Autograd kernels of the registered ops: the derivative of a forward op is a backward op, which has none itself.

They are registered with the dispatcher, because exported programs and compiled graphs call the op directly, without
``sigmoid_attention``. ``torch.library.register_autograd`` does not suffice: its kernels do not work under
``torch.func``, and they return a forward-mode tangent of zero without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction

from sigattn.ops import onnx

NO_DERIVATIVE = (
    'the fast backends of sigmoid_attention have no {kind}; pass backend="reference", which has it (in O(N·M) memory)'
)


def register(
    library: torch.library.Library,
    forward: OpOverload,
    backward: OpOverload,
    differentiable: int,
    onnx_formula: Callable[..., Any] | None = None,
) -> None:
    """Register the derivative of a forward op.

    Args:
        library: the library that defines both ops.
        forward: an op whose leading arguments are tensors, with a single output.
        backward: its derivative, with arguments (grad_out, arguments of the forward op, needs_grad), where
            needs_grad holds a bool for each gradient. It returns one tensor per differentiable argument. Its own
            derivative raises.
        differentiable: the number of leading arguments that have a gradient.
        onnx_formula: called instead of the forward op while exporting to ONNX; None raises there.
    """
    tensors = _leading_tensors(forward)

    def setup(ctx: Any, args: Sequence[Any]) -> None:
        ctx.save_for_backward(*args[:tensors])
        ctx.rest = args[tensors:]

    def derivative(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad = list(ctx.needs_input_grad[:differentiable])
        gradients = backward(grad_out, *ctx.saved_tensors, *ctx.rest, needs_grad)
        own = (g if needed else None for g, needed in zip(gradients, needs_grad, strict=True))
        return (*own, *(None,) * (tensors - differentiable + len(ctx.rest)))

    _register(library, forward, setup, derivative, onnx_formula)
    register_without(library, backward, "sigmoid_attention: " + NO_DERIVATIVE.format(kind="second derivative"))


def without_dispatcher(
    forward: Callable[..., Tensor],
    backward: Callable[..., Sequence[Tensor | None]],
    backward_op: OpOverload,
    tensors: int,
    differentiable: int,
) -> Callable[..., Tensor]:
    """Return a forward op as a function of autograd that calls its kernels directly, which saves time in each pass.

    For calls whose tensors are not intercepted (``is_intercepted``). If the backward pass is, or is differentiated, it
    calls the op.

    Args:
        forward, backward: what the ops call; gradients that are not needed may be None.
        backward_op: the op of the derivative, as in ``register``.
        tensors: number of leading arguments that are tensors.
        differentiable: number of leading arguments that have a gradient.
    """

    class SigmoidAttention(Function):  # users see its name as that of grad_fn
        @staticmethod
        def forward(ctx: Any, rest: tuple[Any, ...], *args: Any) -> Tensor:
            ctx.save_for_backward(*args)
            ctx.rest = rest
            with torch._C._AutoDispatchBelowAutograd():  # else autograd takes an output with other strides for a view
                return forward(*args, *rest)

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
            needs_grad = list(ctx.needs_input_grad[1 : 1 + differentiable])
            saved = ctx.saved_tensors
            if needs_op(grad_out, *saved):
                gradients = backward_op(grad_out, *saved, *ctx.rest, needs_grad)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    gradients = backward(grad_out, *saved, *ctx.rest, needs_grad)
            results = (g if needed else None for g, needed in zip(gradients, needs_grad, strict=True))
            return (None, *results, *(None,) * (tensors - differentiable))

    # each argument of a Function takes time, so that those which are no tensors are one
    return lambda *args: SigmoidAttention.apply(args[tensors:], *args[:tensors])


def needs_op(grad_out: Tensor, *saved: Tensor | None) -> bool:
    """Return True in a backward pass that is differentiated, where the op raises, or intercepted (it has rules)."""
    if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad_out):
        return True
    return is_intercepted([t for t in (grad_out, *saved) if t is not None])


def register_without(library: torch.library.Library, op: OpOverload, message: str) -> None:
    """Register an op without a derivative: a backward pass through it raises RuntimeError with this message.

    An op that returns nothing, because it writes into its arguments, raises when it is called with a tensor that
    requires a gradient.
    """
    if not op._schema.returns:
        _register_mutation(library, op, message)
        return

    def derivative(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(message)

    _register(library, op, lambda ctx, args: None, derivative)


def _register_mutation(library: torch.library.Library, op: OpOverload, message: str) -> None:
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> None:
        if onnx.exporting():
            onnx.refuse(str(op))
        tensors = [t for t in args if isinstance(t, Tensor)]
        refuse_tangents(tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(message)
        _redispatch(op, keyset, args)

    library.impl(op, kernel, "Autograd", with_keyset=True)


def _leading_tensors(op: OpOverload) -> int:
    types = [str(a.type) for a in op._schema.arguments]
    return next((i for i, t in enumerate(types) if t not in ("Tensor", "Optional[Tensor]")), len(types))


def _register(
    library: torch.library.Library,
    op: OpOverload,
    setup: Callable[[Any, Sequence[Any]], None],
    derivative: Callable[..., Any],
    onnx_formula: Callable[..., Any] | None = None,
) -> None:
    # a function of a single level, because the dispatcher calls the kernel once per level of torch.func
    class Recorded(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args_and_keyset: Any) -> Any:
            *args, keyset = args_and_keyset
            setup(ctx, args)
            with _enable_gradients():
                return _redispatch(op, keyset, args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            gradients = derivative(ctx, *grads)
            return (*gradients, None)

    Recorded.__name__ = Recorded.__qualname__ = f"{op._opname}_of_sigattn"

    apply: Callable[..., Any] = Recorded.apply  # type: ignore[attr-defined]

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if onnx.exporting():
            return onnx_formula(*args) if onnx_formula is not None else onnx.refuse(str(op))
        tensors = [t for t in args if isinstance(t, Tensor)]
        refuse_tangents(tensors)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return _redispatch(op, keyset, args)
        if not torch._C._are_functorch_transforms_active():
            return apply(*args, keyset)
        with enable_single_level_autograd_function():
            return apply(*args, keyset)

    library.impl(op, kernel, "Autograd", with_keyset=True)


def _redispatch(op: OpOverload, keyset: torch._C.DispatchKeySet, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _enable_gradients() -> contextlib.AbstractContextManager[Any]:
    """Enable gradients, which a Function disables, because the next level of torch.func must record the op too."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.enable_grad())
    stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
    return stack


def refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError if a tensor has a forward-mode tangent, which only the backend "reference" supports."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("sigmoid_attention: " + NO_DERIVATIVE.format(kind="forward-mode derivative"))


def is_intercepted(tensors: Sequence[Any]) -> bool:
    """Return True if a tensor is a subclass or its memory is not its data, or a tracer, mode or transform is active.

    The memory of a lazily negated tensor (``is_neg``) is its negative, which the dispatcher resolves before it calls an
    op's kernel.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    if torch._C._is_tracing():  # torch.jit.trace would record the sizes that the kernels read
        return True
    if any((type(t) is not Tensor and type(t) is not torch.nn.Parameter) or t.is_meta for t in tensors):
        return True
    if any(t.is_neg() or t._is_zerotensor() for t in tensors):
        return True
    return torch._C._len_torch_dispatch_stack() > 0
