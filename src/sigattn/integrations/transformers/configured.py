"""Attention layers outside of transformers' attention interface, whose class is replaced where "sigmoid" is chosen.

Such a layer writes its softmax out, or calls a function of PyTorch. It gets a subclass of its class, within whose
forward that softmax is replaced by sigmoid weights of the same logits (``sigattn.nn.sigmoid_layer``). Bias and
``sigmoid_normalize`` are those of the configuration, as for layers that use the interface.
"""

import functools
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from sigattn.integrations.transformers.check import KeptSoftmax, computes_softmax, dispatches
from sigattn.integrations.transformers.saving import LOG_VISIBLE, NAME, NORMALIZE, validate_bias
from sigattn.nn.bias import AttentionBias, ConstantBias, VisibleKeysBias
from sigattn.nn.code_search import reachable_calls
from sigattn.nn.multihead import SigmoidMultiheadAttention
from sigattn.nn.observer import CallObserver
from sigattn.nn.sigmoid_layer import SigmoidLayer, sigmoid_class
from sigattn.nn.softmax_calls import ATTENTION_NAMES, PRODUCT_NAMES

ATTRIBUTE = "sigmoid_bias"  # of a layer: its learned bias; of a configuration: the record
REST = ""  # key of a record: the bias of layers that it does not list
CONFIGS = "_sigattn_configs"  # attribute of a layer: the configurations around it, the innermost first
_REFUSED = {
    "GroupViTAssignAttention": "it assigns each key to one group",
    "NystromformerSelfAttention": "it approximates a softmax by a product of three",
    "SwiftFormerEfficientAdditiveAttention": "it is additive attention without keys",
}
_EXTEND_MASKS = {"DeepseekV4Attention"}  # layers of the interface that append numbers to the mask
# layers whose ALiBi has another level for each length of a call, with a cache and without, which softmax does not see
_WITHOUT_LEVEL = {"MptAttention"}
# layers with a second softmax, of a convolution's kernel, over another dimension than the last: it stays
_WITH_KERNEL = {"ConvBertSelfAttention"}
_SAMPLED = "DeformableAttention"  # end of names
_VISIBLE_KEYS = VisibleKeysBias()
_constant = functools.cache(ConstantBias)


class Configured:
    """Mixin of layers whose bias and ``sigmoid_normalize`` are those of the model's configuration."""

    softmax_class: type[nn.Module]

    def attention_settings(self: Any) -> tuple[AttentionBias | CallObserver, bool]:
        bias, normalize = layer_settings(self)
        if not normalize and self.softmax_class.__name__ in _WITHOUT_LEVEL:
            reason = f"the level of its logits depends on the length of a call: set config.{NORMALIZE} = True"
            raise error_of(self, reason)
        return _constant(bias) if isinstance(bias, float) else bias, normalize


class ConfiguredLayer(Configured, SigmoidLayer):
    """Mixin of the class of a layer that calls a function of PyTorch or writes its softmax out."""

    writes_softmax = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.softmax_allowed = cls.softmax_class.__name__ in _WITH_KERNEL


class ConfiguredMultiheadAttention(Configured, SigmoidMultiheadAttention):
    """``nn.MultiheadAttention`` with sigmoid attention."""

    softmax_class = nn.MultiheadAttention


def is_attention(layer: nn.Module) -> bool:
    """Return True for an attention layer, of the interface or outside of it."""
    kept = isinstance(getattr(layer, ATTRIBUTE, None), KeptSoftmax)
    return kept or isinstance(layer, Configured) or dispatches(layer) or computes_softmax(layer)


def reason_against(layer: nn.Module) -> str | None:
    """Return why the class of a softmax attention layer cannot be replaced, or None."""
    kind = type(layer)
    if kind is nn.MultiheadAttention:
        return None
    if kind.__module__.partition(".")[0] not in ("transformers", "timm"):
        return "only layers of transformers and timm are known to compute one softmax, over keys"
    if kind.__name__.endswith(_SAMPLED):
        return "its weights are those of sampled points, not of keys"
    functions = (m for m in layer.children() if next(m.parameters(), None) is None)  # SqueezeBert's product is a module
    if not frozenset().union(*map(reachable_calls, (layer, *functions))) & (ATTENTION_NAMES | PRODUCT_NAMES):
        return "its weights are not multiplied with a matrix of values"
    return _REFUSED.get(kind.__name__)


