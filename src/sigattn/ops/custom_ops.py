"""Registration of an operator with PyTorch: ops, fake implementations, autograd, vmap and FLOP counts.

The canonical arguments of an operator are a problem, a named tuple (``problem.py``). An ``Operator`` registers the op
``sigattn::NAME_forward``, whose arguments are the fields of the problem and the name of a backend, and if it has a
gradient ``sigattn::NAME_backward``, the derivative of the first (``autograd.py``). ``torch.compile`` and
``torch.export`` therefore trace one node, which can be differentiated afterwards, and ``jacrev`` and ``vmap`` have a
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from sigattn.ops import autograd, flops, vmap
from sigattn.ops.autocast import is_autocast_enabled, without_autocast
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import P

_SCHEMA_TYPES = {  # of the fields of problems; numbers that a compiler may keep symbolic are SymInt
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float | None": "float?",
    "float": "float",
    "int": "SymInt",
    "bool": "bool",
}
_NUM_GRADIENTS = len(NeedsGrad._fields)  # of the leading tensors of a problem
_TAGS = (torch.Tag.pt2_compliant_tag,)

library: torch.library.Library = torch.library.Library("sigattn", "DEF")


def new_contiguous(query: Tensor, width: int) -> Tensor:
    """Return an uninitialised contiguous output for a query (…, D)."""
    return query.new_empty(*query.shape[:-1], width)


def new_contiguous_gradient(t: Tensor) -> Tensor:
    """Return an uninitialised contiguous gradient of t."""
    return t.new_empty(t.shape)


def refuse_backward(problem: Any, grad_out: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Raise RuntimeError; the backward pass of an operator without a gradient."""
    raise RuntimeError("this operator has no gradient")


@dataclass(frozen=True, slots=True)
class Backend(Generic[P]):
    """Implementation of an operator.

    Attributes:
        forward: returns the output of a problem.
        unavailable: returns the reason why a problem is not supported, or None. It must not read the values of tensors,
            because it is called outside the op, where a compiler may be tracing.
        backward: returns the gradients of a problem.
        device_types: devices on which the backend can be the default; None for all.
        can_be_default: returns False for problems for which the backend is not the default although it supports them.
        new_output: returns a tensor with the strides of ``forward``'s output, given the query and Dv.
        new_gradient: returns a tensor with the strides of ``backward``'s gradient of query, key or value.
    """

    forward: Callable[[P], Tensor]
    unavailable: Callable[[P], str | None]
    backward: Callable[[P, Tensor, NeedsGrad], Gradients] = refuse_backward
    device_types: tuple[str, ...] | None = None
    can_be_default: Callable[[P], bool] = lambda _: True
    new_output: Callable[[Tensor, int], Tensor] = new_contiguous
    new_gradient: Callable[[Tensor], Tensor] = new_contiguous_gradient

    def is_default_for(self, problem: P) -> bool:
        """Return True if the backend supports the problem and can be the default on its device."""
        if self.device_types is not None and problem.query.device.type not in self.device_types:
            return False
        return self.can_be_default(problem) and self.unavailable(problem) is None


