"""FLOPs of the ops for PyTorch's FLOP counter: the matrix products, without regard to masks.

That is PyTorch's convention for its own attention. The counter's module imports Triton if that is installed, which
``import sigattn`` must not do. An import hook therefore registers the formulas when the counter is imported.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch._ops import OpOverload

_COUNTER = "torch.utils.flop_counter"
Formula = Callable[..., int]
_pending: list[tuple[OpOverload, Formula]] = []


def register(op: OpOverload, formula: Formula) -> None:
    """Register the formula of an op with the FLOP counter: now if it has been imported, otherwise when it is."""
    if _COUNTER in sys.modules:
        _register_formula(op, formula)
        return
    if not _pending:
        sys.meta_path.insert(0, _CounterFinder())
    _pending.append((op, formula))


def _register_formula(op: OpOverload, formula: Formula) -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(op.overloadpacket)(formula)


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
        pending = _pending.copy()
        _pending.clear()
        for op, formula in pending:
            _register_formula(op, formula)


def forward(query: Sequence[int], num_keys: int, value: Sequence[int]) -> int:
    """Return the FLOPs of Q Kᵀ and P V, given the shapes (…, D) and (…, Dv), and the number of keys of a query."""
    return 2 * math.prod(query[:-1]) * num_keys * (query[-1] + value[-1])


def backward(query: Sequence[int], num_keys: int, value: Sequence[int]) -> int:
    """Return the FLOPs of Q Kᵀ, dQ and dK (width D), and of dP and dV (width Dv)."""
    return 2 * math.prod(query[:-1]) * num_keys * (3 * query[-1] + 2 * value[-1])
