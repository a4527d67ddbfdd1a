"""Replacement of the classes of layers that call PyTorch's attention functions, in place and with their weights.

A layer that calls ``F.scaled_dot_product_attention`` or ``F.multi_head_attention_forward`` gets a subclass of its own
class, whose forward runs as before while those functions compute sigmoid attention (``nn/sigmoid_layer.py``). An
``nn.MultiheadAttention`` becomes a ``SigmoidMultiheadAttention``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from sigattn.conversion.report import ConversionError
from sigattn.nn import code_search, run_search
from sigattn.nn.bias import AttentionBias
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.nn.observer import CallObserver
from sigattn.nn.sigmoid_layer import CONVERTED, sigmoid_class
from sigattn.nn.softmax_calls import CONTAINERS, SDPA_NAME, SOFTMAX_NAME, Finding, listed


def find_softmax(model: nn.Module, example: run_search.Example | None = None) -> list[Finding]:
    """Find every layer of a model that computes a softmax, in the model's order, as ``convert`` describes."""
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, CONVERTED)]
    order = {m: i for i, (_, m) in enumerate(modules)}
    graphs = code_search.search(model, [(n, m) for n, m in modules if isinstance(m, (GraphModule, ScriptModule))])
    if graphs := [f for f in graphs if f.replaceable]:
        raise ConversionError(
            f"convert: the attention of traced or exported graphs cannot be replaced: {listed(graphs)}. Convert the "
            "model before torch.fx, torch.export or torch.jit traces it"
        )
    if example is None:
        findings = [*code_search.search(model, modules), *code_search.search_hooks(modules)]
        return sorted(findings, key=lambda f: order[f.module])
    result = run_search.search(model, example, CONVERTED)
    by_code = [(n, m) for n, m in modules if m not in result.ran or code_search.starts_threads(m)]
    rest = [*code_search.search(model, by_code), *code_search.search_hooks(by_code)]
    unexplained = result.ran - {f.module for f in (*result.findings, *rest)}
    silent = [(n, m) for n, m in modules if m in unexplained and code_search.forward_attends(m)]
    uncalled = [f._replace(called=False) for f in code_search.search(model, silent) if f.attention]
    return sorted([*result.findings, *rest, *uncalled], key=lambda f: order[f.module])


@contextlib.contextmanager
def enable_fused_attention(model: nn.Module, *, restore: bool = False) -> Iterator[None]:
    """Set timm's flag ``fused_attn`` of all layers to True, and restore it if the block raises or ``restore`` is True.

    The flag selects ``F.scaled_dot_product_attention`` instead of a softmax in the layer's own code; timm leaves it off
    in some layers (XCiT, Swin) because the function is not faster in them.
    """
    layers: list[Any] = [m for m in model.modules() if getattr(m, "fused_attn", None) is False]
    layers = [m for m in layers if SDPA_NAME in code_search.reachable_calls(m)]
    for layer in layers:
        layer.fused_attn = True
    try:
        yield
    except BaseException:
        restore = True
        raise
    finally:
        if restore:
            for layer in layers:
                layer.fused_attn = False


def refuse_wrapped(findings: Sequence[Finding]) -> None:
    """Raise for layers whose class cannot be replaced: their instance has a ``forward``, or runs its children."""
    for layers, reason in (
        (
            [f for f in findings if isinstance(f.module, CONTAINERS)],
            "A container would run its bias as one of its layers: move the attention into a layer that is none",
        ),
        (
            [f for f in findings if "forward" in vars(f.module)],
            "Their forward was set on the instance, as accelerate's hooks and torch.compile(layer.forward) do: convert "
            "the model first, then wrap it",
        ),
    ):
        if layers:
            raise ConversionError(
                f"convert: the attention of these layers cannot be replaced: {listed(layers)}. {reason}"
            )


def replace_layers(
    model: nn.Module,
    findings: Sequence[Finding],
    staying: Sequence[Finding],
    biases: Mapping[str, AttentionBias | CallObserver | None],
    normalize: bool,
) -> None:
    """Give the findings' layers classes with sigmoid attention, and their bias or observer by name."""
    softmax = {f.module for f in staying}
    for finding in findings:
        layer: Any = finding.module
        plain = type(layer) is nn.MultiheadAttention
        kind: Any = type(layer)
        layer.__class__ = SigmoidMultiheadAttention if plain else sigmoid_class(kind)
        layer.sigmoid_bias, layer.sigmoid_normalize = biases[finding.name], normalize
        if not plain:
            layer.softmax_allowed = any(m in softmax for m in layer.modules())
            layer.writes_softmax = finding.call == SOFTMAX_NAME
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it packs padded samples for its fused softmax


@contextlib.contextmanager
def observed_layers(
    model: nn.Module, findings: Sequence[Finding], staying: Sequence[Finding], observers: Mapping[str, CallObserver]
) -> Iterator[None]:
    """Within the context, let observers answer the attention calls of the findings' layers; undone after it."""
    kinds = [(f.module, type(f.module)) for f in findings]
    encoders = [(m, m.use_nested_tensor) for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    try:
        replace_layers(model, findings, staying, observers, normalize=True)
        yield
    finally:
        for layer, kind in kinds:
            layer.__class__ = kind
            for name in ("sigmoid_bias", "sigmoid_normalize", "softmax_allowed", "writes_softmax"):
                vars(layer).pop(name, None)
        for encoder, nested in encoders:
            encoder.use_nested_tensor = nested
