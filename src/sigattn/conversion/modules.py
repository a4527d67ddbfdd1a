"""Adapter of models whose attention is ``sigattn.nn.Attention``, ``nn.MultiheadAttention``, or PyTorch's function.

A layer that calls ``F.scaled_dot_product_attention`` or ``F.multi_head_attention_forward``, or writes its softmax out,
gets a subclass of its own class, whose forward runs as before while those functions compute sigmoid attention
(``nn/sigmoid_layer.py``). An ``nn.MultiheadAttention`` becomes a ``SigmoidMultiheadAttention``.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from sigattn.conversion.adapter import Adapter, device_of
from sigattn.conversion.report import ConversionError, SoftmaxLayer
from sigattn.models.transformer import Transformer
from sigattn.nn import code_search, functional, run_search
from sigattn.nn.attention import Attention
from sigattn.nn.bias import (
    AttentionBias,
    BatchLengthBias,
    ConstantBias,
    LearnableBias,
    QueryBias,
    VisibleKeysBias,
    VisibleKeysLinearBias,
)
from sigattn.nn.functional import MaskSpec
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.nn.observer import Attend, AttentionCall, CallObserver
from sigattn.nn.run_search import Example
from sigattn.nn.sigmoid_layer import CONVERTED, sigmoid_class
from sigattn.nn.softmax_calls import CONTAINERS, SDPA_NAME, SOFTMAX_NAME, Finding, listed


class ModuleAdapter(Adapter):
    """Softmax attention of a model of PyTorch; if batches run it, every attention must be called."""

    def __init__(self, model: nn.Module, example: Example | None = None, keep: Sequence[str] = ()) -> None:
        super().__init__(model, example, keep)
        self.library: dict[str, Attention] = {}  # layers of this library
        self.called: list[Finding] = []  # other layers
        self.staying: list[Finding] = []

    def layers(self) -> Sequence[str]:
        attention = {n: m for n, m in self.model.named_modules() if isinstance(m, Attention) and not self.keeps(n)}
        library = {name: layer for name, layer in attention.items() if _is_softmax(name, layer)}
        with fused_attention(self.model, restore=True):
            findings = find_softmax(self.model, self.example)
        self.check_keep([f.name for f in findings])
        self.softmax = tuple(SoftmaxLayer(f.name, type(f.module).__name__, f.call, self._outcome(f)) for f in findings)
        converted = [f for f, layer in zip(findings, self.softmax, strict=True) if layer.is_sigmoid]
        self.staying = [f for f in findings if f not in converted and f.called]
        if refused := [f for f in self.staying if f.attention and not self.keeps(f.name)]:
            advice = (
                "Only their code was examined: pass example=(...), arguments of one forward, so that a run shows what "
                "their softmax belongs to"
                if self.example is None
                else "Let them call F.softmax over keys once, or F.scaled_dot_product_attention (a flag such as "
                'fused_attn=True or attn_implementation="sdpa"), or rewrite them with sigattn.nn.Attention'
            )
            raise ConversionError(
                f"the softmax of these layers cannot be replaced: {listed(refused)}. {advice}. To keep their "
                "softmax, pass their names, or patterns, as keep"
            )
        if callable(self.example) and (uncalled := [f for f in findings if not (f.called or self.keeps(f.name))]):
            raise ConversionError(
                f"the batches do not reach the attention of {listed(uncalled)}, which stays softmax: pass batches that "
                f"come to it, or, if it may stay, keep={[f.name for f in uncalled]}"
            )
        unconverted = {f.name for f in findings if f not in converted}
        self.library = {name: layer for name, layer in library.items() if name not in unconverted}
        self.called = [f for f in converted if f.name not in self.library]
        self._check_nesting()
        _refuse_wrapped(self.called)
        names = {*self.library, *(f.name for f in self.called)}
        if not names:
            raise ConversionError(self._nothing_to_convert())
        return [name for name, _ in self.model.named_modules() if name in names]

    @contextlib.contextmanager
    def observe(self, attend: Attend) -> Iterator[None]:
        encoders = [(m, m.use_nested_tensor) for m in self.model.modules() if isinstance(m, nn.TransformerEncoder)]
        classes = [(f.module, type(f.module)) for f in self.called]
        observers = {f.name: CallObserver(f.name, attend) for f in self.called}
        try:
            for name, layer in self.library.items():
                layer.attention_fn = functools.partial(_answer, name, layer, attend)
            with fused_attention(self.model, restore=True):
                self._replace(observers, normalize=True)
                yield
        finally:
            for layer in self.library.values():
                layer.attention_fn = functional.attend
            for module, kind in classes:
                module.__class__ = kind
                for attribute in ("sigmoid_bias", "sigmoid_normalize", "softmax_allowed", "writes_softmax"):
                    vars(module).pop(attribute, None)
            for encoder, nested in encoders:
                encoder.use_nested_tensor = nested

    def swap(self, biases: Mapping[str, AttentionBias | None], normalize: bool) -> None:
        kept = {*self.library, *(f.name for f in self.called)} - biases.keys()
        self.softmax = tuple(dataclasses.replace(s, outcome="kept") if s.name in kept else s for s in self.softmax)
        self.library = {name: layer for name, layer in self.library.items() if name in biases}
        self.staying += [f for f in self.called if f.name in kept]
        self.called = [f for f in self.called if f.name in biases]
        self._check_nesting()
        for name, bias in biases.items():
            if bias is not None:
                _check_bias(name, bias)
                bias.to(device_of(self.model.get_submodule(name)))
        of_library = {name: biases[name] or VisibleKeysBias() for name in self.library}
        configs = _converted_configs(self.model, of_library, normalize) if of_library else []
        with fused_attention(self.model):
            self._replace(biases, normalize)
        for name, layer in self.library.items():
            layer.activation, layer.attention_bias, layer.normalize = "sigmoid", of_library[name], normalize
        for part, config in configs:
            part.config = config

    def _replace(self, biases: Mapping[str, AttentionBias | CallObserver | None], normalize: bool) -> None:
        """Give the layers of others classes with sigmoid attention, and their bias or observer by name."""
        softmax = {f.module for f in self.staying}
        for finding in self.called:
            layer: Any = finding.module
            kind: Any = type(layer)
            plain = kind is nn.MultiheadAttention
            layer.__class__ = SigmoidMultiheadAttention if plain else sigmoid_class(kind)
            layer.sigmoid_bias, layer.sigmoid_normalize = biases[finding.name], normalize
            if not plain:
                layer.softmax_allowed = any(m in softmax for m in layer.modules())
                layer.writes_softmax = finding.call == SOFTMAX_NAME
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # it packs padded samples for its fused softmax

    def _outcome(self, finding: Finding) -> Any:
        if self.keeps(finding.name):
            return "kept"
        if not finding.called:
            return "not called"
        if not finding.replaceable:
            return "not attention"
        return "materialised" if finding.call == SOFTMAX_NAME else "converted"

    def _check_nesting(self) -> None:
        """Raise for a layer that keeps softmax inside one that becomes sigmoid, whose forward would change it too."""
        for outer in self.called:
            modules = set(outer.module.modules()) - {outer.module}
            softmax = [f for f in self.staying if f.replaceable or outer.call == SOFTMAX_NAME]
            if inside := [f.name for f in softmax if f.module in modules]:
                raise ConversionError(
                    f"{outer.name!r} is converted and contains {', '.join(inside)}, which keeps its softmax: "
                    "keep both or neither"
                )

    def _nothing_to_convert(self) -> str:
        kind, layers = type(self.model).__name__, self.model.named_modules()
        sigmoid = (
            repr(name)
            for name, m in layers
            if isinstance(m, CONVERTED) or (isinstance(m, Attention) and m.activation == "sigmoid")
        )
        if (first := next(sigmoid, None)) is not None:
            return f"{kind} has sigmoid attention already (in {first}) and no softmax attention"
        message = f"{kind} has no softmax attention that can be replaced"
        if self.staying:
            message += f". These compute a softmax that is kept, or is not an attention's: {listed(self.staying)}"
        return message + ("" if self.example else ". Pass example=(...) to find attention by running the model")


def find_softmax(model: nn.Module, example: Example | None = None) -> list[Finding]:
    """Find every layer of a model that computes a softmax, in the model's order, as ``convert`` describes."""
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, CONVERTED)]
    order = {m: i for i, (_, m) in enumerate(modules)}
    graphs = code_search.search(model, [(n, m) for n, m in modules if isinstance(m, (GraphModule, ScriptModule))])
    if graphs := [f for f in graphs if f.replaceable]:
        raise ConversionError(
            f"the attention of traced or exported graphs cannot be replaced: {listed(graphs)}. Convert the "
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
def fused_attention(model: nn.Module, *, restore: bool = False) -> Iterator[None]:
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
        for layer in layers:
            layer.fused_attn = not restore


def _refuse_wrapped(findings: Sequence[Finding]) -> None:
    """Raise for layers whose class cannot be replaced: their instance has a ``forward``, or runs its children."""
    for finding in findings:
        if isinstance(finding.module, CONTAINERS):
            reason = "A container would run its bias as one of its layers: move the attention into a layer that is none"
        elif "forward" in vars(finding.module):
            reason = (
                "Its forward was set on the instance, as accelerate's hooks and torch.compile(layer.forward) do: "
                "convert the model first, then wrap it"
            )
        else:
            continue
        raise ConversionError(f"the attention of this layer cannot be replaced: {listed([finding])}. {reason}")


def _check_bias(name: str, bias: AttentionBias) -> None:
    """Raise for a bias that depends on more than the masks of a call."""
    if bias.needs_alibi or bias.needs_lengths or isinstance(bias, QueryBias):
        raise ConversionError(
            f"{type(bias).__name__} needs lengths, ALiBi or the query, which {name!r} does not give; use "
            "another bias (None is -log of the number of visible keys)"
        )


def _is_softmax(name: str, layer: Attention) -> bool:
    """Return True for a layer with softmax; raise ConversionError for one that computes it in another way."""
    if layer.activation == "performer":
        raise ConversionError(f"{name!r} has activation='performer', which is not supported; use softmax")
    if layer.activation != "softmax":
        return False
    if layer.attention_fn is not functional.attend or layer.sequence_shard is not None:
        raise ConversionError(f"{name!r} has a custom attention_fn, or is part of a context-parallel model: reset it")
    return True


def _answer(
    name: str, layer: Attention, attend: Attend, _: str, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec
) -> Tensor:
    """Answer a call of an ``Attention``, as its ``attention_fn``."""

    def normalized(bias: AttentionBias) -> Tensor:
        b = layer.evaluate_bias(bias, query, key.shape[2], spec)
        return functional.attend("sigmoid", query, key, value, spec._replace(bias=b, normalize=True))

    if spec.left_padding is not None:
        raise ConversionError(f"{name!r} was called with a cache of padded prompts: pass batches without")
    problem = functional.make_problem(query, key, value, spec)._replace(bias=None)
    return attend(
        AttentionCall(name, problem, lambda: functional.attend("softmax", query, key, value, spec), normalized)
    )


def _converted_configs(model: nn.Module, biases: Mapping[str, AttentionBias], normalize: bool) -> list[tuple[Any, Any]]:
    """Return this library's softmax models in a model, with their configurations after the swap."""
    pairs: list[tuple[Any, Any]] = []
    for path, part in model.named_modules():
        config: Any = part.config if isinstance(part, Transformer) else None
        if config is None or config.transformer.activation != "softmax":
            continue
        settings = _settings(next(iter(biases.values())))
        pairs.append((part, config.with_transformer(activation="sigmoid", normalize=normalize, **settings)))
        layers = (f"{path}.{name}".removeprefix(".") for name, m in part.named_modules() if isinstance(m, Attention))
        if kept := [name for name in layers if name not in biases]:
            raise ConversionError(
                f"{type(part).__name__} would keep softmax in {', '.join(map(repr, kept))}, but its "
                "configuration has one kind of attention for all layers: keep all of its layers, or none"
            )
    return pairs


def _settings(bias: AttentionBias) -> dict[str, Any]:
    """Return the settings of ``TransformerConfig`` that make such a bias."""
    if isinstance(bias, ConstantBias) and not bias.is_rule:
        return {"attention_bias": bias.value}
    if type(bias) is LearnableBias:
        return {"attention_bias": bias.initial, "learn_bias": "layer" if bias.value.numel() == 1 else "head"}
    rules = {BatchLengthBias: "log_batch", VisibleKeysBias: "log_visible", VisibleKeysLinearBias: "log_visible"}
    if type(bias) not in rules:
        raise ConversionError(f"no configuration of sigattn.models names {type(bias).__name__}: use another bias")
    return {"attention_bias": rules[type(bias)], "learn_bias": "head" if type(bias) is VisibleKeysLinearBias else "no"}
