"""Calls with proxies of tensors, such as those of ``torch.fx.symbolic_trace``, which record the call in a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy
from torch.overrides import handle_torch_function


def record(function: Callable[..., Tensor], arguments: dict[str, Any]) -> Any:
    """Return what the proxies return for a call of a function, given the call's arguments by name, operands first."""
    operands = [arguments[name] for name in list(arguments)[:3]]
    return handle_torch_function(function, operands, **arguments)


def record_module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the proxy of a layer's call, which becomes one node of the graph; None if no argument is a proxy."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Proxy):
            tracer: Any = argument.tracer
            if module is tracer.root:
                raise TypeError(f"{type(module).__name__} is one node for torch.fx: trace a module that contains it")
            return tracer.create_proxy("call_module", tracer.path_of_module(module), tuple(args), dict(kwargs))
    return None
