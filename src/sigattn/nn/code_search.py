"""Search for softmax in the code of a model's layers: every function that a layer's methods can reach."""

import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sigattn.nn.attention import Attention
from sigattn.nn.softmax_calls import (
    ATTENTION_NAMES,
    CONTAINERS,
    INTERFACE_NAME,
    MHA_NAME,
    OPAQUE_NAMES,
    PRODUCT_NAMES,
    SDPA_NAME,
    SOFTMAX_MODULES,
    SOFTMAX_NAMES,
    THREAD_NAMES,
    Finding,
    is_sdpa,
    named_as_attention,
)

_CALLS = {INTERFACE_NAME, *ATTENTION_NAMES, *SOFTMAX_NAMES, *PRODUCT_NAMES, *THREAD_NAMES}
_NOT_FOLLOWED = frozenset({"torch", "numpy", "sigattn"})
_NOT_RUN = frozenset({"__init__", "__repr__", "__setstate__", "__getstate__", "reset_parameters", "init_weights"})
_CALLS_OF_ACTIVATION = {"softmax": frozenset({SDPA_NAME}), "performer": frozenset({"softmax", "bmm"})}
_DEPTH = 4


def search(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]], known: set[nn.Module] | None = None
) -> list[Finding]:
    """Find each softmax that the code of some of a model's layers can compute.

    A layer that can reach both ``F.scaled_dot_product_attention`` and a softmax, selected by a flag, counts as
    replaceable, unless it can start threads. A softmax is taken for an attention's unless its layer, and the layer
    around it, multiply no matrices. ``known`` modules, None for the model's, need no report if a layer's list has them.
    """
    known = set(model.modules()) if known is None else known
    findings = []
    for name, module in modules:
        calls = reachable_calls(module)
        if isinstance(module, SOFTMAX_MODULES) and name and SDPA_NAME in reachable_calls(_around(model, name)):
            continue  # a path that the layer around it does not take after the conversion (it would raise)
        if call := next((c for c in (SDPA_NAME, MHA_NAME) if c in calls), None):
            threads = starts_threads(module)
            call = f"{call}, perhaps in another thread" if threads else call
            findings.append(Finding(name, module, call, replaceable=not threads, attention=True))
        elif call := _unregistered_attention(module, known):
            findings.append(Finding(name, module, call, replaceable=False, attention=True))
        elif found := sorted(calls & OPAQUE_NAMES) or sorted(calls & SOFTMAX_NAMES):
            attention = found[0] in OPAQUE_NAMES or named_as_attention(module) or _multiplies(model, name, calls)
            findings.append(Finding(name, module, found[0], replaceable=False, attention=attention))
    return findings


def search_hooks(modules: Iterable[tuple[str, nn.Module]]) -> list[Finding]:
    """Find the softmax of the forward hooks of layers, which run outside of forward and cannot be replaced."""
    findings = []
    for name, module in modules:
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        calls = _calls_of_values(hooks, frozenset())
        if found := sorted(calls & ATTENTION_NAMES) or sorted(calls & SOFTMAX_NAMES):
            attention = bool(calls & (ATTENTION_NAMES | PRODUCT_NAMES)) or named_as_attention(module)
            findings.append(Finding(name, module, f"{found[0]} in a hook", replaceable=False, attention=attention))
    return findings


