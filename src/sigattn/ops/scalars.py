"""Conversion of scalar arguments to Python numbers: Python's, NumPy's, 0-d tensors, symbols of a traced graph."""

import numbers
from typing import Any

import torch
from torch import Tensor


def describe(value: Any) -> str:
    """Return a text that describes a value: shape, dtype and device of a tensor, else its repr and type."""
    if not isinstance(value, Tensor):
        return f"{value!r} ({type(value).__name__})"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"


def real(caller: str, name: str, value: Any) -> float:
    """Return a real number as a Python number, a symbol of a traced graph unchanged; raise TypeError for others.

    A 0-d tensor is read, which synchronises if it is on an accelerator.
    """
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # a symbol stands for a number
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype is not torch.bool and not value.is_complex():
        if value.requires_grad:
            raise TypeError(f"{caller}: {name} would lose its gradient: pass a number, and multiply the query instead")
        return value.item()
    if not isinstance(value, (bool, Tensor)) and isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{caller}: {name} must be a number, got {describe(value)}")


def integer(caller: str, name: str, value: Any) -> int:
    """Return an integer as int, as ``real`` does."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # a symbol stands for a number
    if isinstance(value, Tensor) and value.dim() == 0 and is_integral(value):
        return value.item()  # type: ignore[return-value]  # an int, or a symbol while exporting
    if not isinstance(value, (bool, Tensor)) and isinstance(value, numbers.Integral):
        return int(value)
    raise TypeError(f"{caller}: {name} must be an integer, got {describe(value)}")


def is_integral(t: Tensor) -> bool:
    """Return True for a tensor of an integer dtype other than bool."""
    return not t.is_floating_point() and not t.is_complex() and t.dtype is not torch.bool
