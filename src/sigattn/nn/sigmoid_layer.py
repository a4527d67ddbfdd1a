"""Layers of other libraries whose attention functions compute sigmoid attention within their forward."""

import functools
import inspect
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)
from torch.utils import checkpoint

from sigattn.nn.autograd_functions import run_as_code
from sigattn.nn.bias import AttentionBias
from sigattn.nn.code_search import autograd_functions, calling_methods
from sigattn.nn.multihead import (
    SigmoidMultiheadAttention,
    UnfusedMultihead,
    describe_settings,
    multi_head_attention_forward,
)
from sigattn.nn.observer import CallObserver
from sigattn.nn.softmax_calls import MHA, OPAQUE_NAMES, SDPA, SOFTMAX_NAMES, is_sdpa
from sigattn.nn.visible_keys import evaluate_bias
from sigattn.nn.written_softmax import WrittenSoftmax, with_heads, written_softmax
from sigattn.ops import mask
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.broadcasting import flatten
from sigattn.ops.custom_ops import record_module


class SigmoidLayer(nn.Module):
    """Mixin of a layer's class: within its forward, attention functions compute sigmoid attention.

    Attributes:
        sigmoid_bias: b, or None for -log of the number of keys that a sample sees.
        sigmoid_normalize: True if the weights of each query are divided by their sum.
        softmax_allowed: True if the layer, or one inside it, keeps a softmax.
        writes_softmax: True if a softmax over the last dimension is an attention's, which sigmoid weights replace.
    """

    softmax_class: type[nn.Module]
    mixin: type["SigmoidLayer"]
    sigmoid_bias: AttentionBias | None
    sigmoid_normalize: bool = False
    softmax_allowed: bool = False
    writes_softmax: bool = False

    def attention_settings(self) -> tuple[AttentionBias | CallObserver | None, bool]:
        """Return the bias and ``normalize`` of a call."""
        return self.sigmoid_bias, self.sigmoid_normalize

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward with sigmoid attention.

        Raises:
            RuntimeError: if that forward computes a softmax itself, does not call an attention function, or calls it in
                a checkpoint or another autograd function.
        """
        node = record_module(self, args, kwargs)
        if node is not None:
            return node
        mode = _SigmoidMode(self)
        with mode:
            result = super().forward(*args, **kwargs)
        if not mode.calls and not any(isinstance(m, CONVERTED) for m in self.modules() if m is not self):
            raise RuntimeError(
                f"{self.softmax_class.__name__} was converted to sigmoid attention, but this forward did not call "
                f"{'a softmax' if self.writes_softmax else 'F.scaled_dot_product_attention'}: it took another path (a "
                "flag such as fused_attn=False, or the weights were requested)"
            )
        return result

    def extra_repr(self) -> str:
        """Return the settings of the layer, and the bias if no submodule shows it."""
        return ", ".join(filter(None, (super().extra_repr(), describe_settings(self))))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the layer by its original class, because this class is made at run time."""
        return _rebuild, (self.softmax_class, self.mixin), self.__getstate__()


CONVERTED = (SigmoidMultiheadAttention, SigmoidLayer)


@functools.cache
def sigmoid_class(kind: Any, mixin: Any = SigmoidLayer) -> type[nn.Module]:
    """Return the subclass of a layer's class that computes sigmoid attention."""
    bases = (mixin, UnfusedMultihead, kind) if issubclass(kind, nn.MultiheadAttention) else (mixin, kind)
    members: dict[str, Any] = {name: _in_sigmoid_mode(getattr(kind, name)) for name in calling_methods(kind)}
    members |= {"softmax_class": kind, "mixin": mixin, "__module__": kind.__module__}
    for function in autograd_functions(kind):
        run_as_code(function, _modes)
    return type(f"Sigmoid{kind.__name__}", bases, members)


def _modes() -> list[Any]:
    """Return the modes of the layers that are computing sigmoid attention; the innermost is the last."""
    return [m for m in _get_current_function_mode_stack() if isinstance(m, _SigmoidMode)]


def _in_sigmoid_mode(method: Any) -> Any:
    @functools.wraps(method)
    def wrapped(self: SigmoidLayer, *args: Any, **kwargs: Any) -> Any:
        modes = _modes()
        if modes and modes[-1].layer is self:  # of its forward, which counts its calls
            return method(self, *args, **kwargs)
        with _SigmoidMode(self):
            return method(self, *args, **kwargs)

    return wrapped


_REFUSED_NAMES = SOFTMAX_NAMES | OPAQUE_NAMES
# files with a function that has a backward pass of its own: ``checkpoint`` and ``Function.apply``
_OWN_BACKWARD = {checkpoint.__file__, torch.autograd.function.__file__}
# the code that enters ``_SigmoidMode``
_ENTRIES = {SigmoidLayer.forward.__code__, _in_sigmoid_mode(SigmoidLayer.forward).__code__}


def _rebuild(kind: Any, mixin: Any) -> nn.Module:
    layer_class = sigmoid_class(kind, mixin)
    return layer_class.__new__(layer_class)