def _around(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _multiplies(model: nn.Module, name: str, calls: frozenset[str]) -> bool:
    """Return True if a layer, or the nearest layer around it that is no container, multiplies matrices."""
    if calls & PRODUCT_NAMES:
        return True
    module = model.get_submodule(name)
    while name:
        around, name = _around(model, name), name.rpartition(".")[0]
        if not isinstance(around, CONTAINERS):
            siblings = around.children() if isinstance(module, SOFTMAX_MODULES) else ()
            return any(reachable_calls(m) & PRODUCT_NAMES for m in (around, *siblings))
    return False


def _unregistered_attention(module: nn.Module, known: set[nn.Module]) -> str | None:
    """Return the call and the attribute of an attention in a list, tuple or dictionary that is no part of the model."""
    for attribute, value in vars(module).items():
        members = tree_leaves(value) if type(value) in (list, tuple, dict) else [value]
        for member in (m for m in members if isinstance(m, nn.Module)):
            inside = set(member.modules())
            if member in known or module in inside:  # registered, or a reference back to the model around the layer
                continue
            findings = search(member, member.named_modules(), known | inside)
            if call := next((f.call for f in findings if f.attention), None):
                return f"{call} of a module in self.{attribute}, which is not registered"
    return None


def reachable_calls(module: nn.Module) -> frozenset[str]:
    """Return the names of attention, softmax and product functions that the methods of a layer can reach.

    Functions of other modules are followed, PyTorch's own are not.
    """
    if isinstance(module, SOFTMAX_MODULES):
        return frozenset({"softmax"})
    if isinstance(module, torch.jit.ScriptModule):
        return _calls_of_graph(module)
    if isinstance(module, Attention):
        return _CALLS_OF_ACTIVATION.get(module.activation, frozenset())
    if type(module) is nn.MultiheadAttention:
        return frozenset({MHA_NAME})
    kind: Any = type(module)
    calls = calls_of_class(kind) | _calls_of_values(vars(module).values(), _names_of_class(kind))
    if isinstance(module, torch.fx.GraphModule):
        calls |= _names_in(kind.forward) & _CALLS  # the class is made for the graph
    if isinstance(module, nn.MultiheadAttention) and not calls & SOFTMAX_NAMES:
        calls |= {MHA_NAME}  # by its base class
    return calls - {n for n, m in module.named_children() if m is not None}  # self.softmax(x) is the submodule's call


def starts_threads(module: nn.Module) -> bool:
    """Return True if the forward of a layer can compute a softmax or attention and run functions in other threads."""
    return bool(_calls_of_forward(module) & THREAD_NAMES) and forward_attends(module)


def forward_attends(module: nn.Module) -> bool:
    """Return True if the forward of a layer, with the methods that it uses, can compute a softmax or attention."""
    return bool(_calls_of_forward(module) & (ATTENTION_NAMES | SOFTMAX_NAMES))


def _calls_of_forward(module: nn.Module) -> frozenset[str]:
    kind: Any = type(module)
    names = _names_of_class(kind)
    return _calls_of_helper(kind, frozenset({"forward"}), _DEPTH) | _calls_of_values(vars(module).values(), names)


def calling_methods(kind: Any) -> list[str]:
    """Return the names of a class's methods, other than forward, that can reach a function that can be replaced."""
    names = {n for n, f in _methods(kind) if _calls_of_function(f, _DEPTH) & {SDPA_NAME, MHA_NAME}}
    return sorted(n for n in names - {"forward"} if isinstance(inspect.getattr_static(kind, n), types.FunctionType))


def autograd_functions(kind: Any) -> set[type[torch.autograd.Function]]:
    """Return the autograd functions around a softmax or attention that the methods of a class of layers can name."""
    found, seen = set[Any](), set[Any]()
    waiting = [function for _, function in _methods(kind)]
    while waiting:
        function = waiting.pop()
        seen.add(function)
        for value in _values_named(function, _names_in(function)):
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                found.add(value)
            elif not isinstance(value, type) and _followed(getattr(value, "__module__", None)):
                waiting += [f for f in _functions_in(value) if f not in seen]
    attention = ATTENTION_NAMES | SOFTMAX_NAMES
    return {f for f in found if _calls_of_helper(f, frozenset({"forward"}), _DEPTH) & attention}


def _calls_of_graph(scripted: Any) -> frozenset[str]:
    try:
        graph = str(scripted.graph)
    except (AttributeError, RuntimeError):  # a scripted module without forward
        return frozenset()
    return frozenset(name for name in _CALLS if f"aten::{name}(" in graph)


@functools.cache
def calls_of_class(kind: Any) -> frozenset[str]:
    """Return the names of such functions that the methods of a class of layers can reach."""
    calls = frozenset().union(*(_calls_of_function(function, _DEPTH) for _, function in _methods(kind)))
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes |= vars(base) if _followed(base.__module__) else dict.fromkeys(vars(base))
    # no methods, but functions of PyTorch, or tables of functions
    values = [getattr(v, "__func__", v) for v in attributes.values() if not any(_functions_in(v))]
    return calls | _calls_of_values(values, _names_of_class(kind))


@functools.cache
def _names_of_class(kind: Any) -> frozenset[str]:
    return frozenset().union(*(_names_in(function) for _, function in _methods(kind)))


@functools.cache
def _calls_of_helper(kind: Any, names: frozenset[str], depth: int) -> frozenset[str]:
    """Return the calls of a class in its methods that code with these names can reach."""
    methods = _methods(kind)
    waiting = names | ({"forward", "backward"} if issubclass(kind, torch.autograd.Function) else {"__call__"})
    seen, calls = set[str](), set[str]()
    while waiting := waiting - seen:
        seen |= waiting
        functions = [function for name, function in methods if name in waiting]
        calls.update(*(_calls_of_function(function, depth) for function in functions))
        waiting = frozenset().union(*map(_names_in, functions))
    return frozenset(calls)


@functools.cache
def _methods(kind: type) -> list[tuple[str, types.FunctionType]]:
    """Return names and methods of a class as the class finds them, those which it inherits included.

    A method that is overridden counts where the one that overrides it calls ``super``. A base class without a forward,
    such as the one with which transformers loads and saves models, counts with the methods that the others use.
    """
    hidden: set[str] = set()
    methods: list[tuple[str, types.FunctionType]] = []
    helpers: list[tuple[str, types.FunctionType]] = []
    for base in kind.__mro__:
        if not _followed(base.__module__):
            hidden |= vars(base).keys()
            continue
        is_layer = base is kind or getattr(base, "forward", nn.Module.forward) is not nn.Module.forward
        found = {n: list(_functions_in(a)) for n, a in vars(base).items() if n not in hidden and n not in _NOT_RUN}
        (methods if is_layer else helpers).extend((name, f) for name, functions in found.items() for f in functions)
        hidden |= {n for n, functions in found.items() if not any("super" in f.__code__.co_names for f in functions)}
    names = frozenset().union(*(_names_in(f) for _, f in methods))
    while used := [m for m in helpers if m[0] in names]:
        helpers = [m for m in helpers if m not in used]
        names = names.union(*(_names_in(f) for _, f in used))
        methods += used
    return methods


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a method, a property or a partial, without their decorators and torch.compile."""
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    else:
        parts = [getattr(value, "__func__", value)]
    for part in parts:
        function = getattr(part, "_torchdynamo_orig_callable", part)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, types.FunctionType):
            yield function


def _followed(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    if package == "torch":
        return (module or "").startswith("torch.ao.")  # its quantizable attention computes a softmax of its own
    return package not in _NOT_FOLLOWED and package not in sys.stdlib_module_names


@functools.cache
def _calls_of_function(function: types.FunctionType, depth: int) -> frozenset[str]:
    """Return the calls of a function, and of the functions that it names, to a depth."""
    names, codes = _names_in(function), list(_codes(function.__code__))
    calls = names & _CALLS
    instructions = itertools.chain.from_iterable(map(dis.get_instructions, codes))
    if any(i.argrepr in ("@", "@=") or i.opname.endswith("MATRIX_MULTIPLY") for i in instructions):
        calls |= {"bmm"}
    if "getattr" in names:  # getattr(F, "softmax")
        calls |= {c for code in codes for c in code.co_consts if isinstance(c, str)} & _CALLS
    return calls | _calls_of_values(_values_named(function, names), names, depth)


def _calls_of_values(values: Iterable[Any], names: frozenset[str], depth: int = _DEPTH) -> frozenset[str]:
    return frozenset().union(*(_calls_of_value(value, names, depth) for value in values))


def _calls_of_value(value: Any, names: frozenset[str], depth: int) -> frozenset[str]:
    """Return the calls that code with these names can reach through a function, object, class, or a table of these."""
    if isinstance(value, (nn.Module, Tensor, types.ModuleType)):
        return frozenset()
    if isinstance(value, functools.partial):
        value = (value.func, *value.args, *value.keywords.values())
    if type(value) in (dict, list, tuple):
        members = value.values() if isinstance(value, dict) else value
        return _calls_of_values(members, names, depth - 1) if depth else frozenset()
    if is_sdpa(value):
        return frozenset({SDPA_NAME})
    calls = frozenset(base.__name__ for base in type(value).__mro__) & THREAD_NAMES  # self.pool.map
    calls |= {getattr(value, "__name__", "")} & _CALLS if callable(value) else set()
    if depth == 0:
        return calls
    if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, type):
        return calls | _calls_of_value(value.__self__, names, depth)  # ``apply`` of an autograd function, PyTorch 2.14
    if isinstance(value, types.MethodType):  # of an object or, as an autograd function's ``apply``, of a class
        calls |= _calls_of_value(value.__self__, names | {value.__name__}, depth)
    if isinstance(value, torch.jit.ScriptFunction):
        return _calls_of_graph(value)
    if functions := list(_functions_in(value)):
        return calls.union(*(_calls_of_function(f, depth - 1) for f in functions if _followed(f.__module__)))
    kind: Any = value if isinstance(value, type) else type(value)
    is_helper = _followed(kind.__module__) and not issubclass(kind, (nn.Module, Tensor))
    return calls | _calls_of_helper(kind, names, depth - 1) if is_helper else calls


def _values_named(function: types.FunctionType, names: frozenset[str]) -> Iterator[Any]:
    """Yield the values that a function can use: defaults, closures, globals, and what it names in modules."""
    values = [function.__globals__[n] for n in names if n in function.__globals__]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            values.append(cell.cell_contents)
    for value in values:
        if isinstance(value, types.ModuleType) and _followed(value.__name__):
            yield from (vars(value)[n] for n in names if n in vars(value))
        else:
            yield value


def _names_in(function: types.FunctionType) -> frozenset[str]:
    return frozenset(name for code in _codes(function.__code__) for name in code.co_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
