"""Registration of an operator with PyTorch: its op, the op of its derivative, and their rules.

The arguments of an op ``sigattn::NAME_forward`` are the fields of a problem, the name of a backend, and whether to save
the weights. Its outputs are those of ``Result``. Its derivative is the op ``sigattn::NAME_backward``, whose derivative
is that of the formula. Every call takes the same way, so that ``torch.compile``, ``torch.export``, ``torch.func``,
checkpoints and hooks apply to it:

    public function → Operator.__call__ → op → Operator._autograd → Operator._forward → Backend.forward

Without anything between an op and its kernel, ``Operator.__call__`` calls that itself. A later call with the same
signature (``call_cache``) is neither validated nor prepared:

    public function → Operator.run → Operator._forward → Backend.forward
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from sigattn.ops import autograd, call_cache, settings, vmap
from sigattn.ops.gradients import Gradients, NeedsGrad, Prepared, Result, Saved, without_saved
from sigattn.ops.problem import CANONICAL_FORMS, P, Problem, new_result

_SCHEMA_TYPES = {  # of the fields of problems; numbers that a compiler may keep symbolic are SymInt
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float | None": "float?",
    "float": "float",
    "int": "SymInt",
    "bool": "bool",
}
# an op computes with autocast disabled, because its operands have been cast before
_AUTOCAST = functools.reduce(
    operator.or_,
    (torch._C.DispatchKeySet(key) for name, key in vars(torch._C.DispatchKey).items() if name.startswith("Autocast")),
)
_NUM_GRADIENTS = len(NeedsGrad._fields)  # of the leading tensors of a problem
_NUM_RESULTS = len(Result._fields)

library: torch.library.Library = torch.library.Library("sigattn", "DEF")
# For ``FlopCounterMode(custom_mapping=…)``. They are not registered with PyTorch, because the counter's module imports
# Triton, which ``import sigattn`` must not do.
FLOP_FORMULAS: dict[OpOverloadPacket, Callable[..., int]] = {}


@dataclass(frozen=True, slots=True)
class Backend(Generic[P]):
    """Implementation of an operator."""

    # returns the output of a problem, with the strides of ``new_output``, the saved weights and the sums of rows, given
    # a problem and what ``saved_weights`` returned (None: no weights are saved)
    forward: Callable[..., Result]
    # returns the gradients, given a problem, the gradient of the output, the result of the forward pass (the weights if
    # they were saved, the output if the problem normalises), and ``NeedsGrad``. The gradients of query, key and value
    # have the strides of ``torch.empty_like``, others are contiguous. None without gradients
    backward: Callable[..., Gradients] | None = None
    # returns the reason why a problem is not supported, or None; it must not read the values of tensors, because it is
    # called outside the op, where a compiler may be tracing
    unavailable: Callable[[P], str | None] = lambda _: None
    saved_weights: Callable[[P], Saved | None] = lambda _: None  # shape and dtype of the weights to save, or None
    device_type: str | None = None  # on which the backend can be the default; None for all
    # returns False for problems that the backend supports without being the default
    can_be_default: Callable[[P], bool] = lambda _: True
    # True if both take one more argument, a dict for what they prepare: that of the call's signature, of which a bias
    # that is a number is a part
    prepares: bool = False

    def last_arguments(self, prepared: Prepared | None) -> list[Prepared]:
        """Return what both functions take last, given what was prepared for a signature; None without one."""
        return [{} if prepared is None else prepared] if self.prepares else []


class Known(NamedTuple):
    """What was found for the calls of a signature."""

    forward: Callable[..., Result]  # the op's kernel
    options: tuple[Any, ...]  # its arguments after the tensors
    needs_grad: bool
    # the canonical forms of the public function's arguments that are not themselves the problem's tensors
    forms: Sequence[tuple[int, Callable[[Any, Tensor], Tensor | None]]] = ()


class Operator(Generic[P]):
    """Registered operator; a call chooses a backend and returns the output of a problem.

    Args:
        name: prefix of the names of the ops. function: name of the public function, for error messages.
        problem_type: its tensors come first, and among them those with a gradient, in the order of ``NeedsGrad``.
        backends: implementations by name, the fastest first: the first that supports a problem is the default.
        formula: the backend "reference" in operators of PyTorch, which is the default for forward-mode derivatives, and
            the definition of second derivatives. None for an operator without gradients.
        checked: returns a problem whose tensors of lengths are copies, or raises ValueError for values that do not fit;
            called when an op runs, because a traced graph has no values.
        keys_per_query: for the FLOP counter, given a problem with shapes as tensors.
        formula_unavailable: as ``Backend.unavailable``.
        traced_formula: the formula of a problem's fields in operators that a graph of any size holds, called instead of
            the op in compiled and traced graphs with the backend "reference" and in exports to ONNX. Without it, these
            raise.
        vmap_rules: rules for both ops.
    """

    def __init__(
        self, name: str, function: str, problem_type: type[P], backends: dict[str, Backend[P]],
        formula: Callable[[P], Tensor] | None, checked: Callable[[P], P], keys_per_query: Callable[[Any], int], *,
        formula_unavailable: Callable[[P], str | None] = lambda _: None,
        traced_formula: Callable[..., Tensor] | None = None,
        vmap_rules: tuple[vmap.Rule, vmap.Rule] = (vmap.by_slices, vmap.by_slices),
    ) -> None:  # fmt: skip
        self.function = function
        self.problem_type = problem_type
        self.backends: dict[str, Backend[P]] = backends
        if formula is not None:
            reference: Backend[P] = Backend(self._formula_forward, self._formula_backward, formula_unavailable)
            self.backends = {**backends, "reference": reference}
        self.formula = formula
        self.checked = checked
        self.keys_per_query = keys_per_query
        self.traced_formula = traced_formula
        types = {field: kind.__forward_arg__ for field, kind in problem_type.__annotations__.items()}
        fields = ", ".join(f"{_SCHEMA_TYPES[kind]} {field}" for field, kind in types.items())
        self.num_tensors: int = sum("Tensor" in kind for kind in types.values())
        self._bias = problem_type._fields.index("bias")
        outputs = ", ".join(["Tensor"] * _NUM_RESULTS)
        self.forward_op: Any = self._define(
            f"{name}_forward", f"({fields}, str backend, bool save) -> ({outputs})", self._forward_kernel,
            self._fake_forward, vmap_rules[0], self._forward_flops,
        )  # fmt: skip
        if formula is None:
            autograd.register_without(library, self.forward_op, function)
            return
        saved = ", ".join(f"Tensor {name}" for name in Result._fields)
        results = ", ".join(["Tensor"] * _NUM_GRADIENTS)
        self.backward_op: Any = self._define(
            f"{name}_backward",
            f"(Tensor grad_out, {saved}, {fields}, str backend, bool[] needs_grad) -> ({results})",
            self._backward, self._fake_backward, vmap_rules[1], self._backward_flops,
        )  # fmt: skip
        library.impl(self.forward_op, self._autograd, "Autograd", with_keyset=True)
        library.impl(self.backward_op, self._autograd_of_backward, "Autograd", with_keyset=True)
        self._node = autograd.node("SigmoidAttention", _save, self._gradients)
        self._backward_node = autograd.node("SigmoidAttentionGradient", _save_gradient, self._second_gradients)

    @staticmethod
    def _define(name: str, schema: str, kernel: Any, fake: Any, vmap_rule: vmap.Rule, num_flops: Any) -> Any:
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sigattn::{name}", fake, lib=library)
        op = getattr(torch.ops.sigattn, name).default

        def map_slices(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
            return vmap_rule(op, info.batch_size, [d if isinstance(d, int) else None for d in in_dims], args)

        torch.library.register_vmap(op, map_slices, lib=library)
        FLOP_FORMULAS[op.overloadpacket] = num_flops
        return op

    def recall(self, arguments: tuple[Any, ...]) -> tuple[Known, list[Any]] | None:
        """Return what is known of a call of the public function, and its tensors, for ``run``; None if it is not known.

        arguments: first those that become the problem's tensors, for the seed dropout_p; then the others.
        """
        known = None if call_cache.is_observed() else call_cache.get(self._signature(arguments))
        if known is None:
            return None
        tensors = list(arguments[: self.num_tensors])
        for i, form in known.forms:
            tensors[i] = form(tensors[i], tensors[0])
        return known, tensors

    def run(self, known: Known, tensors: Sequence[Any]) -> Tensor:
        """Return the output of a call, without PyTorch's dispatcher."""
        if known.needs_grad:
            return self._node.apply(known.forward, known.options, *tensors)[0]
        with torch._C._AutoDispatchBelowAutograd():
            return known.forward(*tensors, *known.options).out

    def __call__(self, problem: P, backend: str | None, arguments: tuple[Any, ...] = ()) -> Tensor:
        """Return the output of a problem; raise ValueError if ``backend`` does not support it.

        arguments: as in ``recall``, which then knows the call if it can be known.
        """
        backend = self.choose(problem, backend)
        tensors: tuple[Any, ...] = problem[: self.num_tensors]
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            if backend == "reference" and self.traced_formula is not None:
                return self.traced_formula(*problem)  # PyTorch's operators in the graph, not the op
        elif backend != "reference" and not call_cache.is_observed():
            needs_grad = autograd.needs_grad(tensors)
            options = (*problem[self.num_tensors :], backend, needs_grad)
            prepared = self._prepared_for((*tensors, *options[:-1]))
            if prepared is not None and not (needs_grad and self.formula is None):
                known = Known(functools.partial(self._forward, prepared), options, needs_grad)
                fields = enumerate(zip(problem._fields, arguments, tensors, strict=False))
                changed = [(i, name) for i, (name, argument, t) in fields if argument is not t]
                if arguments and all(name in CANONICAL_FORMS for _, name in changed):  # none was cast, say
                    forms = [(i, CANONICAL_FORMS[name]) for i, name in changed]
                    call_cache.store(self._signature(arguments), known._replace(forms=forms))
                return self.run(known, tensors)
        return self.forward_op(*problem, backend, False)[0]

    def _signature(self, arguments: tuple[Any, ...]) -> Hashable:
        """Return the signature of a call of the public function; None if it has none."""
        tensors, others = arguments[: self.num_tensors], arguments[self.num_tensors :]
        return call_cache.public_signature(self.function, tensors, others)

    def forward(self, problem: P, backend: str | None) -> Result:
        """Return the result of a problem, the sums of its rows included, without a node in autograd's graph."""
        backend = self.choose(problem, backend)
        own = self.backends[backend].last_arguments(self._prepared_for((*problem, backend)))
        return self.backends[backend].forward(self.checked(problem), None, *own)

    def backward(
        self, problem: P, backend: str | None, grad_out: Tensor, result: Result, needs_grad: NeedsGrad
    ) -> Gradients:
        """Return the gradients of a problem, given the result of ``forward``."""
        args = (grad_out, *result, *problem, self.choose(problem, backend))
        return self._compute_gradients(self._prepared_for((*args, *needs_grad), 1 + _NUM_RESULTS), *args, needs_grad)

    def _prepared_for(self, args: Sequence[Any], num_before: int = 0) -> Prepared | None:
        """Return what was prepared for an op's arguments, a new dict for new ones; None if they have no signature.

        args: without ``save``. num_before: number of tensors before those of the problem.
        """
        bias, num_tensors = num_before + self._bias, num_before + self.num_tensors
        tensors = args[:num_tensors]
        if args[bias] is not None and not args[bias].dim():  # a number
            tensors = (*args[:bias], args[bias].item(), *args[bias + 1 : num_tensors])
        key = call_cache.signature(f"{self.function} {num_before}", tensors, args[num_tensors:])
        if key is None:
            return None
        prepared: Prepared | None = call_cache.get(key)
        if prepared is None:
            call_cache.store(key, prepared := {})
        return prepared

    def choose(self, problem: P, backend: str | None) -> str:
        """Return ``backend`` or that of the context, else the fastest; raise ValueError if it lacks support."""
        if backend is None:
            backend = settings.compiled_backend if torch.compiler.is_compiling() else settings.thread.backend
        if backend is not None:
            reason = self.backends[backend].unavailable(problem)
            if reason is not None:
                raise ValueError(f"{self.function}: backend {backend!r} does not support this call: {reason}")
            return backend
        if self.formula is not None and not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
            return "reference"
        device_type = problem.query.device.type
        for name, candidate in self.backends.items():
            can_be_default = candidate.device_type in (None, device_type) and candidate.can_be_default(problem)
            if can_be_default and candidate.unavailable(problem) is None:
                return name
        raise AssertionError("the backend 'blocked' supports every problem")

    # -- the forward op -------------------------------------------------------------------------------------------

    def _autograd(self, keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        """Call the op below autograd, and record it if a derivative is needed."""
        *fields, backend, _ = args
        if torch._C._len_torch_dispatch_stack() > 0 and autograd.exporting_to_onnx():
            if self.traced_formula is None:
                autograd.refuse_onnx(str(self.forward_op))
            if Problem(*fields).seed is not None:
                raise RuntimeError(f"{self.function} with dropout cannot be exported to ONNX: call eval() first")
            return without_saved(self.traced_formula(*fields))
        if backend == "reference":  # its operators are recorded
            return self._forward(None, *args)
        tensors = args[: self.num_tensors]
        if type(args[0]) is not Tensor and self.problem_type is Problem and "torch.distributed.tensor" in sys.modules:
            from sigattn.ops import sharding

            sharding.add_rules(self.forward_op, self.backward_op, Problem(*fields))
        if forward_ad._current_level >= 0:
            autograd.refuse_tangents(tensors)
        if not autograd.needs_grad(tensors):
            with torch._C._AutoDispatchBelowAutograd():
                return autograd.below_autograd(self.forward_op, keyset)(*args[:-1], False)
        save = type(args[0]) is Tensor  # not in traced graphs, whose sizes may be unknown
        with autograd.recording():
            call = autograd.below_autograd(self.forward_op, keyset)
            return self._node.apply(call, (*args[self.num_tensors : -1], save), *tensors)

    def _forward_kernel(self, *args: Any) -> Result:
        return self._forward(self._prepared_for(args[:-1]), *args)

    def _forward(self, prepared: Prepared | None, *args: Any) -> Result:
        *fields, backend, save = args
        problem, implementation = self.checked(self.problem_type(*fields)), self.backends[backend]
        saved = implementation.saved_weights(problem) if save else None
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            result = implementation.forward(problem, saved, *implementation.last_arguments(prepared))
        if result.row_sums.numel() and self.formula is None:  # needed by the backward pass only
            return result._replace(row_sums=result.row_sums.new_empty(0))
        return result

    def _fake_forward(self, *args: Any) -> Result:
        *fields, backend, save = args
        problem = self.problem_type(*fields)
        saved = self.backends[backend].saved_weights(problem) if save else None
        has_sums = problem.normalize and self.formula is not None and backend != "reference"
        return new_result(problem.query, problem.value.shape[-1], has_sums, saved)

    def _gradients(self, ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * self.num_tensors
        needs_grad = ctx.needs_input_grad[2 : 2 + _NUM_GRADIENTS]
        args = (grad_out, *ctx.saved_tensors, *ctx.rest)
        prepared = None
        if not torch.is_grad_enabled() and not call_cache.is_observed():
            prepared = self._prepared_for((*args, *needs_grad), 1 + _NUM_RESULTS)
        if prepared is not None:
            with torch._C._AutoDispatchBelowAutograd():
                gradients: Any = self._compute_gradients(prepared, *args, needs_grad)
        else:
            gradients = self.backward_op(*args, needs_grad)
        needed = (g if is_needed else None for g, is_needed in zip(gradients, needs_grad, strict=True))
        return (*needed, *(None,) * (self.num_tensors - _NUM_GRADIENTS))

    # -- the backward op ------------------------------------------------------------------------------------------

    def _backward(self, grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
        prepared = self._prepared_for((grad_out, *args[:-1], *args[-1]), 1 + _NUM_RESULTS)
        gradients = self._compute_gradients(prepared, grad_out, *args)
        # an empty tensor stands for a gradient that is not needed, because ops cannot return None
        return tuple([grad_out.new_empty(0) if g is None else g for g in gradients])

    def _compute_gradients(self, prepared: Prepared | None, grad_out: Tensor, *args: Any) -> Gradients:
        result, (*fields, backend, needs_grad) = Result(*args[:_NUM_RESULTS]), args[_NUM_RESULTS:]
        problem, implementation = self.checked(self.problem_type(*fields)), self.backends[backend]
        assert implementation.backward is not None
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if problem.normalize and result.row_sums.dim() == 1:  # a transform's level below has not returned them
                result = self._forward(None, *fields, backend, False)
            own = implementation.last_arguments(prepared)
            return implementation.backward(problem, grad_out, result, NeedsGrad(*needs_grad), *own)

    def _fake_backward(self, grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *fields, _, needs_grad = args[_NUM_RESULTS:]
        new = (torch.empty_like,) * 3 + (lambda t: t.new_empty(t.shape),) * (_NUM_GRADIENTS - 3)
        return tuple(
            new_like(t) if t is not None and needed else grad_out.new_empty(0)
            for new_like, t, needed in zip(new, fields, needs_grad, strict=False)
        )

    def _autograd_of_backward(self, keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        """Call the op below autograd, and record it if its derivative is needed."""
        num_tensors = 1 + _NUM_RESULTS + self.num_tensors
        tensors = args[:num_tensors]
        if forward_ad._current_level >= 0:
            autograd.refuse_tangents(tensors)
        if not autograd.needs_grad(tensors):
            with torch._C._AutoDispatchBelowAutograd():
                return autograd.below_autograd(self.backward_op, keyset)(*args)
        with autograd.recording():
            call = autograd.below_autograd(self.backward_op, keyset)
            return self._backward_node.apply(call, args[num_tensors:], *tensors)

    def _second_gradients(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the derivative of the backward op with respect to its tensors: that of the formula's gradients."""
        grad_out, *tensors = ctx.saved_tensors
        *numbers, _, needs_grad = ctx.rest
        inputs = [grad_out, *tensors[:_NUM_GRADIENTS]]
        first = 3 + _NUM_RESULTS
        is_needed = ctx.needs_input_grad[2], *ctx.needs_input_grad[first : first + _NUM_GRADIENTS]
        needed = [i for i, needed in enumerate(is_needed) if needed]

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            grad, *differentiable = _replace(inputs, needed, values)
            problem = self.problem_type(*differentiable, *tensors[_NUM_GRADIENTS:], *numbers)
            return tuple(
                g for g in self._formula_backward(problem, grad, None, NeedsGrad(*needs_grad)) if g is not None
            )

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            results, pullback = torch.func.vjp(gradients, *(inputs[i] for i in needed))[:2]
            wanted = (grad for grad, needed in zip(grads, needs_grad, strict=True) if needed)
            second = pullback(
                tuple(torch.zeros_like(r) if g is None else g for g, r in zip(wanted, results, strict=True))
            )
        out, *second = _replace([None] * len(inputs), needed, second)
        nothing = (None,) * _NUM_RESULTS  # what the forward pass saved is a function of the other tensors
        return (out, *nothing, *second, *(None,) * (self.num_tensors - _NUM_GRADIENTS))

    # -- the backend "reference" ----------------------------------------------------------------------------------

    def _formula_forward(self, problem: P, saved: Saved | None) -> Result:
        assert self.formula is not None
        return without_saved(self.formula(problem))

    def _formula_backward(self, problem: P, grad_out: Tensor, _: Result | None, needs_grad: NeedsGrad) -> Gradients:
        needed = [i for i, is_needed in enumerate(needs_grad) if is_needed]

        def output(*values: Tensor) -> Tensor:
            assert self.formula is not None
            return self.formula(self.problem_type(*_replace(problem, needed, values)))

        gradients = torch.func.vjp(output, *(problem[i] for i in needed))[1](grad_out)
        return Gradients(*_replace([None] * _NUM_GRADIENTS, needed, gradients))

    # -- FLOPs of the matrix products, without regard to masks, as PyTorch counts its own attention -------------------

    def _forward_flops(self, *args: Any, **_: Any) -> int:
        shapes: Any = self.problem_type(*args[:-2])
        return 2 * math.prod(shapes.query[:-1]) * self.keys_per_query(shapes) * (shapes.query[-1] + shapes.value[-1])

    def _backward_flops(self, *args: Any, **_: Any) -> int:
        shapes: Any = self.problem_type(*args[1 + _NUM_RESULTS : -2])
        width = 3 * shapes.query[-1] + 2 * shapes.value[-1]  # of Q Kᵀ, dQ and dK; of dP and dV
        return 2 * math.prod(shapes.query[:-1]) * self.keys_per_query(shapes) * width


def has_values(t: Tensor) -> bool:
    """Return True if a tensor has values that can be read without synchronising; False within ``torch.func``."""
    return t.device.type == "cpu" and not is_fake(t) and not torch._C._are_functorch_transforms_active()


def _save(ctx: Any, tensors: Sequence[Any], rest: Sequence[Any], result: Sequence[Tensor]) -> Result:
    out, weights, row_sums = result
    # what is saved is not to be seen by the caller
    no_weights = weights if weights.dim() == 1 else weights.new_empty(0)
    no_sums = row_sums if row_sums.dim() == 1 else row_sums.new_empty(0)
    ctx.save_for_backward(out if row_sums.dim() > 1 else no_weights, weights, row_sums, *tensors)
    ctx.rest = rest[:-1]
    ctx.mark_non_differentiable(no_weights, no_sums)
    return Result(out, no_weights, no_sums)


def _save_gradient(ctx: Any, tensors: Sequence[Any], rest: Sequence[Any], result: Any) -> Any:
    ctx.save_for_backward(tensors[0], *tensors[1 + _NUM_RESULTS :])
    ctx.rest = rest
    return result


def _replace(values: Sequence[Any], indices: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return the values with those at some indices replaced by others."""
    result = list(values)
    for i, other in zip(indices, others, strict=True):
        result[i] = other
    return result


# -- proxies, such as those of ``torch.fx.symbolic_trace``, whose calls are recorded in a graph ------------------------


def record(function: Callable[..., Tensor], arguments: dict[str, Any]) -> Any:
    """Return what the proxies return for a call of a function, given the call's arguments by name, operands first."""
    return handle_torch_function(function, list(arguments.values())[:3], **arguments)


def record_module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the proxy of a layer's call, which becomes one node of the graph; None if no argument is a proxy."""
    # the arguments of a root whose forward takes any number of them are one proxy
    for argument in (args,) if isinstance(args, Proxy) else (*args, *kwargs.values()):
        if isinstance(argument, Proxy):
            tracer: Any = argument.tracer
            if module is tracer.root:
                raise TypeError(f"{type(module).__name__} is one node for torch.fx: trace a module that contains it")
            return tracer.create_proxy("call_module", tracer.path_of_module(module), tuple(args), dict(kwargs))
    return None
