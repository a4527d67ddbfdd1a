"""``sigmoidify``: sigmoid attention in models that were written with softmax attention, their weights kept.

A layer that calls ``F.scaled_dot_product_attention`` gets a subclass of its own class, whose forward runs as before
while that one function is answered by ``sigattn.sigmoid_attention``. An ``nn.MultiheadAttention``, which computes its
softmax elsewhere, gets a subclass with a forward of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sigattn.nn.bias import AttentionBias, QueryBias, as_bias
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.ops.attention import sigmoid_attention

SDPA = F.scaled_dot_product_attention


class Replaced(NamedTuple):
    """A layer that was changed.

    Attributes:
        name: within the model ("" for the model itself). kind: its class, as it was.
    """

    name: str
    kind: str


def sigmoidify(
    model: nn.Module,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    bias: AttentionBias | float | None = None,
) -> list[Replaced]:
    """Turn a model's softmax attention into sigmoid attention, in place.

    Weights, parameter names and the state dict stay as they are (a learnable bias is added to it). What was trained
    with softmax must be trained further: the function is another one.

    Args:
        model: any module.
        example: arguments of one forward call, positional or by name. With it, the model is run once (in evaluation
            mode, without gradient) to see which layers call ``F.scaled_dot_product_attention`` and which compute a
            softmax otherwise; without it, that is read off the source of their classes, which misses calls made in
            functions outside (as in transformers: pass an example there).
        bias: b of every layer: a number, one of ``sigattn.nn.bias`` (copied for each layer, where it is learned), or
            None for -log of the number of keys of each call. With a KV cache that number grows from call to call; pass
            ``log_length_bias(context)`` instead.

    Returns:
        The layers that were replaced.

    Raises:
        ValueError: if some attention layer cannot be replaced, naming it; or if there is none. The model is unchanged.

    >>> encoder = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> sigmoidify(encoder)
    [Replaced(name='self_attn', kind='MultiheadAttention')]
    """
    modules = [(n, m) for n, m in model.named_modules() if not _inside_multihead(model, n)]
    if isinstance(bias, QueryBias):
        raise ValueError("sigmoidify: a bias added to Q is not part of what these layers share; take another bias")
    multihead = [(n, m) for n, m in modules if type(m) is nn.MultiheadAttention]
    callers, refused = _by_source(modules) if example is None else _by_running(model, example)
    known = (nn.MultiheadAttention, SigmoidMultiheadAttention)
    refused += [n for n, m in modules if isinstance(m, nn.MultiheadAttention) and type(m) not in known]
    if refused:
        raise ValueError(
            "sigmoidify: these layers compute a softmax themselves, where it cannot be replaced: "
            f"{', '.join(sorted(set(refused)))}. Let them use F.scaled_dot_product_attention (a flag such as "
            'fused_attn=True or attn_implementation="sdpa"), or rewrite them with sigattn.nn.Attention'
        )
    if callers and isinstance(bias, AttentionBias) and (bias.needs_lengths or bias.needs_causal):
        raise ValueError(
            f"sigmoidify: {type(bias).__name__} needs lengths or causality, which {callers[0][0]!r} does not tell; "
            "take another bias"
        )
    if not multihead and not callers:
        hint = " Pass example=(...) to find them by running the model" if example is None else ""
        raise ValueError(f"sigmoidify: {type(model).__name__} has no attention layer that it can replace.{hint}")
    report = []
    for name, module in [*multihead, *callers]:
        kind: Any = type(module)
        report.append(Replaced(name, type(module).__name__))
        module.__class__ = SigmoidMultiheadAttention if (name, module) in multihead else _answered(kind)
        layer: Any = module
        layer.sigmoid_bias = _own(bias)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it packs padded samples for its fused softmax
    return report


def _own(bias: AttentionBias | float | None) -> AttentionBias | None:
    """A layer's own bias: what is learned is learned for each."""
    return None if bias is None else copy.deepcopy(as_bias(bias))


def _inside_multihead(model: nn.Module, name: str) -> bool:
    """Whether a module is the output projection of an nn.MultiheadAttention."""
    return bool(name) and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)


