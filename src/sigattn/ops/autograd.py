"""Autograd of the registered ops, as kernels for the dispatch key "Autograd", for eager, traced and exported calls.

    forward op ──derivative──▶ backward op ──derivative──▶ the formula, materialised

``torch.library.register_autograd`` does not suffice: its kernels do not work under ``torch.func``, and they return a
forward-mode tangent of zero without an error.
"""

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

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


class Op(NamedTuple):
    """A registered op, and its kernel for the key "CompositeExplicitAutograd"."""

    overload: OpOverload
    kernel: Callable[..., Any]


_DEVICES_ALONE = {
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
}


def below_autograd(op: Op, keyset: torch._C.DispatchKeySet) -> Callable[..., Any]:
    """Return what an op's kernel for the key "Autograd" calls, within ``torch._C._AutoDispatchBelowAutograd``.

    If only the device's key is left, that is the kernel that the dispatcher would call (saves 10 to 20 µs).
    """
    below = keyset & torch._C._after_autograd_keyset
    return op.kernel if below.raw_repr() in _DEVICES_ALONE else functools.partial(op.overload.redispatch, below)


_PLAIN = (Tensor, torch.nn.Parameter)
_USUAL_NAMES = ["CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "BackendSelect"]
_USUAL_NAMES += [name for name in vars(torch._C.DispatchKey) if name.startswith("Autocast")]
_USUAL_KEYS: int = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in _USUAL_NAMES)
)


def can_bypass_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if the dispatcher would only call an op's kernels with these tensors (its call takes 30 µs).

    That is: no mode, transform, tracer or profiler is active, and no tensor is of a kind (a subclass, a negative view,
    …) that it treats in its own way.
    """
    if torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0:
        return False
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for t in tensors:
        if t is not None:
            if type(t) not in _PLAIN:
                return False
            keys |= torch._C._dispatch_keys(t).raw_repr()
    return not keys & ~_USUAL_KEYS


def recording() -> contextlib.AbstractContextManager[Any]:
    """Return a context for the ``apply`` of a node, which records a call of an op in autograd's graph."""
    transforms = torch._C._are_functorch_transforms_active()
    return enable_single_level_autograd_function() if transforms else contextlib.nullcontext()


def node(
    name: str,
    op: Op,
    setup: Callable[[Any, tuple[Any, ...], Sequence[Any], Any], Any],
    derivative: Callable[..., Sequence[Tensor | None]],
) -> Any:
    """Return the class of nodes of autograd's graph that stand for calls of an op.

    ``apply`` takes the key set (None if it ``can_bypass_dispatcher``), the op's other arguments, and its leading
    tensors. ``setup`` saves what the derivative needs, given the context, the tensors, the other arguments and the
    result, and returns the result of the call; ``derivative`` returns the gradients of the tensors, given the context
    and those of the outputs.
    """

    def forward(ctx: Any, keyset: torch._C.DispatchKeySet | None, rest: Sequence[Any], *tensors: Any) -> Any:
        call = op.kernel if keyset is None else below_autograd(op, keyset)
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


def register_without(library: torch.library.Library, op: Op, name: str) -> None:
    """Register an op without a derivative: called with a tensor that requires a gradient, it raises RuntimeError."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if exporting_to_onnx():
            refuse_onnx(str(op.overload))
        tensors = [t for t in args if isinstance(t, Tensor)]
        refuse_tangents(tensors)
        if needs_grad(tensors):
            raise RuntimeError(f"{name} has no gradient: call it under torch.no_grad() or torch.inference_mode()")
        with torch._C._AutoDispatchBelowAutograd():
            return below_autograd(op, keyset)(*args)

    library.impl(op.overload, kernel, "Autograd", with_keyset=True)


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
