"""Settings of calls that do not specify them: the precision of σ, the backend, and autocast."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from sigattn.ops import validation

BACKENDS = ("triton", "llvm", "blocked", "reference")
PRECISIONS = ("accurate", "fast")

current_precision = "accurate"


class _Thread(threading.local):
    backend: str | None = None


thread = _Thread()
_entered: dict[object, str] = {}  # the contexts of all threads, which leave in any order
# Backend of the last of these, for compiled code, whose guards do not see a thread's own values
compiled_backend: str | None = None


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the backend of the operators' calls within the context, also of those in layers and models.

    It is for calls that do not pass ``backend=`` themselves, as PyTorch's ``sdpa_kernel`` is. With "reference" layers
    and models have forward-mode derivatives, and exported or compiled programs consist of PyTorch's operators alone,
    which other runtimes know. It applies to the current thread; a compiled function is compiled again for another
    backend, and takes that of the context entered last in any thread.

    Args:
        name: "reference", "blocked", "llvm" or "triton", as in ``sigmoid_attention``.

    Raises:
        ValueError: for another name; and within the context, by a call that the backend does not support.

    >>> with backend("reference"):  # here a layer, or a model
    ...     out, tangent = torch.func.jvp(nn.Linear(4, 2), (torch.ones(4),), (torch.ones(4),))
    """
    global compiled_backend
    validation.choice("sigattn.backend", "backend", name, BACKENDS, optional=False)
    before = thread.backend, compiled_backend
    context = None if torch.compiler.is_compiling() else object()  # a graph that is traced has one thread
    if context is not None:
        _entered[context] = name
    thread.backend = compiled_backend = name
    try:
        yield
    finally:
        thread.backend, compiled_backend = before
        if context is not None:
            del _entered[context]
            compiled_backend = [None, *_entered.values()][-1]


def set_sigmoid_precision(precision: str) -> None:
    """Set the precision of the sigmoid in this process, for calls that do not specify it themselves.

    Args:
        precision: "accurate" (the default): the error of every weight P is small relative to P, at any length. "fast"
            allows an error that is small relative to 1 only: on NVIDIA GPUs the hardware's tanh replaces ex2 and a
            polynomial, as in the paper's kernel (App. F). With b = -log n the relative error of a typical weight 1/n
            then grows with n (measured in docs/operator.md). It has no effect on devices without a faster form.

    Raises:
        ValueError: if it is neither.

    >>> set_sigmoid_precision("accurate")
    """
    global current_precision
    validation.choice("set_sigmoid_precision", "precision", precision, PRECISIONS, optional=False)
    current_precision = precision


def get_sigmoid_precision() -> str:
    """Return the current setting of ``set_sigmoid_precision``: "accurate" or "fast"."""
    return current_precision


_supports_autocast = functools.cache(torch.amp.is_autocast_available)


def is_autocast_enabled(device_type: str) -> bool:
    """Return True if autocast is enabled for a device type; False for devices that do not support it."""
    if torch.compiler.is_compiling():  # torch.compile of PyTorch 2.11 cannot trace is_autocast_available
        return device_type != "meta" and torch.is_autocast_enabled(device_type)
    return _supports_autocast(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables autocast, because the operands have been cast before."""
    if is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