# finding them


Named = list[tuple[str, nn.Module]]


def _by_source(modules: Named) -> tuple[Named, list[str]]:
    """Layers whose class mentions the function, and attention layers which mention a softmax but not the function."""
    callers, refused = [], []
    for name, module in modules:
        if isinstance(module, (nn.MultiheadAttention, Answered)):
            continue
        kind: Any = type(module)
        source = _source(kind)
        if "scaled_dot_product_attention" in source:
            callers.append((name, module))
        elif "softmax" in source and _is_attention(module):
            refused.append(name or type(module).__name__)
    return callers, refused


def _is_attention(module: nn.Module) -> bool:
    return "att" in type(module).__name__.lower()


@functools.cache
def _source(kind: Any) -> str:
    """The source of a class; PyTorch's own layers, and classes without a source, count as saying nothing."""
    if kind.__module__.startswith("torch.nn"):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _by_running(model: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> tuple[Named, list[str]]:
    """The innermost layers within which the function was called, and attention layers that computed a softmax."""
    names = {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    watch = _Watch(running)
    hooks = [m.register_forward_pre_hook(lambda m, _: running.append(m)) for m in names]
    hooks += [m.register_forward_hook(lambda *_: _forget(running.pop()), always_call=True) for m in names]
    modes = {m: m.training for m in names}
    model.eval()
    try:
        with torch.no_grad(), watch:
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*example)
    finally:
        for module, training in modes.items():
            module.training = training
        for hook in hooks:
            hook.remove()
    done = (nn.MultiheadAttention, Answered)
    callers = [(names[m], m) for m in watch.callers if not isinstance(m, done)]
    refused = [names[m] or type(m).__name__ for m in watch.softmax if not isinstance(m, done)]
    return callers, refused


def _forget(_: nn.Module) -> None:
    """A hook that gives None leaves the output as it is."""


class _Watch(TorchFunctionMode):
    """Notes which running module calls what."""

    def __init__(self, running: list[nn.Module]) -> None:
        super().__init__()
        self.running = running
        self.callers: dict[nn.Module, None] = {}  # in order
        self.softmax: dict[nn.Module, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.running:
            if func is SDPA:
                self.callers[self.running[-1]] = None
            elif getattr(func, "__name__", "") in ("softmax", "_softmax"):
                self.softmax.update(dict.fromkeys(m for m in self.running[-1:] if _is_attention(m)))
        return func(*args, **(kwargs or {}))


# answering


class Answered(nn.Module):
    """Mixed into a layer's class: within its forward, the function gives sigmoid attention."""

    softmax_class: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own.

        Raises:
            RuntimeError: if that never called the function, so that its attention would still be softmax.
        """
        answer = _Answer(self)
        with answer:
            result = super().forward(*args, **kwargs)
        if not answer.calls:
            raise RuntimeError(
                f"{self.softmax_class.__name__} was sigmoidified, but this forward did not call "
                "F.scaled_dot_product_attention: it took a path with a softmax of its own (a flag such as "
                "fused_attn=False, or weights asked for)"
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """So that a model can be copied and pickled: the class is made anew."""
        return _rebuild, (self.softmax_class,), self.__dict__


@functools.cache
def _answered(kind: Any) -> type[nn.Module]:
    return type(f"Sigmoid{kind.__name__}", (Answered, kind), {"softmax_class": kind, "__module__": kind.__module__})


def _rebuild(kind: type[nn.Module]) -> nn.Module:
    one: Any = kind
    made = _answered(one)
    return made.__new__(made)


class _Answer(TorchFunctionMode):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SDPA:
            self.calls += 1
            return _sigmoid(self.layer.sigmoid_bias, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sigmoid(
    bias: AttentionBias | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's signature, for inputs (B, H, N, D) or (B, N, D)."""
    three = query.dim() == 3
    if three:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    b = None if bias is None else bias(query.shape[2], key.shape[2], device=query.device)
    out = sigmoid_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, bias=b)
    return out.squeeze(1) if three else out
