"""Search for softmax in one run of a model: every call and every operator, with the layer that is running."""

import contextlib
import dataclasses
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from sigattn.nn import softmax_calls as softmax
from sigattn.nn.code_search import calling_methods
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.sigmoid_layer import sigmoid_weights
from sigattn.nn.softmax_calls import Finding
from sigattn.nn.written_softmax import written_softmax

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "_int_mm"})
_PRODUCTS |= {"_sparse_mm", "_sparse_addmm", "_sparse_sparse_matmul"}
_EXPONENTIALS = frozenset({"exp", "exp_", "exp2", "exp2_"})
# reductions of exp(x) by which a softmax may be normalised
_SUMS = frozenset({"sum", "mean", "linalg_vector_norm", "norm", "cumsum"})
_SIGMOID_OPERATORS = frozenset({"sigattn::dense_forward", "sigattn::varlen_forward", "sigattn::kvcache_forward"})
_COPIES = frozenset({"_to_copy", "clone"})
_NO_STORAGE = -1
Example = Sequence[Any] | Mapping[str, Any] | Callable[[], object]


class SearchResult(NamedTuple):
    """Result of running a model once."""

    findings: list[Finding]  # each softmax that was computed
    ran: set[nn.Module]  # the layers that were called
    sigmoid_calls: int  # number of calls of sigmoid attention


def search(model: nn.Module, example: Example, skipped: tuple[type[nn.Module], ...]) -> SearchResult:
    """Run a model once, in evaluation mode and without gradient, and record each softmax it computes.

    A softmax is taken for an attention's if its weights are multiplied with a matrix that is no parameter, or if the
    class of its layer has "att" in its name. Layers that the model calls in threads of its own are observed too, but
    not functions that it calls there outside of a layer (``code_search`` refuses layers whose code starts threads).
    ``example`` has arguments of the forward, or runs the model. Calls of ``skipped`` layers do not count.
    """
    if isinstance(example, Tensor):
        raise TypeError("example must hold arguments of the forward, in a sequence or a mapping: pass (tensor,)")
    trace, uncompiled = _Trace(model, skipped), torch.compiler.set_stance("force_eager")
    with evaluation_mode(model), torch.no_grad(), uncompiled, trace.hooks(model), trace.observed():
        if callable(example):
            example()
        elif isinstance(example, Mapping):
            model(**example)
        else:
            model(*example)
    return SearchResult(trace.findings(), trace.ran, trace.sigmoid_calls)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors and those of torch.func have no storage
        return _NO_STORAGE


@dataclasses.dataclass(eq=False)
class _Site:
    """One softmax: the layer that was running, the name of the call, and ``attention`` as in ``Finding``."""

    module: nn.Module
    call: str
    replaceable: bool
    attention: bool
    over_products: bool = False  # of activations, as Q Kᵀ is, and a router's logits are not
    multiplied: bool = False  # the weights meet a matrix

    @property
    def is_certain(self) -> bool:
        """True if a written softmax is an attention's beyond doubt."""
        return self.over_products or (self.multiplied and softmax.named_as_attention(self.module))


_LOG_SOFTMAX = object()  # mark of a log-softmax, whose exponential is a softmax
_LOG_SUM = object()  # mark of a log-sum-exp, with which x - lse is a log-softmax


class _Exponential:
    """Mark of exp(x), a softmax if it is divided by its own sum, before or after the product with the values."""


class _Sum(NamedTuple):
    """Mark of a sum over an exponential, or of its reciprocal; of any exponential, if it is that of a log-sum-exp."""

    of: _Exponential | None


class _Product(NamedTuple):
    """Mark of an exponential times a matrix of activations, or of ones, a sum; ``plain`` if no exponential is in it."""

    of: _Exponential
    plain: bool