def needs_numbers(layer: nn.Module) -> bool:
    """Return True for a layer that adds the model's mask to its logits, or appends numbers to it."""
    return isinstance(layer, ConfiguredLayer) or type(layer).__name__ in _EXTEND_MASKS


def replace_class(layer: Any) -> bool:
    """Give a softmax attention layer the class that computes sigmoid attention, if there is one; return True then."""
    if not computes_softmax(layer) or reason_against(layer) is not None:
        return False
    kind: Any = type(layer)
    is_plain = kind is nn.MultiheadAttention
    layer.__class__ = ConfiguredMultiheadAttention if is_plain else sigmoid_class(kind, ConfiguredLayer)
    return True


def restore_class(layer: Any) -> None:
    """Give a layer its softmax class again."""
    if isinstance(layer, Configured):
        kind: Any = layer.softmax_class
        layer.__class__ = kind


@functools.cache  # once per process
def follow_replaced_layers() -> None:
    """Let a layer that a model puts in the place of one with sigmoid attention, or of a kept one, follow it.

    BigBird replaces its block-sparse layers when it runs on a short input.
    """

    def follow(parent: nn.Module, name: str, new: nn.Module | None) -> None:
        old: Any = parent._modules.get(name)
        kept = isinstance(getattr(old, ATTRIBUTE, None), KeptSoftmax)
        if new is not None and (replace_class(new) if isinstance(old, Configured) else kept and computes_softmax(new)):
            for attributes, of in ((vars(new), vars(old)), (new._modules, old._modules)):
                attributes.update({n: of[n] for n in (ATTRIBUTE, CONFIGS) if n in of})

    register_module_module_registration_hook(follow)


def layer_settings(layer: Any) -> tuple[Any, bool]:
    """Return b of a layer, a number or a bias, or the observer or ``KeptSoftmax`` in its place; and ``normalize``."""
    learned = getattr(layer, ATTRIBUTE, None)
    if isinstance(learned, (CallObserver, KeptSoftmax)):
        return learned, True
    config = getattr(layer, "config", None)
    if not hasattr(layer, CONFIGS) and getattr(config, "_attn_implementation_internal", None) == NAME:
        raise error_of(
            layer,
            f"it was chosen for another model of the same {type(config).__name__} object, or before this layer was "
            f'added: build each model from its own copy.deepcopy(config), or call set_attn_implementation("{NAME}")',
        )
    normalize = _configured(layer, NORMALIZE, False)
    if not isinstance(normalize, bool):
        raise error_of(layer, f"config.{NORMALIZE} must be True or False, got {normalize!r}")
    bias = _configured(layer, ATTRIBUTE, LOG_VISIBLE)
    if learned is None and isinstance(bias, dict):
        bias = bias.get(REST, bias)
    if not isinstance(bias, dict):
        validate_bias(bias)
    if isinstance(bias, dict) != (learned is not None):
        value, count = (f"is {bias!r}", "a learned bias") if learned is not None else ("lists learned biases", "none")
        raise error_of(layer, f"config.{ATTRIBUTE} {value}, but this layer has {count}")
    if learned is not None:
        return learned, normalize
    return _VISIBLE_KEYS if isinstance(bias, str) else float(bias), normalize


def _configured(layer: nn.Module, name: str, default: Any) -> Any:
    """Return an attribute of the innermost configuration around a layer that has it, or the default."""
    for config in getattr(layer, CONFIGS, (getattr(layer, "config", None),)):
        if (value := getattr(config, name, None)) is not None:
            return value
    return default


def error_of(layer: nn.Module, reason: str) -> ValueError:
    """Return an error that names a layer."""
    return ValueError(f'{type(layer).__name__} with attn_implementation="{NAME}": {reason}')
