"""Outcome of a conversion without batches for each model of timm: exact, refused by name, or without attention."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from typing import NamedTuple

import timm
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conversion.replacing import replace


class Outcome(NamedTuple):
    """verdict: "exact", "refused" or "no attention". detail: classes of the layers. remaining: number of softmaxes."""

    verdict: str
    detail: str
    remaining: int


class SoftmaxOperators(TorchDispatchMode):
    """Counts the operators that compute a softmax."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.count += any(s in name for s in ("softmax", "attention")) and "log_softmax" not in name
        return func(*args, **(kwargs or {}))


def formula(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *, bias=None):
    """σ(scale · Q Kᵀ + b) V; without a bias, b = -log of the keys, or of those that a mask shows."""
    assert not is_causal
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    n = torch.tensor(float(k.shape[-2]), dtype=q.dtype)
    if attn_mask is not None:
        n = (attn_mask.expand(*attn_mask.shape[:-1], k.shape[-2]) > -1000).any(-2, keepdim=True)
        n = n.any(-3, keepdim=True).sum(-1, keepdim=True).to(q.dtype)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits + (-n.log() if bias is None else bias)
    return torch.sigmoid(logits if attn_mask is None else logits + attn_mask) @ v


class WrittenFormula(TorchFunctionMode):
    """Computes σ(logits - log M) where these layers compute a softmax."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while getattr(func, "__name__", "") == "softmax" and frame is not None:
            layer = frame.f_locals.get("self")
            if isinstance(layer, torch.nn.Module) and layer in self.layers:
                visible = args[0] > -1000
                n = visible.sum(-1, keepdim=True).clamp(min=1)
                return torch.sigmoid(args[0] - n.log()).where(visible, 0)
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def formula_instead_of_softmax(bias=None):
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = functools.partial(formula, bias=bias)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


@torch.no_grad()
def outcome(name: str, size: tuple[int, int, int] | None = None, **options) -> Outcome:
    """Convert a model, compare it with the formula in its own layers, and count the softmaxes that ran.

    Raises:
        AssertionError: if the model differs from the formula, or computes a softmax that the report does not list.
    """
    torch.manual_seed(0)
    plain = timm.create_model(name, **options).eval()
    x = torch.randn(1, *(size or plain.default_cfg["input_size"]))
    for by_example in (False, True):
        model = copy.deepcopy(plain)
        try:
            report = replace(model, (x,) if by_example else None)
        except ValueError as error:
            result = refusal(str(error), plain, x)
            continue
        replaced = sorted({r.kind for r in report if r.is_sigmoid})
        written = {plain.get_submodule(r.name) for r in report if r.outcome == "materialised"}
        remaining = [r for r in report if not r.is_sigmoid]
        with SoftmaxOperators() as seen:
            ours = model(x)
        assert remaining or not seen.count, f"{name}: {seen.count} softmaxes are not listed"
        compare(name, plain, x, ours, written)
        result = Outcome("exact", ", ".join(replaced), len(remaining))
    return result


def refusal(message: str, plain: torch.nn.Module, x: torch.Tensor) -> Outcome:
    if "no softmax attention" in message:
        with SoftmaxOperators() as seen:
            plain(x)
        return Outcome("no attention", "", seen.count)
    assert "cannot be replaced" in message
    kinds = {part.partition(":")[0] for part in message.split(" (")[1:] if ": " in part[:60]}
    return Outcome("refused", ", ".join(sorted(kinds)), 0)


def compare(name: str, plain: torch.nn.Module, x: torch.Tensor, ours: torch.Tensor, written: set) -> None:
    """The error may be twice that of the formula in the same dtype, both judged by the formula in float64."""
    names = {n for n, m in plain.named_modules() if m in written}
    plain = copy.deepcopy(plain)
    for layer in plain.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = True
    wide = copy.deepcopy(plain).double()
    with formula_instead_of_softmax():
        with WrittenFormula({plain.get_submodule(n) for n in names}):
            single = plain(x)
        with WrittenFormula({wide.get_submodule(n) for n in names}):
            truth = wide(x.double())
    error, allowed = (ours - truth).abs().max(), 2 * (single - truth).abs().max() + 1e-5 * truth.abs().max()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
