"""How many FLOPs the ops take, for PyTorch's FLOP counter: the products, counted in full whatever is masked.

That is PyTorch's convention for its own attention. The counter's module imports Triton where that is installed, which
``import sigattn`` is not to do. So the formulas are handed over as soon as somebody else imports the counter.
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
_waiting: list[str] = []


def register(*names: str) -> None:
    """Tell the FLOP counter what these ops take: now if it has been imported, or else when it is."""
    if _COUNTER in sys.modules:
        _hand_over(names)
        return
    if not _waiting:
        sys.meta_path.insert(0, _Watch())
    _waiting.extend(names)


def _hand_over(names: Sequence[str]) -> None:
    from torch.utils.flop_counter import register_flop_formula

    for name in names:
        register_flop_formula(getattr(torch.ops.sigattn, name))(globals()[name])


class _Watch(MetaPathFinder):
    """Steps in once, when the counter is imported, and lets Python's own machinery do the importing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenHandOver(spec.loader)
        return spec


class _ThenHandOver(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        names = _waiting.copy()
        _waiting.clear()
        _hand_over(names)


def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Q Kᵀ and P V."""
    return _products(query, key[2], value, 1, 1)


def backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Q Kᵀ again, dQ and dK; dP and dV."""
    return _products(query, key[2], value, 3, 2)


def packed_forward(query: Shape, key: Shape, value: Shape, *rest: Any, **_: Any) -> int:
    """Every query against max_seqlen_k keys: an upper bound, for a sequence's own length is not known to a counter."""
    total, heads, d = query
    return _products((1, heads, total, d), rest[7], value, 1, 1)


def packed_backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **_: Any) -> int:
    """The same for the five products of the backward pass."""
    total, heads, d = query
    return _products((1, heads, total, d), rest[7], value, 3, 2)


def _products(query: Shape, keys: int, value: Shape, narrow: int, wide: int) -> int:
    batch, heads, n, d = query
    return 2 * batch * heads * n * keys * (narrow * d + wide * value[-1])
