"""Autocast: the operators cast their operands as a matrix product does, and compute with autocast disabled."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

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
