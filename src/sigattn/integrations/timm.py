"""Sigmoid attention in timm's vision transformers: a class to pass as ``attn_layer``::

    from sigattn.integrations.timm import attention_layer
    model = timm.create_model("vit_base_patch16_224", attn_layer=attention_layer(), qk_norm=True, init_values=1e-4,
                              class_token=False, global_pool="avg")

On ``vit_*``, ``deit3_*``, ``naflexvit_*`` and others that take ``attn_layer``. Parameters have timm's names, so weights
that timm trained can be loaded (the model must be trained further, because it computes another function). The
practitioner's guide (App. G.6) for supervised vision: QK-norm, LayerScale 1e-4, no bias, global average pooling.

timm uses ``attn_layer`` in plain blocks only: parallel blocks (``vit_*_xp_*``, ``vit_pwee_*``, ``vit_dpwee_*``), rotary
blocks of naflexvit and attention pools ignore it. The construction of a model with such a layer raises and names it.
``sigattn.convert`` replaces the attention of these models, and of those that do not take ``attn_layer``.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from typing import Any, Literal

from torch import Tensor, nn

from sigattn.nn.code_search import search
from sigattn.nn.softmax_calls import listed
from sigattn.nn.visible_keys import visible_per_query
from sigattn.ops.attention import sigmoid_attention
from sigattn.ops.problem import combine_window, log_length_bias, log_size_bias
from sigattn.optional import explain_import_errors

with explain_import_errors("timm"):
    from timm.layers import Attention
    from timm.models.naflexvit import NaFlexVit
    from timm.models.vision_transformer import VisionTransformer

OutputNorm = Literal["none", "hybrid"]
Bias = float | Literal["log_visible"]


class SigmoidAttention(Attention):
    """timm's ``Attention`` with sigmoid attention. ``attention_layer`` makes subclasses with other settings."""

    sigmoid_bias: Bias = "log_visible"
    output_norm: OutputNorm = "none"
    normalize: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.branch_norm: nn.Module = nn.Identity()
        if self.output_norm == "hybrid":
            self.branch_norm = nn.LayerNorm(self.proj.out_features, elementwise_affine=False)

    def extra_repr(self) -> str:
        """Return the settings."""
        names = ("num_heads", "sigmoid_bias", "output_norm", "normalize")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the layer's output, (B, N, embed_dim), of x (B, N, embed_dim)."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # (B, H, N, D) each
        query, key = self.q_norm(query), self.k_norm(key)
        bias: Any = self.sigmoid_bias
        if bias == "log_visible":
            bias = _log_visible(query, attn_mask, is_causal)
        dropout = self.attn_drop.p if self.training else 0.0
        out = sigmoid_attention(query, key, value, attn_mask, dropout, is_causal, bias=bias, normalize=self.normalize)
        out = self.norm(out.transpose(1, 2).reshape(batch, length, self.attn_dim))
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        result: Tensor = self.branch_norm(self.proj_drop(self.proj(out)))
        return result


def attention_layer(
    bias: Bias = "log_visible", output_norm: OutputNorm = "none", normalize: bool = False
) -> type[Attention]:
    """Return a class for timm's ``attn_layer``. (timm needs a class: a ``functools.partial`` does not work.)

    Args:
        bias: b: a number (0.0 for none, as the guide recommends for vision), or "log_visible": -log of the number of
            tokens that a query sees, without padding (naflexvit).
        output_norm: "hybrid": a LayerNorm without parameters after the output projection (hybrid-norm, App. G.3) of
            every block; or "none".
        normalize: True to divide the weights of each row by their sum, as softmax does.

    Raises:
        ValueError: for other arguments.
    """
    number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
    if (
        not (number or bias == "log_visible")
        or output_norm not in ("none", "hybrid")
        or not isinstance(normalize, bool)
    ):
        raise ValueError(
            'attention_layer: bias must be a number or "log_visible", output_norm "none" or "hybrid", and normalize a '
            f"bool; got {bias!r}, {output_norm!r}, {normalize!r}"
        )
    for model in (VisionTransformer, NaFlexVit):
        _refuse_softmax_after_init(model)
    settings = {"sigmoid_bias": bias, "output_norm": output_norm, "normalize": normalize, "__module__": __name__}
    return _LayerClass("SigmoidAttention", (SigmoidAttention,), settings)


class _LayerClass(type):
    """Type of the classes that ``attention_layer`` makes: they are pickled by their settings.

    Models have such a class as the type of their layers, and timm keeps it in the model's arguments.
    """


def _reduce(layer_class: Any) -> Any:
    if SigmoidAttention not in layer_class.__bases__:
        return layer_class.__qualname__  # a subclass of a module, which is pickled by its name
    return attention_layer, (layer_class.sigmoid_bias, layer_class.output_norm, layer_class.normalize)


copyreg.pickle(_LayerClass, _reduce)


def _refuse_softmax_after_init(model_class: Any) -> None:
    """Make the construction of a model raise if some of its attention ignores a class of ``attention_layer``."""
    init = model_class.__init__
    if hasattr(init, "sigattn"):
        return
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        options = {**arguments, **arguments.get("kwargs", {})}
        layer_class = options.get("attn_layer", getattr(options.get("cfg"), "attn_layer", None))
        if isinstance(layer_class, type) and issubclass(layer_class, SigmoidAttention):
            _refuse_softmax(self)

    checked.sigattn = True  # type: ignore[attr-defined]
    model_class.__init__ = checked


def _refuse_softmax(model: nn.Module) -> None:
    if ignoring := [f for f in search(model, model.named_modules()) if f.attention]:
        raise ValueError(
            f"{type(model).__name__} ignores attn_layer in {listed(ignoring)}, which would compute a softmax: build "
            "the model without attn_layer, and call sigattn.convert(model)"
        )


def _log_visible(query: Tensor, mask: Tensor | None, is_causal: bool) -> float | Tensor:
    """Return -log of the number of visible keys: a number, or (B or 1, H or 1, N or 1, 1)."""
    length = query.shape[2]
    if mask is None and not is_causal:
        return log_size_bias(length, query.device)
    window = combine_window(None, is_causal)
    return log_length_bias(visible_per_query(mask, length, length, window, query.device))