class Operator(Generic[P]):
    """Registered operator; a call chooses a backend and returns the output of a problem.

    Args:
        name: prefix of the names of the ops.
        function: name of the public function, for error messages.
        problem_type: class of the problems. Its tensors come first, and among them those with a gradient, in the order
            of ``NeedsGrad``.
        backends: implementations by name, in order of speed: the first that supports a problem is the default.
        check: raises ValueError for values of tensors that do not fit; called when the op runs, because a traced graph
            has no values.
        keys_per_query: returns the number of keys of a query for the FLOP counter, given a problem with shapes as
            tensors.
        no_gradient: error message of the backward pass of an operator without a gradient; else None.
        onnx_formula: called instead of the forward op while exporting to ONNX; None raises there.
        vmap_rules: rules for both ops.
    """

    def __init__(
        self,
        name: str,
        function: str,
        problem_type: type[P],
        backends: dict[str, Backend[P]],
        check: Callable[[P], None],
        keys_per_query: Callable[[Any], int],
        *,
        no_gradient: str | None = None,
        onnx_formula: Callable[..., Tensor] | None = None,
        vmap_rules: tuple[vmap.Rule, vmap.Rule] = (vmap.by_slices, vmap.by_slices),
    ) -> None:
        self.function = function
        self.problem_type = problem_type
        self.backends = backends
        self.check = check
        self.keys_per_query = keys_per_query
        types = {field: kind.__forward_arg__ for field, kind in problem_type.__annotations__.items()}
        self.num_tensors: int = sum("Tensor" in kind for kind in types.values())
        arguments = ", ".join(f"{_SCHEMA_TYPES[kind]} {field}" for field, kind in types.items()) + ", str backend"
        library.define(f"{name}_forward({arguments}) -> Tensor", tags=_TAGS)
        library.impl(f"{name}_forward", self._forward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sigattn::{name}_forward", self._fake_forward, lib=library)
        self.forward_op: Any = getattr(torch.ops.sigattn, f"{name}_forward").default
        vmap.register(library, self.forward_op, vmap_rules[0])
        flops.register(self.forward_op, self._forward_flops)
        if no_gradient is not None:
            autograd.register_without(library, self.forward_op, no_gradient)
            self._differentiable: Callable[..., Any] = self.forward_op
            return
        results = ", ".join(["Tensor"] * _NUM_GRADIENTS)
        library.define(f"{name}_backward(Tensor grad_out, {arguments}, bool[] needs_grad) -> ({results})", tags=_TAGS)
        library.impl(f"{name}_backward", self._backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sigattn::{name}_backward", self._fake_backward, lib=library)
        backward_op = getattr(torch.ops.sigattn, f"{name}_backward").default
        vmap.register(library, backward_op, vmap_rules[1])
        flops.register(backward_op, self._backward_flops)
        autograd.register(library, self.forward_op, backward_op, _NUM_GRADIENTS, onnx_formula)
        self._differentiable = autograd.without_dispatcher(
            self._forward, self._gradients, backward_op, self.num_tensors, _NUM_GRADIENTS
        )

    def __call__(self, problem: P, backend: str | None) -> Tensor:
        """Return the output of a problem; differentiable if the operator is.

        Raises:
            ValueError: if ``backend`` does not support the problem.
        """
        return self.run(problem, self.choose(problem, backend))

    def run(self, problem: P, name: str) -> Tensor:
        """Return the output of a problem, computed by a backend that supports it."""
        tensors: list[Any] = [t for t in problem[: self.num_tensors] if t is not None]
        out: Tensor
        if autograd.is_intercepted(tensors):
            out = self.forward_op(*problem, name)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            out = self._differentiable(*problem, name)
        else:
            out = self._compute(problem, self.backends[name])
        return out

    def choose(self, problem: P, backend: str | None) -> str:
        """Return ``backend``, or if it is None the fastest backend that supports the problem.

        Raises:
            ValueError: if ``backend`` does not support the problem.
        """
        if backend is None:
            return next(name for name, candidate in self.backends.items() if candidate.is_default_for(problem))
        reason = self.backends[backend].unavailable(problem)
        if reason is not None:
            raise ValueError(f"{self.function}: backend {backend!r} does not support this call: {reason}")
        return backend

    def _compute(self, problem: P, backend: Backend[P]) -> Tensor:
        self.check(problem)
        if not is_autocast_enabled(problem.query.device.type):
            return backend.forward(problem)
        with without_autocast(problem.query.device.type):
            return backend.forward(problem)

    def _forward(self, *args: Any) -> Tensor:
        return self._compute(self.problem_type(*args[:-1]), self.backends[args[-1]])

    def _backward(self, grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return tuple(g if g is not None else _no_gradient(grad_out) for g in self._gradients(grad_out, *args))

    def _gradients(self, grad_out: Tensor, *args: Any) -> Gradients:
        *fields, name, needs_grad = args
        problem, backward = self.problem_type(*fields), self.backends[name].backward
        self.check(problem)
        with without_autocast(problem.query.device.type):
            return backward(problem, grad_out, NeedsGrad(*needs_grad))

    def _fake_forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return self.backends[rest[-1]].new_output(query, value.shape[-1])

    def _fake_backward(self, grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *fields, name, needs_grad = args
        new = (self.backends[name].new_gradient,) * 3 + (new_contiguous_gradient,) * (_NUM_GRADIENTS - 3)
        return tuple(
            new_like(t) if t is not None and needed else _no_gradient(grad_out)
            for new_like, t, needed in zip(new, fields, needs_grad, strict=False)
        )

    def _forward_flops(self, *args: Any, **_: Any) -> int:
        shapes: Any = self.problem_type(*args[:-1])
        return flops.forward(shapes.query, self.keys_per_query(shapes), shapes.value)

    def _backward_flops(self, grad_out: Sequence[int], *args: Any, **_: Any) -> int:
        shapes: Any = self.problem_type(*args[:-2])
        return flops.backward(shapes.query, self.keys_per_query(shapes), shapes.value)


def _no_gradient(like: Tensor) -> Tensor:
    """Return an empty tensor, which stands for a gradient that is not needed, because ops cannot return None."""
    return like.new_empty(0)


def can_bypass_dispatcher(tensors: Sequence[Any]) -> bool:
    """Return True if the op can be bypassed (saves 4 µs): no tracing, dispatch mode, transform or gradient active."""
    present = [t for t in tensors if t is not None]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in present)
    return not differentiated and not autograd.is_intercepted(present)
