"""Find attention over channels, whose queries are channels and whose features are positions (XCiT).

A bias with a coefficient for each feature would tie such a model to the number of positions of the batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.softmax_calls import SDPA_NAME, Finding, is_sdpa


class _QueryFeatures(TorchFunctionMode):
    """Mode that records the number of features of a query in each call of PyTorch's attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_sdpa(func):
            query = args[0] if args else (kwargs or {})["query"]
            self.features.append(query.shape[-1])
        return func(*args, **(kwargs or {}))


def channel_attention(model: nn.Module, run: Callable[[], object], findings: Iterable[Finding]) -> list[Finding]:
    """Return the layers whose attention has more or fewer features where their inputs are shorter.

    Each layer is run again on halves of its inputs, one size after another, except along their last dimension, which
    may be that of the features. A layer that has no weights to determine the number of features is judged by the layer
    around it, and one that does not run on any half counts as ordinary attention.

    Args:
        model: the model. run: runs it. findings: its layers that call PyTorch's attention function.
    """
    layers = {f: _layer_with_weights(model, f.name) for f in findings if f.call == SDPA_NAME}
    depends: dict[nn.Module, bool] = {}
    is_probing = False

    def probe(layer: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal is_probing
        if layer in depends or is_probing:  # a layer inside of another is probed when that runs
            return
        is_probing = True
        depends[layer] = _depends_on_length(layer, args, kwargs)
        is_probing = False

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.no_grad())
        for layer in {m for m in layers.values() if m is not None}:
            handle = layer.register_forward_pre_hook(probe, with_kwargs=True)
            stack.callback(handle.remove)
        run()
    return [f for f, layer in layers.items() if layer is not None and depends.get(layer)]


def _layer_with_weights(model: nn.Module, name: str) -> nn.Module | None:
    """Return a layer, or the nearest one around it, that has a weight matrix; None if there is none."""
    while True:
        layer = model.get_submodule(name)
        if any(sum(size > 1 for size in p.shape) > 1 for p in layer.parameters()):
            return layer
        if not name:
            return None
        name = name.rpartition(".")[0]


def _depends_on_length(layer: nn.Module, args: Any, kwargs: Any) -> bool:
    whole = _features(layer, args, kwargs)
    halves = (_features(layer, *half) for half in _halves(args, kwargs))
    return any(half is not None and half != whole for half in halves)


def _features(layer: nn.Module, args: Any, kwargs: Any) -> list[int] | None:
    """Return the number of features in each attention call of a layer; None if it does not run on these inputs."""
    with _QueryFeatures() as mode:
        try:
            layer.forward(*args, **kwargs)
        except Exception:  # of whatever kind: inputs that do not fit one another
            return None
    return mode.features


def _halves(args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs halved along all dimensions of one size, but the last of each tensor, for each size above 1."""
    sizes = {size for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) for size in t.shape[:-1]}
    for size in sorted(sizes - {0, 1}):

        def halve(value: Any, size: int = size) -> Any:
            if isinstance(value, Tensor):
                for dim in range(value.dim() - 1):
                    if value.shape[dim] == size:
                        value = value.narrow(dim, 0, (size + 1) // 2)
            return value

        yield tree_map(halve, (args, kwargs))
