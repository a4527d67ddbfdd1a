"""Checks of annotations at run time: those of jaxtyping and beartype, in less time."""

import functools
import inspect
import types
import typing

import jaxtyping
import torch
from jaxtyping import _decorator

check_shapes = jaxtyping.jaxtyped


def has_shape(annotation):
    """Return True if jaxtyping's types are within an annotation, or a list of them, as a callable's arguments are."""
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return any(map(has_shape, parts))


def jaxtyped(function=None, *, typechecker):
    """Decorate a function as ``jaxtyping.jaxtyped`` does, but at its first call, and with shapes where it has any.

    jaxtyping binds the arguments of each call to their names and checks them twice, which took a fifth of the time of
    all tests.
    """
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not inspect.isfunction(function):
        return check_shapes(function, typechecker=typechecker)
    check = None

    @functools.wraps(function)
    def checked(*args, **kwargs):
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        nonlocal check
        check = check or with_check(function, typechecker)
        return check(*args, **kwargs)

    return checked


def with_check(function, typechecker):
    """Return a function with jaxtyping's check if it has shapes, otherwise with beartype's alone."""
    named = function.__annotations__.items()
    hints = {name: _decorator._destring_annotation(hint, function.__globals__) for name, hint in named}
    if has_shape([*hints.values()]):
        return check_shapes(function, typechecker=typechecker)
    copied = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy = types.FunctionType(*copied)
    copy.__kwdefaults__, copy.__qualname__, copy.__annotations__ = function.__kwdefaults__, function.__qualname__, hints
    return typechecker(copy)


jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped
