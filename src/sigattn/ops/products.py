"""The matrix products of a tile, and where the sigmoid comes for (almost) nothing.

An element-wise activation is an epilogue of the product that feeds it. On a CPU oneDNN has that fusion: its linear
layer applies a sigmoid while the result is still in registers. PyTorch reaches it through an internal operator, so it
is probed for, once per dtype, and everything here also works without it.

Shapes: G heads worked on together, R rows (queries), C columns (keys). oneDNN's linear has no batch: there G = 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_FUSIBLE = (torch.float32, torch.bfloat16)


def fold(t: Tensor, rows: slice) -> Tensor:
    """The chosen rows of the query heads that share a key head, one after another: (G, rep, N, E) → (G, rep·R, E)."""
    if t.shape[1] == 1:
        return t[:, 0, rows]
    return t[:, :, rows].reshape(t.shape[0], -1, t.shape[-1])


class Products:
    """Batched products of PyTorch, on any device and in any dtype; the sigmoid is a pass of its own, in place."""

    def __init__(self, query: Tensor, key: Tensor, bias: float | Tensor, scale: float) -> None:
        """query: (G, rep, N, D). key: (G, M, D). bias: a number, or (G, rep, N, 1)."""
        self.query, self.key, self.scale = query, key, scale
        self.bias = bias if isinstance(bias, Tensor) else query.new_full((1, 1, 1), bias)

    def logits(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        """Logits scale · Q Kᵀ + b: (G, rep·R, C), or (G, C, rep·R) when transposed."""
        q, k = fold(self.query, rows), self.key[:, columns]
        b = fold(self.bias, rows) if self.bias.dim() == 4 else self.bias
        if transposed:
            return torch.baddbmm(b.mT, k, q.mT, alpha=self.scale)
        return torch.baddbmm(b, q, k.mT, alpha=self.scale)

    def weights(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        """σ(scale · Q Kᵀ + b): (G, rep·R, C), or (G, C, rep·R) when transposed."""
        return self.logits(rows, columns, transposed).sigmoid_()

    @staticmethod
    def outer(a: Tensor, b: Tensor) -> Tensor:
        """Product a bᵀ: (G, R, E), (G, C, E) → (G, R, C)."""
        return torch.bmm(a, b.mT)

    @staticmethod
    def combine(p: Tensor, v: Tensor) -> Tensor:
        """Product p v: (G, R, C), (G, C, E) → (G, R, E)."""
        return torch.bmm(p, v)

    @staticmethod
    def combine_transposed(p: Tensor, v: Tensor) -> Tensor:
        """Product pᵀ v: (G, C, R), (G, C, E) → (G, R, E)."""
        return torch.bmm(p.mT, v)


class Capped(Products):
    """Products whose logits are c · tanh(scale · Q Kᵀ / c) + b."""

    def __init__(self, query: Tensor, key: Tensor, bias: float | Tensor, scale: float, softcap: float) -> None:
        super().__init__(query, key, bias, scale)
        self.softcap = softcap

    def logits(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        b = fold(self.bias, rows) if self.bias.dim() == 4 else self.bias
        return self._tanh(rows, columns, transposed).mul_(self.softcap).add_(b.mT if transposed else b)

    def slope(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        """Return the derivative of the capped product by the product, 1 - tanh², of the shape of the logits.

        It is 0 for NaN, which a masked key may hold; where NaN is not masked, dS is NaN already.
        """
        return self._tanh(rows, columns, transposed).square_().neg_().add_(1).nan_to_num_(0.0)

    def _tanh(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        q, k = fold(self.query, rows), self.key[:, columns]
        product = torch.bmm(k, q.mT) if transposed else torch.bmm(q, k.mT)
        return product.mul_(self.scale).div_(self.softcap).tanh_()


class Extended(Products):
    """The same, with the bias as one more column of Q against a column of ones in K, and the scale in Q.

    So the bias is added in the product's own accumulator, in full precision: in bfloat16 it takes two columns, its
    value and what rounding left of it. A logit is then rounded once, where the plain formula rounds three times.
    """

    def __init__(self, query: Tensor, key: Tensor, bias: float | Tensor, scale: float) -> None:
        width = query.shape[-1]
        extra = 2 if query.dtype is torch.bfloat16 else 1
        self.query = query.new_empty(*query.shape[:3], width + extra)  # (G, rep, N, D + extra)
        torch.mul(query, scale, out=self.query[..., :width])
        for column, part in enumerate(_parts(bias, query.dtype, extra), width):
            self.query[..., column] = part
        self.key = F.pad(key, (0, extra), value=1.0)  # (G, M, D + extra)

    def logits(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        q, k = fold(self.query, rows), self.key[:, columns]
        return self.outer(k, q) if transposed else self.outer(q, k)


def _parts(bias: float | Tensor, dtype: torch.dtype, count: int) -> Sequence[Tensor | float]:
    """A bias as a sum of numbers that the dtype can hold: each rounds what the ones before left of it."""
    if not isinstance(bias, Tensor):
        return _parts_of_number(bias, dtype, count)
    rest, parts = bias[..., 0], []  # (G, rep, N), float32 or better
    for _ in range(count):
        parts.append(rest.to(dtype))
        rest = torch.where(parts[-1].isfinite(), rest - parts[-1], 0.0)  # not inf - inf
    return parts


@functools.lru_cache(maxsize=64)
def _parts_of_number(bias: float, dtype: torch.dtype, count: int) -> list[float]:
    parts: list[float] = []
    for _ in range(count):
        rest = bias - math.fsum(parts) if all(map(math.isfinite, parts)) else 0.0  # not inf - inf
        parts.append(torch.tensor(rest, dtype=torch.float64, device="cpu").to(dtype).item())
    return parts


class Fused(Extended):
    """One head at a time by oneDNN's linear x wᵀ, the sigmoid its epilogue: logits never leave the accumulator.

    x and w must be dense; w may be transposed.
    """

    def weights(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        q, k = fold(self.query, rows)[0], self.key[0, columns]
        return (linear(k, q, "sigmoid") if transposed else linear(q, k, "sigmoid")).unsqueeze(0)

    @staticmethod
    def outer(a: Tensor, b: Tensor) -> Tensor:
        return linear(a[0], b[0], "none").unsqueeze(0)

    @staticmethod
    def combine(p: Tensor, v: Tensor) -> Tensor:
        return linear(p[0], v[0].t(), "none").unsqueeze(0)

    @staticmethod
    def combine_transposed(p: Tensor, v: Tensor) -> Tensor:
        if p.dtype is torch.bfloat16:  # measured: here the plain product is the faster way
            return torch.mm(p[0].t(), v[0]).unsqueeze(0)
        # (vᵀ p)ᵀ, because transposing the small operand is cheap and oneDNN reads a transposed w as it stands
        return linear(v[0].t().contiguous(), p[0].t(), "none").t().unsqueeze(0)


def linear(x: Tensor, w: Tensor, activation: str) -> Tensor:
    """Activation(x wᵀ) by oneDNN: (R, E), (C, E) → (R, C)."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, None, activation, [], "")
    return y


def fused_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why oneDNN's fused sigmoid cannot serve this device and dtype; None if it can."""
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    if dtype not in _FUSIBLE:
        return f"it is for {' and '.join(str(d).removeprefix('torch.') for d in _FUSIBLE)}"
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return "this PyTorch has no oneDNN, or it is switched off (torch.backends.mkldnn)"
    return _probe(dtype)


@functools.cache
def keep_memory_warm() -> None:
    """Let glibc's allocator keep the tiles' memory between tiles, once per process.

    It hands blocks above a threshold back to the system as soon as they are freed, and each new tile then pays for
    touching fresh pages, which doubled the time of a forward (docs/log.md). The threshold follows the largest block
    freed so far, up to 32 MiB; so allocate that much, untouched, and free it. Elsewhere this does nothing.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


@functools.cache
def _probe(dtype: torch.dtype) -> str | None:
    """Run the internal operator once on a small problem and compare it with the formula."""
    x = torch.linspace(-2, 2, 12, device="cpu").view(3, 4).to(dtype)
    w = torch.linspace(-1, 3, 20, device="cpu").view(5, 4).to(dtype)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this processor has no bfloat16 products"
        y = linear(x, w, "sigmoid")
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"the operator mkldnn::_linear_pointwise failed: {error}"
    expected = torch.sigmoid(x.double() @ w.double().mT)
    if y.shape != expected.shape or not torch.allclose(y.double(), expected, atol=4 * torch.finfo(dtype).eps):
        return "the operator mkldnn::_linear_pointwise gave a wrong result"
    return None