class _Thread(threading.local):
    """State of one thread: the layers whose forward is running, and the modes, which PyTorch has for each thread."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.is_observed: bool = False
        self.modes: contextlib.AbstractContextManager[None] | None = None  # of a thread that the model started
        self.inside_replaceable: bool = False
        self.inside_softmax: bool = False  # of a function that ``written_softmax`` knows


class _Trace:
    """State shared by both modes: the running layers, and the tensors that hold weights of each softmax."""

    def __init__(self, model: nn.Module, skipped: tuple[type[nn.Module], ...]) -> None:
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        # kept alive: activations would have the address of a buffer that the model replaces when it runs
        self.tensors = (*model.parameters(), *model.buffers())
        self.parameters = {_storage(t) for t in self.tensors} - {_NO_STORAGE}
        self.skipped = skipped
        self.thread = _Thread()
        self.ran: set[nn.Module] = set()
        self.sites: list[_Site] = []
        self.sigmoid_calls = 0
        self.weights: Any = WeakTensorKeyDictionary()  # tensor → its marks: sites and parts of a softmax
        self.scores: Any = WeakTensorKeyDictionary()  # products of activations, and what is added to them
        self.exponentials: Any = WeakTensorKeyDictionary()  # exponent → mark of its exponential
        self.constants: Any = WeakTensorKeyDictionary()  # copies of parameters, e.g. under autocast

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        with _Calls(self), _Operators(self):
            self.thread.is_observed = True
            try:
                yield
            finally:
                self.thread.is_observed = False

    @contextlib.contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Track the forward of every layer, in every thread; a module made within a forward counts as that layer.

        The hooks are the innermost, so that the layer's other hooks run outside of its forward, as they do after the
        conversion: their softmax is that of the layer around it.
        """

        def enter(module: nn.Module, *_: Any) -> None:
            thread, running = self.thread, self.thread.running
            if not thread.is_observed:
                thread.modes = self.observed()
                thread.modes.__enter__()
            running.append(module if module in self.names or not running else running[-1])
            self.ran.add(module)

        def leave(*_: Any) -> None:
            thread = self.thread
            thread.running.pop()
            if not thread.running and thread.modes is not None:
                thread.modes.__exit__(None, None, None)
                thread.modes = None

        layers = list(model.modules())
        handles = [nn.Module.register_forward_pre_hook(m, enter) for m in layers]  # scripted layers refuse m.register…
        handles += [nn.Module.register_forward_hook(m, leave, prepend=True, always_call=True) for m in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add(self, call: str, *, replaceable: bool = False, attention: bool = False) -> _Site | None:
        """Record a softmax of the running layer, or of a hook outside of every layer that can be replaced."""
        forward = nn.Sequential.forward  # which only runs layers
        running = [m for m in self.thread.running if not (isinstance(m, nn.Sequential) and type(m).forward is forward)]
        module = self._innermost(running[-1]) if running else _hooked()
        if module not in self.names or any(isinstance(m, self.skipped) for m in (*running, module)):
            return None
        if not running:
            replaceable, call = False, f"{call} in a hook"
        self.ran.add(module)
        site = _Site(module, call, replaceable, attention or softmax.named_as_attention(module))
        self.sites.append(site)
        return site

    def _innermost(self, running: nn.Module) -> nn.Module:
        """Return the running layer, or the one inside it whose method was called directly, which calls no hooks."""
        inside = set(running.modules())
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            code = frame.f_code
            layer = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(layer, nn.Module) and layer in inside and _attends(type(layer), frame):
                return layer
        return running

    def findings(self) -> list[Finding]:
        """Return one finding for each layer and value of ``replaceable``, in the order of the model's layers."""
        written = [site for site in self.sites if site.call == softmax.SOFTMAX_NAME]
        stay = {site.module for site in written if not (site.replaceable and site.attention and site.is_certain)}
        for site in written:  # replaceable only where every softmax of the layer is
            site.replaceable = site.replaceable and site.module not in stay
        sites: dict[tuple[nn.Module, bool], list[_Site]] = {}
        for site in self.sites:
            sites.setdefault((site.module, site.replaceable), []).append(site)
        findings = []
        for (module, replaceable), same in sites.items():
            attention = any(site.attention for site in same) and not softmax.known_for_another_softmax(module)
            call = softmax.SOFTMAX_NAME if any(site.call == softmax.SOFTMAX_NAME for site in same) else same[-1].call
            findings.append(Finding(self.names[module], module, call, replaceable, attention))
        order = {module: i for i, module in enumerate(self.names)}
        return sorted(findings, key=lambda f: order[f.module])

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return True for a parameter or a buffer, a view of one, or a copy in another dtype."""
        return tensor in self.constants or _storage(tensor) in self.parameters


def _attends(kind: type[nn.Module], frame: types.FrameType) -> bool:
    """Return True for the forward of a class of layers, and for other methods that call an attention function.

    A method that PyTorch calls is a hook: it was bound before the conversion, which therefore does not change it.
    """
    method = frame.f_code.co_name
    if method == "forward":
        return frame.f_code is not nn.Sequential.forward.__code__
    return method in calling_methods(kind) and not _calls_hooks(frame.f_back)


def _calls_hooks(frame: types.FrameType | None) -> bool:
    """Return True for a frame of ``nn.Module.__call__``, which calls hooks and forward."""
    return frame is not None and frame.f_code.co_filename == torch.nn.modules.module.__file__


def _hooked() -> Any:
    """Return the layer whose hook is running outside of every forward, or None."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if _calls_hooks(frame))
    return next((frame.f_locals.get("self") for frame in frames), None)


class _Calls(TorchFunctionMode):
    """Mode that records calls of attention functions that sigmoid attention can replace."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace = self.trace
        thread, kwargs = trace.thread, kwargs or {}
        if thread.inside_replaceable:
            return func(*args, **kwargs)
        call = softmax.SDPA_NAME if softmax.is_sdpa(func) else softmax.MHA_NAME if func is softmax.MHA else None
        if call is not None:
            trace.add(call, replaceable=True, attention=True)
        trace.sigmoid_calls += func is sigmoid_weights
        thread.inside_replaceable = call is not None or func is sigmoid_weights
        thread.inside_softmax = written_softmax(func, args, kwargs) is not None
        try:
            return func(*args, **kwargs)
        finally:
            thread.inside_replaceable = thread.inside_softmax = False


class _Operators(TorchDispatchMode):
    """Mode that records softmax and attention operators, and tracks the weights of a softmax to a matrix product."""

    supports_higher_order_operators = True

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        trace = self.trace
        if trace.thread.inside_replaceable:
            return result
        name: str = func.name() if callable(getattr(func, "name", None)) else str(func)
        name = name.partition(".")[0]
        trace.sigmoid_calls += name in _SIGMOID_OPERATORS
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        base = name.rpartition("::")[2]
        if (kind := softmax.operator_kind(name)) is not None:
            written = kind == "softmax" and trace.thread.inside_softmax
            site = trace.add(base.lstrip("_"), replaceable=written, attention=kind == "attention")
            if site is not None:
                site.over_products = inputs[0] in trace.scores
                for output in outputs if kind == "softmax" else ():
                    trace.weights[output] = {site}
        elif base in _PRODUCTS:
            factors = inputs[:2] if base == "linear" else inputs[-2:]
            self._multiply(factors, outputs[0])
            if not any(map(trace.is_parameter, factors)):
                trace.scores[outputs[0]] = True
        elif base == "_log_softmax":
            trace.weights[outputs[0]] = {_LOG_SOFTMAX}
        elif base == "logsumexp":
            trace.weights[outputs[0]] = {_LOG_SUM}
        elif base in _EXPONENTIALS or (base == "pow" and not isinstance(args[0], Tensor)):
            trace.weights[outputs[0]] = self._exponential(inputs[0])
        elif base in _SUMS:
            marks = trace.weights.get(inputs[0], ())
            # a mean of a softmax's weights over heads is weights
            weights = {m for m in marks if isinstance(m, _Site)} if base != "sum" else set()
            trace.weights[outputs[0]] = weights | {_Sum(m) for m in marks if isinstance(m, _Exponential)}
        elif len(inputs) != 2 or not (outputs and self._normalize(base.rstrip("_"), inputs[0], inputs[1], outputs[0])):
            self._carry(base, inputs, outputs)
        return result

    def _exponential(self, exponent: Tensor) -> set[Any]:
        """Return the marks of an exponential; that of a log-softmax is a softmax."""
        trace = self.trace
        marks = trace.weights.get(exponent, ())
        if _LOG_SOFTMAX in marks and (site := trace.add("exp")) is not None:
            return {site}
        if _LOG_SUM in marks:
            return {_Sum(None)}
        return {trace.exponentials.setdefault(exponent, _Exponential())}  # one, also if it is computed twice

    def _normalize(self, operation: str, left: Tensor, right: Tensor, output: Tensor) -> bool:
        """Return True if an operation of two tensors makes a softmax or its logarithm, whose marks it then sets."""
        if operation == "sub" and _LOG_SUM in self.trace.weights.get(right, ()):
            self.trace.weights[output] = {_LOG_SOFTMAX}
            return True
        by_reciprocal = operation == "mul"
        divided = (by_reciprocal or operation == "div") and self._divide(left, right, output)
        return divided or (by_reciprocal and self._divide(right, left, output))

    def _divide(self, dividend: Tensor, divisor: Tensor, output: Tensor) -> bool:
        """Record a softmax written as exp(x) / exp(x).sum(), and return True if this division is one."""
        trace = self.trace
        divisors = trace.weights.get(divisor, ())
        sums = {m.of for m in divisors if isinstance(m, _Sum) or (isinstance(m, _Product) and m.plain)}
        marks = trace.weights.get(dividend, ())
        multiplied = any(m.of in sums or None in sums for m in marks if isinstance(m, _Product))
        if not multiplied and not any(m in sums or None in sums for m in marks if isinstance(m, _Exponential)):
            return False
        site = trace.add("exp", attention=multiplied)
        if site is not None:
            trace.weights[output] = {site}
        return True

    def _multiply(self, factors: list[Tensor], output: Tensor) -> None:
        """Mark weights times activations as an attention, and the product of weights and a parameter as weights."""
        trace = self.trace
        products: set[Any] = set()
        for weights, other in (factors, factors[::-1]):
            marks = trace.weights.get(weights, ())
            if marks and not trace.is_parameter(other):
                sites = [m for m in marks if isinstance(m, _Site)]
                over_products = any(site.over_products for site in sites)  # of a sum of weights, as in ConViT, too
                for site in sites:
                    site.attention = site.multiplied = True
                    site.over_products |= over_products
                plain = not trace.weights.get(other)  # in linear attention it is a product of an exponential
                products |= {_Product(m, plain) for m in marks if isinstance(m, _Exponential)}
            elif marks and output.numel() == weights.numel():  # a learned mixture of heads
                products |= set(marks)
        if products:
            trace.weights[output] = products

    def _carry(self, base: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Mark views, masked, dropped and scaled weights as weights, but not an output larger than the weights."""
        trace = self.trace
        if base in _COPIES and inputs and trace.is_parameter(inputs[0]):
            trace.constants[outputs[0]] = True
            return
        scores = [t.numel() for t in inputs if t in trace.scores]
        for output in outputs if scores else ():
            if output.numel() == max(scores):
                trace.scores[output] = True
        marked = [t for t in inputs if t in trace.weights]
        if not marked:
            return
        marks = set().union(*(trace.weights[t] for t in marked))
        largest = max(t.numel() for t in marked)
        for output in outputs:
            if len(inputs) == 1 or base == "cat" or output.numel() <= largest:
                trace.weights[output] = trace.weights.get(output, set()) | marks
