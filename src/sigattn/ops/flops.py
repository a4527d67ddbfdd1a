"""FLOPs of the ops for PyTorch's FLOP counter: the matrix products, without regard to masks.

That is PyTorch's convention for its own attention. The counter's module imports Triton if that is installed, which
``import sigattn`` must not do. An import hook therefore registers the formulas when the counter is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

Shape = Sequence[int]
_COUNTER = "torch.utils.flop_counter"
_pending: list[str] = []


def register(*names: str) -> None:
    """Register the formulas of these ops with the FLOP counter: now if it has been imported, otherwise when it is."""
    if _COUNTER in sys.modules:
        _register_formulas(names)
        return
    if not _pending:
        sys.meta_path.insert(0, _CounterFinder())
    _pending.extend(names)


def _register_formulas(names: Sequence[str]) -> None:
    from torch.utils.flop_counter import register_flop_formula

    for name in names:
        register_flop_formula(getattr(torch.ops.sigattn, name))(globals()[name])


class _CounterFinder(MetaPathFinder):
    """Finder that wraps the loader of the counter's module once, and otherwise leaves the import to Python."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _CounterLoader(spec.loader)
        return spec


class _CounterLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        names = _pending.copy()
        _pending.clear()
        _register_formulas(names)


def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of Q Kᵀ and P V."""
    return _products(query, key[2], value, 1, 1)


def backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of Q Kᵀ, dQ and dK (width D), and of dP and dV (width Dv)."""
    return _products(query, key[2], value, 3, 2)


def varlen_forward(query: Shape, key: Shape, value: Shape, *rest: Any, **_: Any) -> int:
    """Return the FLOPs for max_seqlen_k keys per query, an upper bound, because a counter does not know lengths."""
    total, heads, d = query
    return _products((1, heads, total, d), rest[7], value, 1, 1)


def varlen_backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **_: Any) -> int:
    """Return the FLOPs of the five products of the backward pass, for max_seqlen_k keys per query."""
    total, heads, d = query
    return _products((1, heads, total, d), rest[7], value, 3, 2)


def _products(query: Shape, keys: int, value: Shape, narrow: int, wide: int) -> int:
    batch, heads, n, d = query
    return 2 * batch * heads * n * keys * (narrow * d + wide * value[-1])