def _autograd_forwards(kind: type = torch.autograd.Function) -> set[types.CodeType]:
    """Return the code of the forward passes of all autograd functions."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    codes = {forward.__code__} if isinstance(forward, types.FunctionType) else set[types.CodeType]()
    return codes.union(*map(_autograd_forwards, kind.__subclasses__()))


class _SigmoidMode(TorchFunctionMode):
    """Mode that computes sigmoid attention for a layer's attention functions, counts them, and refuses softmax."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0
        self.has_grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_sdpa(func):
            self._count_call()
            return sigmoid_sdpa(*self.layer.attention_settings(), *args, **kwargs)
        if func is MHA:
            self._count_call()
            return multi_head_attention_forward(*self.layer.attention_settings(), *args, **kwargs)
        if self.layer.writes_softmax and (call := written_softmax(func, args, kwargs)) is not None:
            self._count_call()
            return sigmoid_weights(self.layer, call)
        named = func.overloadpacket if isinstance(func, OpOverload) else func  # "_softmax", not "_softmax.default"
        if getattr(named, "__name__", "") in _REFUSED_NAMES and not self.layer.softmax_allowed:
            raise RuntimeError(
                f"{self.layer.softmax_class.__name__} was converted to sigmoid attention, but this forward computes a "
                "softmax itself instead of calling F.scaled_dot_product_attention (a flag such as fused_attn=False, or "
                "the weights were requested). If that softmax is not an attention's, call convert or restore with "
                "example=(...)"
            )
        if isinstance(func, HigherOrderOperator):  # of torch.compile, which traces its functions outside of this mode
            self.calls += func is torch.ops.higher_order.tag_activation_checkpoint
            args = [self._within(a) if callable(a) else a for a in args]
        if func is Tensor.unflatten:  # torch.compile does not trace the method within a mode, because it calls super()
            func = torch.unflatten
        return func(*args, **kwargs)

    def _within(self, function: Any) -> Any:

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with _SigmoidMode(self.layer):
                return function(*args, **kwargs)

        return wrapped

    def _count_call(self) -> None:
        """Count a call; raise if it is in a checkpoint or autograd function, whose backward pass would be softmax's."""
        self.calls += 1
        without_grad = self.has_grad and not torch.is_grad_enabled()  # within a layer with one
        if torch.compiler.is_dynamo_compiling():  # it traces what is checkpointed, and has no frames
            if without_grad:
                raise RuntimeError(self._own_backward())
            return
        # perhaps in a ``forward`` that PyTorch 2.14 calls from C++
        forwards = _autograd_forwards() if without_grad else set[types.CodeType]()
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in _ENTRIES:
            if frame.f_code.co_filename in _OWN_BACKWARD or frame.f_code in forwards:
                raise RuntimeError(self._own_backward())
            frame = frame.f_back

    def _own_backward(self) -> str:
        return (
            f"{self.layer.softmax_class.__name__} was converted to sigmoid attention, but it calls "
            "torch.utils.checkpoint, or an autograd.Function, around its attention function, and the backward pass "
            "would compute that of softmax. Checkpoint the whole layer instead, where it is called, or a method of it"
        )


def sigmoid_weights(layer: SigmoidLayer, call: WrittenSoftmax) -> Tensor:
    """Return the weights that a layer gets in the place of a softmax that it writes out, (..., M)."""
    if not torch.compiler.is_compiling() and has_torch_function_unary(call.logits):  # a mode observes the model
        return handle_torch_function(sigmoid_weights, (call.logits,), layer, call)
    bias, normalize = layer.attention_settings()
    if isinstance(bias, CallObserver):
        return bias.answer_written(with_heads(call, layer))
    return call.weights(bias, normalize)


def sigmoid_sdpa(
    sigmoid_bias: AttentionBias | CallObserver | None, normalize: bool, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``F.scaled_dot_product_attention`` with sigmoid attention, with PyTorch's signature.

    A ``sigmoid_bias`` of None is -log of the number of keys that at least one query of a sample sees. For a bias that
    differs between queries, tensors that are not (B, H, N, D) have one head: which dimension has them is not known.
    """
    differs = isinstance(sigmoid_bias, CallObserver) or (sigmoid_bias is not None and sigmoid_bias.needs_visible)
    if differs and query.dim() != 4 and not query.is_nested and not enable_gqa:
        if isinstance(attn_mask, Tensor) and attn_mask.dim() > 2:
            attn_mask = attn_mask.unsqueeze(-3)
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        query, key, value, attn_mask, *_, shape = flatten(query, key, value, attn_mask, None, None, None, False)
        out = sigmoid_sdpa(sigmoid_bias, normalize, query, key, value, attn_mask, dropout_p, is_causal, scale)
        return (out if shape is None else out.reshape(shape)).squeeze(-3)
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    attn_mask, is_causal, window = mask.resolve("sigmoid_attention", attn_mask, is_causal, None, query, key)
    if isinstance(sigmoid_bias, CallObserver):
        return sigmoid_bias.answer(
            *(query, key, value, attn_mask), softmax=lambda: SDPA(*arguments, **options),
            normalized=lambda bias: sigmoid_sdpa(bias, True, *arguments, **options), is_causal=is_causal, window=window,
            scale=scale,
        )  # fmt: skip
    bias = evaluate_bias(sigmoid_bias, query, key, attn_mask, normalize=normalize, is_causal=is_causal, window=window)
    options |= {"bias": bias, "window": window, "normalize": normalize}
    return sigmoid_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
