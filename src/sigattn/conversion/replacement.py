"""``sigmoidify``: convert models with softmax attention to sigmoid attention, keeping their weights.

A layer that calls ``F.scaled_dot_product_attention`` or ``F.multi_head_attention_forward`` gets a subclass of its own
class, whose forward runs as before while those functions compute sigmoid attention (``sigmoid_layer.py``). An
``nn.MultiheadAttention`` becomes a ``SigmoidMultiheadAttention``. Softmax is searched for in the code of the layers
(``code_search.py``) and, with an example, in one run of the model (``run_search.py``).
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from sigattn.nn import code_search, run_search
from sigattn.nn.bias import AttentionBias, QueryBias, as_bias
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.nn.observer import CallObserver
from sigattn.nn.sigmoid_layer import CONVERTED, sigmoid_class
from sigattn.nn.softmax_calls import CONTAINERS, MHA_NAME, SDPA_NAME, Finding, listed


class Replaced(NamedTuple):
    """Layer that was converted to sigmoid attention.

    Attributes:
        name: name within the model ("" for the model itself). kind: name of its class before. call: the function whose
            softmax was replaced.
    """

    name: str
    kind: str
    call: str


class RemainingSoftmax(NamedTuple):
    """Layer that still computes a softmax.

    Attributes:
        name: name within the model ("" for the model itself). kind: name of its class. call: the function that
            computes the softmax. reason: "allowed" (by ``allow_softmax``), "not attention", or "not called": the code
            of the layer can call the function, but the example, which runs the layer, does not come to it.
    """

    name: str
    kind: str
    call: str
    reason: str


@torch.inference_mode(False)  # or a learned bias could not be trained
def sigmoidify(
    model: nn.Module,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    bias: AttentionBias | float | None = None,
    allow_softmax: Sequence[str] = (),
) -> list[Replaced | RemainingSoftmax]:
    """Turn a model's softmax attention into sigmoid attention, in place.

    Weights, parameter names and the state dict are unchanged (a learnable bias is added to it), so that a new model
    into which it is loaded needs the same call. A model that was trained with softmax must be trained further, because
    it computes another function.

    Every attention is replaced, or the call raises and names it. A softmax that does not belong to an attention (a
    classifier, a router) stays and is listed.

    Args:
        model: any module.
        example: arguments of one forward call, positional or by name. With it, the model is run once (in evaluation
            mode, without gradient): a softmax is an attention's if its weights are multiplied with a matrix of
            activations. Layers which that run does not reach, and all layers without an example, are judged by the
            code of their classes and of the functions that these call. That cannot see which of two paths a flag
            selects, and takes a softmax for an attention's if its layer multiplies matrices.
        bias: b of every layer: a number, one of ``sigattn.nn.bias`` (copied for each layer, where it is learned), or
            None for -log of the number of keys that at least one query of a sample sees. Padding that a mask hides is
            not counted. With a KV cache that number grows from call to call; pass ``log_length_bias(context)`` instead.
        allow_softmax: names of layers that may keep their softmax, or patterns of names ("decoder.*.router").

    Returns:
        Every layer that computes, or computed, a softmax: ``Replaced`` and ``RemainingSoftmax``.

    Raises:
        ValueError: if some attention layer cannot be replaced, naming it; if there is none; or if a pattern of
            ``allow_softmax`` matches no softmax. The model is unchanged. Layers whose forward was wrapped (accelerate,
            ``torch.compile(layer.forward)``) and traced graphs cannot be replaced: wrap or trace after the call.
            So is a learned bias in a model that is wrapped for distributed training.
        TypeError: if bias is neither a number nor one of ``sigattn.nn.bias``.

    >>> encoder = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> sigmoidify(encoder)
    [Replaced(name='self_attn', kind='MultiheadAttention', call='multi_head_attention_forward')]
    """
    bias = None if bias is None else as_bias("sigmoidify: bias", bias)
    if isinstance(bias, QueryBias):
        raise ValueError(
            "sigmoidify does not support QueryBias, because these layers compute Q themselves: use another bias"
        )
    if bias is not None and next(bias.parameters(), None) is not None:
        refuse_distributed(model)
    with enable_fused_attention(model):
        return _sigmoidify(model, example, bias, allow_softmax)


def refuse_distributed(model: nn.Module) -> None:
    """Raise for a model that distributed training has wrapped or sharded, because it would not know new parameters.

    Raises:
        ValueError: naming the wrapped layer.
    """
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    for name, module in model.named_modules():
        distributed = wrappers & {kind.__name__ for kind in type(module).__mro__}
        if distributed or any(type(p).__name__ == "DTensor" for p in module.parameters(recurse=False)):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) is part of distributed training, which would not synchronise the "
                "gradients of new biases: convert the model first, then wrap or shard it"
            )


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


def _sigmoidify(
    model: nn.Module,
    example: Sequence[Any] | Mapping[str, Any] | None,
    bias: AttentionBias | None,
    allow_softmax: Sequence[str],
) -> list[Replaced | RemainingSoftmax]:
    findings = find_softmax(model, example)
    _check_patterns(allow_softmax, findings)
    staying = [f for f in findings if not (f.replaceable and f.called) or _matches(f.name, allow_softmax)]
    refused = [f for f in staying if f.attention and f.called and not _matches(f.name, allow_softmax)]
    if refused:
        raise ValueError(_refusal(refused, example is None))
    replaced = [f for f in findings if f not in staying]
    if not replaced:
        raise ValueError(_nothing_found(model, staying, example is None))
    _check_nesting(replaced, [f for f in staying if f.replaceable and f.called])
    kinds = [(f, type(f.module).__name__) for f in findings]
    convert_layers(model, replaced, [f for f in staying if f.called], bias)
    return [_entry(f, kind, f in replaced, allow_softmax) for f, kind in kinds]


def _entry(finding: Finding, kind: str, replaced: bool, allow_softmax: Sequence[str]) -> Replaced | RemainingSoftmax:
    if replaced:
        return Replaced(finding.name, kind, finding.call)
    reason = "not attention" if finding.called else "not called"
    reason = "allowed" if _matches(finding.name, allow_softmax) else reason
    return RemainingSoftmax(finding.name, kind, finding.call, reason)


def find_softmax(model: nn.Module, example: run_search.Example | None = None) -> list[Finding]:
    """Find every layer of a model that computes a softmax, in the model's order, as ``sigmoidify`` describes.

    The example may also be a function that runs the model.

    Raises:
        ValueError: if a traced or exported graph calls an attention function, which cannot be replaced in its code.
    """
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, CONVERTED)]
    order = {m: i for i, (_, m) in enumerate(modules)}
    graphs = code_search.search(model, [(n, m) for n, m in modules if isinstance(m, (GraphModule, ScriptModule))])
    if graphs := [f for f in graphs if f.replaceable]:
        raise ValueError(
            f"the attention of traced or exported graphs cannot be replaced: {listed(graphs)}. Convert the model "
            "before torch.fx, torch.export or torch.jit traces it"
        )
    if example is None:
        found = [*code_search.search(model, modules), *code_search.search_hooks(modules)]
        return sorted(found, key=lambda f: order[f.module])
    result = run_search.search(model, example, CONVERTED)
    by_code = [(n, m) for n, m in modules if m not in result.ran or code_search.starts_threads(m)]
    rest = [*code_search.search(model, by_code), *code_search.search_hooks(by_code)]
    unexplained = result.ran - {f.module for f in (*result.findings, *rest)}
    silent = [(n, m) for n, m in modules if m in unexplained and code_search.forward_attends(m)]
    uncalled = [f._replace(called=False) for f in code_search.search(model, silent) if f.attention]
    return sorted([*result.findings, *rest, *uncalled], key=lambda f: order[f.module])


def refuse_wrapped(findings: Iterable[Finding]) -> None:
    """Raise for layers whose class cannot be replaced, because their instance has a ``forward`` or runs its children.

    Raises:
        ValueError: naming the layers.
    """
    findings = list(findings)
    if containers := [f for f in findings if isinstance(f.module, CONTAINERS)]:
        raise ValueError(
            f"the attention of these layers cannot be replaced: {listed(containers)}. A container would run its bias "
            "as one of its layers: move the attention into a layer that is none"
        )
    wrapped = [f for f in findings if "forward" in vars(f.module)]
    if wrapped:
        raise ValueError(
            f"the attention of these layers cannot be replaced: {listed(wrapped)}. Their forward was set on the "
            "instance, as accelerate's hooks and torch.compile(layer.forward) do: convert the model first, then wrap it"
        )


def convert_layers(
    model: nn.Module, findings: Sequence[Finding], staying: Sequence[Finding], bias: AttentionBias | None
) -> None:
    """Give the layers of the findings sigmoid attention.

    Args:
        model: the model. findings: layers to replace. staying: layers that keep their softmax. bias: as in
            ``sigmoidify``.

    Raises:
        ValueError: if the bias needs lengths or ALiBi, which a layer's own calls do not give, or as
            ``refuse_wrapped``.
    """
    refuse_wrapped(findings)
    for finding in findings:
        if bias is None:
            continue
        if bias.needs_alibi or (bias.needs_lengths and finding.call != MHA_NAME):
            raise ValueError(
                f"sigmoidify: {type(bias).__name__} needs lengths or ALiBi, which {finding.name!r} does not "
                "give; "
                "use another bias (None is -log of the number of visible keys of each sample)"
            )
    biases = {f.name: copy.deepcopy(bias) for f in findings}  # learned for each layer
    replace_layers(model, findings, staying, biases)


def replace_layers(
    model: nn.Module, findings: Sequence[Finding], staying: Sequence[Finding], biases: Mapping[str, Any]
) -> None:
    """Replace the classes of the findings' layers; ``biases`` has the bias, or a ``CallObserver``, of each name."""
    kept = {f.module for f in staying}
    for finding in findings:
        layer: Any = finding.module
        plain = type(layer) is nn.MultiheadAttention
        kind: Any = type(layer)
        layer.__class__ = SigmoidMultiheadAttention if plain else sigmoid_class(kind)
        layer.sigmoid_bias = biases[finding.name]
        if not plain:
            layer.softmax_allowed = any(m in kept for m in layer.modules())
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
        replace_layers(model, findings, staying, observers)
        yield
    finally:
        for layer, kind in kinds:
            layer.__class__ = kind
            for name in ("sigmoid_bias", "softmax_allowed"):
                vars(layer).pop(name, None)
        for encoder, nested in encoders:
            encoder.use_nested_tensor = nested


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Sequence[str], findings: Sequence[Finding]) -> None:
    if isinstance(patterns, str):
        raise TypeError(f"sigmoidify: allow_softmax is a sequence of names, got the string {patterns!r}")
    unused = [p for p in patterns if not any(_matches(f.name, [p]) for f in findings)]
    if unused:
        found = ", ".join(repr(f.name) for f in findings) or "none"
        raise ValueError(f"sigmoidify: allow_softmax={unused} matches no layer with a softmax; there are: {found}")


def _nothing_found(model: nn.Module, staying: Sequence[Finding], by_code: bool) -> str:
    message = f"sigmoidify: {type(model).__name__} has no attention layer that it can replace."
    if staying:
        message += f" These compute a softmax that was allowed, or is not an attention's: {listed(staying)}."
    return message + (" Pass example=(...) to find them by running the model" if by_code else "")


def _check_nesting(replaced: Sequence[Finding], staying: Sequence[Finding]) -> None:
    """Raise for a layer that stays softmax inside one that becomes sigmoid, whose forward would change it too."""
    for outer in replaced:
        inside = [f.name for f in staying if f.module is not outer.module and f.module in set(outer.module.modules())]
        if inside:
            raise ValueError(
                f"sigmoidify: {outer.name!r} is replaced and contains {', '.join(inside)}, allowed to stay softmax: "
                "allow both or neither"
            )


def _refusal(refused: Sequence[Finding], by_code: bool) -> str:
    message = (
        f"sigmoidify: these layers compute a softmax themselves, where it cannot be replaced: {listed(refused)}. Let "
        'them use F.scaled_dot_product_attention (a flag such as fused_attn=True or attn_implementation="sdpa"), or '
        "rewrite them with sigattn.nn.Attention. To keep their softmax, pass their names, or patterns, as allow_softmax"
    )
    if by_code:
        message += ". Only the code was examined: pass example=(...) to distinguish other softmaxes from attention"
    return message
