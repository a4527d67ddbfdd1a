"""Matrix products of a tile, with the sigmoid fused into the product where oneDNN supports it.

On a CPU, oneDNN's linear layer applies a sigmoid as an epilogue, while the result is in registers, at almost no cost.
PyTorch exposes it by an internal operator. Its availability is tested once per dtype; without it, batched products and
a separate sigmoid are used.

Shapes: G heads in a batch, R rows (queries), C columns (keys). oneDNN's linear has no batch dimension: there G = 1.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_FUSIBLE = (torch.float32, torch.bfloat16)


def fold(t: Tensor, rows: slice) -> Tensor:
    """Concatenate the given rows of the query heads that share a key head: (G, rep, N, E) → (G, rep·R, E)."""
    if t.shape[1] == 1:
        return t[:, 0, rows]
    return t[:, :, rows].flatten(1, 2)


class Scratch:
    """Memory of tiles that is used again for every tile, because writing to newly allocated memory is slower."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def tile(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tile in the memory of that name; the previous tile there is overwritten."""
        size = math.prod(shape) * like.itemsize
        if size > _LARGEST_SCRATCH:
            return like.new_empty(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # else it could not be written outside inference mode
                buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return buffer[:size].view(like.dtype).view(shape)


_LARGEST_SCRATCH = 16 << 20
_kept = threading.local()


def scratch(device: torch.device) -> Scratch:
    """Return memory for tiles; on a CPU that of this thread, which is kept."""
    if device.type != "cpu":
        return Scratch()
    found: Scratch | None = getattr(_kept, "scratch", None)
    if found is None:
        found = _kept.scratch = Scratch()
    return found


class Products:
    """Batched products of PyTorch, on any device and in any dtype, with a separate in-place sigmoid.

    Attributes:
        scratch: memory of the results with the shape of a tile; None for new memory.
    """

    scratch: Scratch | None = None

    def __init__(self, query: Tensor, key: Tensor, bias: float | Tensor, scale: float) -> None:
        """Store query (G, rep, N, D), key (G, M, D), bias (a number, or (G, rep, N, 1)) and scale."""
        # 0 not as alpha, with which the product is not computed, so that a NaN in it is lost
        self.query, self.scale = (query * 0, 1.0) if scale == 0 else (query, scale)
        self.key = key
        self.bias: Tensor = bias if isinstance(bias, Tensor) else query.new_full((1, 1, 1), bias)

    def logits(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        """Return the logits scale · Q Kᵀ + b: (G, rep·R, C), or (G, C, rep·R) if transposed."""
        q, k = fold(self.query, rows), self.key[:, columns]
        b = fold(self.bias, rows) if self.bias.dim() == 4 else self.bias
        if transposed:
            q, k, b = k, q, b.mT
        return torch.baddbmm(b, q, k.mT, alpha=self.scale, out=self._tile("logits", q, k))

    def weights(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        """Return the weights σ(scale · Q Kᵀ + b): (G, rep·R, C), or (G, C, rep·R) if transposed."""
        return self.logits(rows, columns, transposed).sigmoid_()

    def outer(self, a: Tensor, b: Tensor, name: str = "outer") -> Tensor:
        """Return the product a bᵀ: (G, R, E), (G, C, E) → (G, R, C)."""
        return torch.bmm(a, b.mT, out=self._tile(name, a, b))

    def _tile(self, name: str, a: Tensor, b: Tensor) -> Tensor | None:  # (G, R, C)
        return None if self.scratch is None else self.scratch.tile(name, a, len(a), a.shape[1], b.shape[1])

    @staticmethod
    def combine(p: Tensor, v: Tensor) -> Tensor:
        """Return the product p v: (G, R, C), (G, C, E) → (G, R, E)."""
        return torch.bmm(p, v)

    @staticmethod
    def combine_transposed(p: Tensor, v: Tensor) -> Tensor:
        """Return the product pᵀ v: (G, C, R), (G, C, E) → (G, R, E)."""
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
        """Return the derivative of the cap, 1 - tanh², of the shape of the logits.

        NaN is replaced by 0, because the key may be masked; if it is not masked, dS is NaN already.
        """
        return self._tanh(rows, columns, transposed).square_().neg_().add_(1).nan_to_num_(0.0)

    def _tanh(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        q, k = fold(self.query, rows), self.key[:, columns]
        product = torch.bmm(k, q.mT) if transposed else torch.bmm(q, k.mT)
        return product.mul_(self.scale).div_(self.softcap).tanh_()


class Extended(Products):
    """Products with the bias as additional columns of Q, multiplied by columns of ones in K, and with the scale in Q.

    The bias is thus added in the accumulator of the product, in full precision: in bfloat16 it takes two columns, its
    value and the remainder of rounding. A logit is then rounded once; the plain formula rounds three times.
    """

    def __init__(self, query: Tensor, key: Tensor, bias: float | Tensor, scale: float) -> None:
        width = query.shape[-1]
        extra = 2 if query.dtype is torch.bfloat16 else 1
        self.query: Tensor = query.new_empty(*query.shape[:3], width + extra)  # (G, rep, N, D + extra)
        torch.mul(query, scale, out=self.query[..., :width])
        for column, part in enumerate(_parts(bias, query.dtype, extra), width):
            self.query[..., column] = part
        self.key: Tensor = F.pad(key, (0, extra), value=1.0)  # (G, M, D + extra)

    def logits(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        q, k = fold(self.query, rows), self.key[:, columns]
        return self.outer(k, q, "logits") if transposed else self.outer(q, k, "logits")


def _parts(bias: float | Tensor, dtype: torch.dtype, count: int) -> Sequence[Tensor | float]:
    """Return ``count`` numbers of the dtype whose sum approximates the bias; each rounds the remaining difference."""
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
    """Products of one head at a time by oneDNN's linear x wᵀ, with the sigmoid applied in the accumulator.

    x and w must be dense; w may be transposed.
    """

    def weights(self, rows: slice, columns: slice, transposed: bool) -> Tensor:
        q, k = fold(self.query, rows)[0], self.key[0, columns]
        return (linear(k, q, "sigmoid") if transposed else linear(q, k, "sigmoid")).unsqueeze(0)

    def outer(self, a: Tensor, b: Tensor, name: str = "outer") -> Tensor:
        return linear(a[0], b[0], "none").unsqueeze(0)

    @staticmethod
    def combine(p: Tensor, v: Tensor) -> Tensor:
        return linear(p[0], v[0].t(), "none").unsqueeze(0)

    @staticmethod
    def combine_transposed(p: Tensor, v: Tensor) -> Tensor:
        if p.dtype is torch.bfloat16:  # measured: the plain product is faster
            return torch.mm(p[0].t(), v[0]).unsqueeze(0)
        # computed as (vᵀ p)ᵀ, because copying the small transposed operand is cheap and oneDNN accepts a transposed w
        return linear(v[0].t().contiguous(), p[0].t(), "none").t().unsqueeze(0)


def linear(x: Tensor, w: Tensor, activation: str) -> Tensor:
    """Return activation(x wᵀ), computed by oneDNN: (R, E), (C, E) → (R, C)."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, None, activation, [], "")
    return y


def fused_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why oneDNN's fused sigmoid does not support this device and dtype, or None if it does."""
    if device.type != "cpu":
        return f"it supports CPUs only, not {device.type}"
    if dtype not in _FUSIBLE:
        return f"it supports {' and '.join(str(d).removeprefix('torch.') for d in _FUSIBLE)} only"
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return "this PyTorch has no oneDNN, or it is disabled (torch.backends.mkldnn)"
    return _probe(dtype)


@functools.cache
def keep_memory_warm() -> None:
    """Make glibc's allocator keep the memory of tiles for reuse, once per process.

    It returns freed blocks above a threshold to the system, so that each new tile causes page faults, which doubled the
    time of a forward (docs/log.md). The threshold is the size of the largest block freed so far, up to 32 MiB;
    allocating that much and freeing it, without touching it, raises the threshold. Other allocators are not affected.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


@functools.cache
def _probe(dtype: torch.dtype) -> str | None:
    """Compare the internal operator with the formula on a small problem; return an error message, or None."""
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
