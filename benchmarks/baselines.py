"""Implementations that the benchmarks compare: our operator and its baselines, with softmax or sigmoid.

All take query, key and value, (B, H, n, D), and ``Options``. An implementation imports its package when it is first
called; ``Implementation.unavailable`` gives the reason beforehand if it cannot run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sigattn
from benchmarks import reference
from benchmarks.inputs import Inputs, Options
from benchmarks.provenance import BenchmarkError
from benchmarks.subprocesses import is_gpu_fault
from benchmarks.timing import Timing

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Options], Tensor]
FORWARD, BACKWARD, TRAINING = "forward", "backward", "training"
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention.

    Attributes:
        softmax: it computes softmax attention, with which sigmoid attention is compared.
        call: the function.
        module: what must be importable.
        dtypes: supported dtypes.
        cpu: it runs on a CPU.
        alibi: it supports ALiBi.
        backward: it has a backward pass.
        quadratic: it materialises the matrix of weights.
        recompiles: it is compiled for each length.
    """

    softmax: bool
    call: AttentionFunction
    module: str = "torch"
    dtypes: tuple[torch.dtype, ...] = (*_HALF, torch.float32)
    cpu: bool = False
    alibi: bool = False
    backward: bool = True
    quadratic: bool = False
    recompiles: bool = False

    def unavailable(self, device: torch.device, dtype: torch.dtype, options: Options) -> str | None:
        """Return the reason why it cannot run here, or None."""
        if device.type == "cpu" and not self.cpu:
            return "it needs a GPU"
        if dtype not in self.dtypes:
            return f"it does not support {dtype}"
        if options.slopes is not None and not self.alibi:
            return "it does not support ALiBi"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # packages raise various errors, not only ImportError
            return f"{self.module} cannot be imported: {error}"
        return None


def checked_passes(
    implementation: Implementation, inputs: Inputs, *, backward: bool = True
) -> tuple[dict[str, Callable[[], object]], tuple[float, float | None]]:
    """Check an implementation against the reference, with its backward pass if it has one and ``backward`` is True.

    Returns:
        The calls to time, and the relative errors of the output and of the worst gradient. The calls are FORWARD
        without gradients, BACKWARD alone, from a graph that is kept, and TRAINING, forward and backward.

    Raises:
        WrongResultError: if a result is wrong.
    """
    q, k, v = inputs.query, inputs.key, inputs.value
    call, options, grad_out = implementation.call, inputs.options, inputs.grad_out
    if not (backward and implementation.backward):
        with torch.no_grad():
            errors = reference.check(inputs, implementation.softmax, call(q, k, v, options))
        return {FORWARD: lambda: call(q, k, v, options)}, errors
    leaves = inputs.leaves()
    out = call(*leaves, options)
    gradients = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    errors = reference.check(inputs, implementation.softmax, out.detach(), gradients)
    return {
        FORWARD: lambda: call(q, k, v, options),
        BACKWARD: lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
        TRAINING: lambda: torch.autograd.grad(call(*leaves, options), leaves, grad_out),
    }, errors


def available_passes(
    implementations: Mapping[str, Implementation],
    inputs: Inputs,
    absent: dict[str, str],
    suffix: str = "",
    *,
    backward: bool = True,
    checks: int = 1,
) -> tuple[dict[str, dict[str, Callable[[], object]]], dict[str, tuple[float, float | None]]]:
    """Check implementations with ``checked_passes``, ``checks`` times.

    Returns:
        The calls by pass and name, and the errors by name, of those that can run and are correct. ``absent`` receives
        the reasons of the others, by name and suffix.
    """
    passes: dict[str, dict[str, Callable[[], object]]] = {FORWARD: {}, BACKWARD: {}, TRAINING: {}}
    errors = {}
    for name, implementation in implementations.items():
        reason = implementation.unavailable(inputs.query.device, inputs.query.dtype, inputs.options)
        try:
            for _ in range(checks if reason is None else 0):
                calls, errors[name] = checked_passes(implementation, inputs, backward=backward)
        except Exception as error:  # baselines raise various errors
            reason = error_line(error)
            if is_gpu_fault(reason):  # nothing that follows in this process would be measured
                raise
        if reason is not None:
            absent[name + suffix] = reason
            errors.pop(name, None)
            continue
        for direction, call in calls.items():
            passes[direction][name] = call
    return passes, errors


def error_line(error: Exception) -> str:
    """Return type and first line of an exception, for the results."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def ratio_to_fastest_softmax(timing: Timing) -> float | None:
    """Return the time of the fastest softmax divided by this one's; None without a softmax."""
    others = ((name, ratio) for name, ratio in timing.ratios.items() if name in IMPLEMENTATIONS)
    return min((ratio for name, ratio in others if IMPLEMENTATIONS[name].softmax), default=None)


# -- torch.compile ----------------------------------------------------------------------------------------------------


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False, strict: bool = True) -> Callable[..., Any]:
    """Compile with ``torch.compile`` at the first call; if ``strict``, raise where it would run the function eagerly.

    It does so after too many recompilations. An eager formula or FlexAttention would then be timed under the name of
    the compiled one.
    """

    @functools.wraps(function)
    def traced(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise BenchmarkError(f"torch.compile ran {function.__name__} eagerly")
        return function(*args, **options)

    @functools.cache
    def compile_once() -> Callable[..., Any]:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # a kept graph is differentiated many times
        result: Callable[..., Any] = torch.compile(traced if strict else function, fullgraph=strict, dynamic=dynamic)
        return result

    return lambda *args: compile_once()(*args)


def reset_compiled() -> None:
    """Discard what torch.compile has compiled in this process, so that each problem has the whole recompile limit."""
    torch._dynamo.reset()


# -- implementations --------------------------------------------------------------------------------------------------


def sdpa_softmax(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    """Softmax attention by PyTorch, with its default backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=o.causal)


def _formula(q: Tensor, k: Tensor, v: Tensor, bias: float, causal: bool, slopes: Tensor | None) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5 + bias
    if slopes is not None:
        i = torch.arange(q.shape[2], device=q.device)
        s = s - slopes.to(s.dtype)[:, None, None] * (i[:, None] - i).abs()
    p = torch.sigmoid(s)
    return (p.tril() if causal else p) @ v


def naive_sigmoid(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    """Sigmoid attention as a plain formula."""
    return _formula(q, k, v, o.bias, o.causal, o.slopes)


def _compiled_naive(strict: bool) -> AttentionFunction:
    formula = compiled(_formula, strict=strict, dynamic=False if strict else None)

    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        out: Tensor = formula(q, k, v, o.bias, o.causal, o.slopes)  # Options itself would take 10 µs of guards
        return out

    return call


def with_backend(backend: str | None) -> AttentionFunction:
    """Return sigmoid attention of this library by a backend; None is the default."""

    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        return sigattn.sigmoid_attention(
            q, k, v, is_causal=o.causal, bias=o.bias, alibi_slopes=o.slopes, backend=backend
        )

    return call


def normalized_sigmoid(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
    """Sigmoid attention of this library divided by the sums of rows, with so low a b that it is softmax attention."""
    return sigattn.sigmoid_attention(q, k, v, is_causal=o.causal, bias=o.bias - 20.0, normalize=True)


def _sdpa(backend: str) -> AttentionFunction:
    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return sdpa_softmax(q, k, v, o)

    return call


@functools.lru_cache(maxsize=8)
def _causal_blocks(n: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)


def _add_alibi(o: Options, score: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score if o.slopes is None else score - o.slopes[h] * (i - j).abs()


@functools.cache
def _flex(softmax: bool) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as flex

    def flex_softmax(q: Tensor, k: Tensor, v: Tensor, o: Options, mask: Any) -> Any:
        if o.slopes is None:
            return flex.flex_attention(q, k, v, block_mask=mask)
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: _add_alibi(o, s, h, i, j), block_mask=mask)

    def flex_sigmoid(q: Tensor, k: Tensor, v: Tensor, o: Options, mask: Any) -> Any:
        """Softmax of log σ, multiplied by the sum that normalised it."""

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return F.logsigmoid(_add_alibi(o, s, h, i, j) + o.bias)

        out, aux = flex.flex_attention(q, k, v, score, block_mask=mask, return_aux=flex.AuxRequest(lse=True))
        assert aux.lse is not None  # requested above
        return out * aux.lse.exp().unsqueeze(-1).to(out.dtype)

    return compiled(flex_softmax if softmax else flex_sigmoid)


def _flex_attention(softmax: bool) -> AttentionFunction:
    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        mask = _causal_blocks(q.shape[2], q.device) if o.causal else None
        out: Tensor = _flex(softmax)(q, k, v, o, mask)
        return out

    return call


def _flash_layout(module: str, name: str, options: dict[str, str], **fixed: Any) -> AttentionFunction:
    """Return a function in flash-attn's layout, (B, n, H, D); ``options`` maps arguments to attributes of Options."""

    def call(q: Tensor, k: Tensor, v: Tensor, o: Options) -> Tensor:
        function = getattr(importlib.import_module(module), name)
        given = {argument: getattr(o, attribute) for argument, attribute in options.items()}
        out = function(*(t.transpose(1, 2) for t in (q, k, v)), **given, **fixed)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


OURS, SDPA, NAIVE, COMPILED_NAIVE = "sigattn", "SDPA softmax", "naive sigmoid", "compiled naive sigmoid"
_SOFTMAX_OPTIONS = {"causal": "causal", "alibi_slopes": "slopes"}
_SIGMOID_OPTIONS = {**_SOFTMAX_OPTIONS, "sigmoid_bias": "bias"}
_FAST = _flash_layout("sigattn.flash", "flash_attn_func", _SIGMOID_OPTIONS, sigmoid_precision="fast", backend="triton")
_FLASH_2 = _flash_layout("flash_attn", "flash_attn_func", _SOFTMAX_OPTIONS)
_FLASH_3 = _flash_layout("flash_attn_interface", "flash_attn_func", {"causal": "causal"})
_FLASH_SIGMOID = _flash_layout("flash_sigmoid", "flash_attn_func", _SIGMOID_OPTIONS)
_TRITON_SIGMOID = _flash_layout("triton_sigmoid", "sigmoid_attention", {"is_causal": "causal", "sigmoid_bias": "bias"})
IMPLEMENTATIONS = {
    OURS: Implementation(False, with_backend("triton"), "triton", cpu=True, alibi=True),
    "sigattn fast": Implementation(False, _FAST, "triton", alibi=True),
    "cuDNN softmax": Implementation(True, _sdpa("CUDNN_ATTENTION"), dtypes=_HALF),
    "flash softmax": Implementation(True, _sdpa("FLASH_ATTENTION"), dtypes=_HALF),
    SDPA: Implementation(True, sdpa_softmax, cpu=True),
    "flash-attn 3 softmax": Implementation(True, _FLASH_3, "flash_attn_interface", dtypes=_HALF),
    "flash-attn 2 softmax": Implementation(True, _FLASH_2, "flash_attn", dtypes=_HALF, alibi=True),
    "Flex softmax": Implementation(True, _flex_attention(True), alibi=True, recompiles=True),
    "Flex sigmoid": Implementation(False, _flex_attention(False), alibi=True, recompiles=True),
    "triton-sigmoid": Implementation(False, _TRITON_SIGMOID, "triton_sigmoid"),
    "FlashSigmoid": Implementation(False, _FLASH_SIGMOID, "flash_sigmoid", dtypes=_HALF, alibi=True),
    NAIVE: Implementation(False, naive_sigmoid, cpu=True, alibi=True, quadratic=True),
    COMPILED_NAIVE: Implementation(False, _compiled_naive(True), alibi=True, quadratic=True, recompiles=True),
}
CPU_IMPLEMENTATIONS = {
    SDPA: IMPLEMENTATIONS[SDPA],
    OURS: Implementation(False, with_backend(None), cpu=True),
    f"{OURS}, normalized": Implementation(True, normalized_sigmoid, cpu=True),
    NAIVE: IMPLEMENTATIONS[NAIVE],
    COMPILED_NAIVE: Implementation(False, _compiled_naive(False), cpu=True),  # as users compile it
}
