"""Signatures of calls: a model calls attention with the same shapes again and again.

What is checked, chosen and prepared for a call depends on its signature only: kind, dtype, sizes, strides, device and
alignment of each tensor, the numbers and flags, and the settings of PyTorch and of this library. It does not depend on
the values of tensors, so that one call's preparation serves all calls with its signature.
"""

import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigattn.ops import settings

_MAX_ENTRIES = 4096
_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = frozenset([bool, int, float, str, type(None)])
_USUAL_NAMES = ["CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "BackendSelect"]
_USUAL_NAMES += [name for name in vars(torch._C.DispatchKey) if name.startswith("Autocast")]
_USUAL_KEYS: int = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in _USUAL_NAMES)
)

_values: dict[Hashable, Any] = {}


def get(key: Hashable) -> Any:
    """Return what was stored for a signature, else None."""
    return _values.get(key)


def store(key: Hashable, value: Any) -> None:
    """Store a value, which must not hold tensors of a call, unless the signature is None."""
    if key is None:
        return
    if len(_values) >= _MAX_ENTRIES:
        _values.clear()
    _values[key] = value


def clear() -> None:
    """Forget all calls."""
    _values.clear()


def is_observed() -> bool:
    """Return True if a mode, transform, tracer or profiler is active, for which calls pass PyTorch's dispatcher."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or torch._C._dispatch_tls_local_include_set().raw_repr() & ~_USUAL_KEYS
    )


def signature(op: str, tensors: Sequence[Any], others: Sequence[Any]) -> Hashable:
    """Return the signature of a call of an op, or of a function, by its name; None if it has none.

    A call without a signature has a tensor of a kind that PyTorch's dispatcher treats in its own way (a subclass, a
    negative view, …), or something else than tensors, numbers, strings, None and tuples of integers.

    tensors: may be numbers or None. others: no tensors, because values may depend on theirs.
    """
    kinds = tuple(map(type, others))
    if not _NUMBERS.issuperset(kinds):
        for other in others:
            if type(other) not in _NUMBERS and not (type(other) is tuple and set(map(type, other)) == {int}):
                return None
    key: list[Any] = [op, kinds, *others, torch.get_num_threads()]
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) in _PLAIN:
            dispatch_keys = torch._C._dispatch_keys(x).raw_repr()
            if dispatch_keys & ~_USUAL_KEYS:
                return None
            # kernels are compiled for addresses that are a multiple of 16 or are not
            key += (dispatch_keys, x.get_device(), x.dtype, x.shape, x.stride(), x.data_ptr() % 16)
        elif type(x) in _NUMBERS:
            key += (type(x), x)
        else:
            return None
    return tuple(key)


def public_signature(function: str, tensors: Sequence[Any], others: Sequence[Any]) -> Hashable:
    """Return the signature of a call of a public function, in which settings decide as well; None if it has none."""
    if (key := signature(function, tensors, others)) is None:
        return None
    needs_grad = torch.is_grad_enabled() and tuple([x.requires_grad for x in tensors if isinstance(x, Tensor)])
    autocast = None
    if torch._C._is_any_autocast_enabled() and isinstance(tensors[0], Tensor):
        device_type = tensors[0].device.type
        autocast = settings.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return key, needs_grad, settings.thread.backend, settings.current_precision, deterministic, autocast
