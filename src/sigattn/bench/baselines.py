"""Who takes part in the GPU benchmarks: our operator, and every peer that this machine has.

All take (B, H, N, D) query, key and value and an ``Options``, and compute softmax or sigmoid attention. Each imports
what it needs when it is first called; ``available`` says beforehand why one is missing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sigattn
from sigattn import flash
from sigattn.bench.provenance import BenchmarkError


@dataclass(frozen=True)
class Options:
    """What is computed: the bias of a sigmoid, causality, and the slopes of ALiBi, (H,), or None."""

    bias: float
    causal: bool = False
    slopes: Tensor | None = None


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        softmax: whether it is softmax attention, which sigmoid attention is compared with.
        call: the way. module: what must be importable for it.
        dtypes: those it takes. cpu: whether it runs on a CPU. alibi, backward: whether it has these.
        quadratic: whether it holds the whole matrix of weights.
        recompiles: whether it is compiled anew for each length.
    """

    softmax: bool
    call: Callable[[Tensor, Tensor, Tensor, Options], Tensor]
    module: str = "torch"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    cpu: bool = False
    alibi: bool = False
    backward: bool = True
    quadratic: bool = False
    recompiles: bool = False

    def unavailable(self, device: torch.device, dtype: torch.dtype, options: Options) -> str | None:
        """Why it cannot take part, or None."""
        if device.type == "cpu" and not self.cpu:
            return "it needs a GPU"
        if dtype not in self.dtypes:
            return f"it does not take {dtype}"
        if options.slopes is not None and not self.alibi:
            return "it has no ALiBi"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a peer may refuse to be imported in ways of its own
            return f"{self.module} cannot be imported: {error}"
        return None


def _sdpa(backend: str) -> Callable[[Tensor, Tensor, Tensor, Options], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=o.causal)

    return call


def _softmax_on_cpu(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=o.causal)


def compiled(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """``torch.compile`` that raises where it would run the function eagerly, as beyond its limit of recompilations.

    FlexAttention and formulas that run eagerly would otherwise be timed under the name of the compiled ones.
    """

    @functools.wraps(function)
    def traced(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise BenchmarkError(f"torch.compile ran {function.__name__} eagerly")
        return function(*args, **options)

    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a backward is timed on its own, again and again
    result: Callable[..., Any] = torch.compile(traced, fullgraph=True, dynamic=dynamic)
    return result


def reset_compiled() -> None:
    """Forget what torch.compile has compiled in this process, so that each problem has the whole limit to itself."""
    torch._dynamo.reset()


@functools.lru_cache(maxsize=8)
def _causal_blocks(n: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)


def _position(o: Options, score: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score if o.slopes is None else score - o.slopes[h] * (i - j).abs()


@functools.cache
def _flex(softmax: bool) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as flex

    def flex_softmax(q: Tensor, k: Tensor, v: Tensor, o: Options, mask: Any) -> Any:
        if o.slopes is None:
            return flex.flex_attention(q, k, v, block_mask=mask)
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: _position(o, s, h, i, j), block_mask=mask)

    def flex_sigmoid(q: Tensor, k: Tensor, v: Tensor, o: Options, mask: Any) -> Any:
        """Softmax of log σ, times the sum that it was divided by."""

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return F.logsigmoid(_position(o, s, h, i, j) + o.bias)

        out, aux = flex.flex_attention(q, k, v, score, block_mask=mask, return_aux=flex.AuxRequest(lse=True))
        assert aux.lse is not None  # it was asked for
        return out * aux.lse.exp().unsqueeze(-1).to(out.dtype)

    return compiled(flex_softmax if softmax else flex_sigmoid)


def _flex_attention(softmax: bool) -> Callable[[Tensor, Tensor, Tensor, Options], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        mask = _causal_blocks(q.shape[2], q.device) if o.causal else None
        out: Tensor = _flex(softmax)(q, k, v, o, mask)
        return out

    return call


def _transposed(module: str, name: str, **fixed: Any) -> Callable[[Tensor, Tensor, Tensor, Options], Tensor]:
    """A function of another package in flash-attn's layout."""

    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        options = {key: value(o) for key, value in fixed.items()}
        function = getattr(importlib.import_module(module), name)
        out = function(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _naive(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5 + o.bias
    if o.slopes is not None:
        i = torch.arange(q.shape[2], device=q.device)
        s = s - o.slopes.to(s.dtype)[:, None, None] * (i[:, None] - i).abs()
    p = torch.sigmoid(s)
    return (p.tril() if o.causal else p) @ v


@functools.cache
def _compiled_naive() -> Callable[..., Any]:
    return compiled(_naive)


def _ours(backend: str, precision: str = "accurate") -> Callable[[Tensor, Tensor, Tensor, Options], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = flash.flash_attn_func(
            q,
            k,
            v,
            causal=o.causal,
            alibi_slopes=o.slopes,
            sigmoid_bias=o.bias,
            sigmoid_precision=precision,
            backend=backend,
        )
        return out.transpose(1, 2)

    return call


def _ours_dense(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    return sigattn.sigmoid_attention(q, k, v, is_causal=o.causal, bias=o.bias, alibi_slopes=o.slopes, backend="triton")


_HALF = (torch.float16, torch.bfloat16)
OURS = "sigattn"
IMPLEMENTATIONS = {
    OURS: Implementation(False, _ours_dense, "triton", cpu=True, alibi=True),
    "sigattn fast": Implementation(False, _ours("triton", "fast"), "triton", alibi=True),
    "cuDNN softmax": Implementation(True, _sdpa("CUDNN_ATTENTION"), dtypes=_HALF),
    "flash softmax": Implementation(True, _sdpa("FLASH_ATTENTION"), dtypes=_HALF),
    "SDPA softmax": Implementation(True, _softmax_on_cpu, cpu=True),
    "flash-attn 3 softmax": Implementation(
        True,
        _transposed("flash_attn_interface", "flash_attn_func", causal=lambda o: o.causal),
        "flash_attn_interface",
        dtypes=_HALF,
    ),
    "flash-attn 2 softmax": Implementation(
        True,
        _transposed("flash_attn", "flash_attn_func", causal=lambda o: o.causal, alibi_slopes=lambda o: o.slopes),
        "flash_attn",
        dtypes=_HALF,
        alibi=True,
    ),
    "Flex softmax": Implementation(True, _flex_attention(True), alibi=True, recompiles=True),
    "Flex sigmoid": Implementation(False, _flex_attention(False), alibi=True, recompiles=True),
    "triton-sigmoid": Implementation(
        False,
        _transposed("triton_sigmoid", "sigmoid_attention", is_causal=lambda o: o.causal, sigmoid_bias=lambda o: o.bias),
        "triton_sigmoid",
    ),
    "FlashSigmoid": Implementation(
        False,
        _transposed(
            "flash_sigmoid",
            "flash_attn_func",
            causal=lambda o: o.causal,
            alibi_slopes=lambda o: o.slopes,
            sigmoid_bias=lambda o: o.bias,
        ),
        "flash_sigmoid",
        dtypes=_HALF,
        alibi=True,
    ),
    "naive sigmoid": Implementation(False, _naive, cpu=True, alibi=True, quadratic=True),
    "compiled naive sigmoid": Implementation(
        False, lambda q, k, v, o: _compiled_naive()(q, k, v, o), alibi=True, quadratic=True, recompiles=True
    ),
}
