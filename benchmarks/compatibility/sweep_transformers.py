"""Every architecture of the installed transformers: sigmoid attention is exact, or refused by name.

The reference is the same model with transformers' eager attention, in which the softmax of ``eager_attention_forward``,
or of the layer itself, is replaced by the sigmoid: masks, biases and everything else are computed by transformers.

``judge`` chooses ``attn_implementation="sigmoid"``, with a number as bias, set in the outermost configuration only, and
with "log_visible", and compares outputs and gradients of all parameters. ``judge_conversion`` converts the model, the
whole or else its parts until one runs all of its attention layers. The converted model has a bias in each layer, and
must give the same outputs after it was saved and loaded; a refused one is unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.compatibility import tiny_transformers as tiny
from benchmarks.compatibility.reference import SigmoidReference, calling_frames, masked
from sigattn.conversion import ConversionError, convert
from sigattn.integrations import transformers as sigmoid
from sigattn.integrations.transformers.configured import Configured, is_attention

LIBRARY = f"transformers {transformers.__version__}"
BIAS = -1.25
LARGEST = 80_000_000  # parameters
Inputs = dict[str, Any]
Pair = tuple[Tensor, Tensor]
OWN_REFERENCE = {  # a reference of our own, because transformers' eager attention misreads masks, unlike its SDPA
    **dict.fromkeys(
        (
            "nemotron_asr_streaming",  # inverts a mask of numbers
            "nemotron_asr_streaming_encoder",
            "nemotron3_5_asr",
            "seamless_m4t_v2",  # adds a boolean mask to the logits
        ),
        "compared with SDPA's masks, which eager attention misreads",
    ),
    # or applies a sink after the softmax, or subtracts the largest logit
    **dict.fromkeys(("granite_swa", "granitemoe_swa", "mimo_v2_flash"), ""),
}


@dataclass
class Result:
    """The result for one architecture.

    Attributes:
        status: "exact", "refused", "wrong", "failed" (another error), "no attention" or "not built".
        why: the reason. ran, layers: attention layers that were called, and all of them.
    """

    architecture: str
    status: str
    why: str = ""
    ran: int = 0
    layers: int = 0


class EagerSigmoid(SigmoidReference):
    """Replaces the softmax of transformers' eager attention functions, and of layers outside of them.

    Args:
        bias: a number, "log_visible", or (c, a) of c + a · log visible for each layer, each (heads,).
        eager: the softmax model.
        model: the model that is compared, which has layers outside of the eager functions under the same names.
        normalize: divide the weights of a row by their sum, as biases of layers do.
    """

    def __init__(
        self, bias: float | str | Mapping[nn.Module, Pair], eager: nn.Module, model: nn.Module, *, normalize: bool
    ) -> None:
        super().__init__(eager.get_submodule(n) for n, m in model.named_modules() if isinstance(m, Configured))
        self.bias, self.normalize = bias, normalize

    def weights(self, logits: Tensor, *, written: bool) -> Tensor | None:
        """Return the weights in an eager attention function, or in a layer of the reference."""
        frames = (f for f in calling_frames() if f.f_code.co_name.endswith("eager_attention_forward"))
        call = next((f.f_locals for f in frames), {})
        layer: Any = call.get("module")
        mask: Any = call.get("attention_mask")
        if not call:
            layer, mask = self.calling_layer(), ...
            if layer is None:
                return None
        elif call.get("sinks") is not None:  # before the largest logit was subtracted
            logits, mask = torch.cat([call["attn_weights"], call["sinks"]], -1), None
        bias = self.bias[layer] if isinstance(self.bias, Mapping) else self.bias
        log_weights = _log_weights(logits, bias, mask, margin=6.0 if self.normalize else 0.0)
        if not self.normalize:
            return log_weights.exp()
        # The weights of a row sum to 1, however low they are. Where nothing is visible they are 0, or softmax's if the
        # layer has added its mask to the logits, which are numbers then.
        unseen = torch.softmax(logits, -1) if mask is ... else torch.zeros_like(logits)
        weights = torch.softmax(log_weights, -1)
        return torch.where(weights.isnan(), unseen, weights)


def reference_eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    position_bias: Tensor | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute softmax attention with boolean masks; ``EagerSigmoid`` replaces the softmax."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    logits = query @ key.mT * scaling + (0.0 if position_bias is None else position_bias)
    logits = masked(logits, attention_mask)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
        attention_mask = None  # its width is another
    weights = F.softmax(logits, dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _log_weights(logits: Tensor, bias: float | str | Pair, mask: Any, margin: float) -> Tensor:
    """Return logarithms of sigmoid weights, -inf where hidden. A mask of ... is one that the layer has added already.

    "log_visible" is ``margin`` less than -log of the visible keys.
    """
    if mask is ...:
        visible = logits > -1000
    elif isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] >= logits.shape[-1]:
        mask = mask[..., : logits.shape[-1]]
        visible = (mask if mask.dtype is torch.bool else mask > -90) & (logits > -1000)
    else:
        visible = logits > -90  # masks add -100, -1e4, -1e9, the smallest number or -inf
    log_visible = visible.sum(-1, keepdim=True).clamp(min=1).to(logits.dtype).log()
    if isinstance(bias, tuple):
        heads = logits.shape[-3] if logits.dim() == 3 and len(bias[0]) > 1 else len(bias[0])
        c, a = (t.repeat(heads // len(t)).view(-1, 1, 1) for t in bias)
        b: Any = c + a * log_visible
    else:
        b = -log_visible - margin if bias == "log_visible" else bias
    return torch.where(visible, F.logsigmoid(logits + b), -torch.inf)


# -- one architecture -------------------------------------------------------------------------------------------------


def judge(architecture: str) -> Result:
    """Compare the choice of "sigmoid" with the reference, in the smallest configuration that works.

    With weights of sum 1 where sigmoid attention asks for it: attention sinks act by the sum of a row.
    """
    result = _in_some_size(architecture, _judge)
    asks = "set config.sigmoid_normalize = True" in result.why
    return _in_some_size(architecture, functools.partial(_judge, normalize=True)) if asks else result


def judge_conversion(architecture: str) -> Result:
    """Compare the converted model with the reference, in the smallest configuration that works."""
    return _in_some_size(architecture, _judge_conversion)


def _in_some_size(architecture: str, judge_size: Callable[..., Result]) -> Result:
    sigmoid.register()
    AttentionInterface.register("reference", reference_eager_attention_forward)
    AttentionMaskInterface.register("reference", lambda *a, **k: sdpa_mask(*a, **{**k, "allow_is_causal_skip": False}))
    reasons = []
    for make in (tiny.tiny_config, tiny.reduced_config):
        try:
            config = make(CONFIG_MAPPING[architecture])
            if tiny.size(config) > LARGEST:
                raise ValueError("too large")
            model = tiny.build(config, "eager")
        except Exception as error:
            reasons.append(_text(error, 120))
            continue
        try:
            result = judge_size(architecture, make, model)
        except Exception as error:
            if isinstance(error, ValueError) and 'attn_implementation="sigmoid"' in str(error):
                return Result(architecture, "refused", " ".join(str(error).split()))
            return Result(architecture, "failed", _text(error))
        if result.status != "not built":
            return result
        reasons.append(result.why)
    return Result(architecture, "not built", "; ".join(dict.fromkeys(reasons)))


def _judge(architecture: str, make: Callable[..., Any], eager: Any, normalize: bool = False) -> Result:
    config = make(CONFIG_MAPPING[architecture], sigmoid_bias=BIAS, sigmoid_normalize=normalize)
    model = tiny.build(config, "sigmoid")
    layers = {m for m in model.modules() if is_attention(m)}
    if not layers:
        return Result(architecture, "no attention")
    ran: set[nn.Module] = set()
    for layer in layers:  # a copy of the model calls the hooks, too
        layer.register_forward_hook(lambda layer, *_: ran.update({layer} & layers))
    if architecture in OWN_REFERENCE:
        eager.set_attn_implementation("reference")
    eager.load_state_dict(model.state_dict())
    reason = "no inputs found"
    for name, part in tiny.parts(model):
        if name and layers.intersection(part.modules()) <= ran:
            continue
        for inputs in tiny.inputs(part):
            try:
                problem = _problem(functools.partial(_compare, name), eager, model, inputs)
            except UnusableError as error:
                reason = f"no inputs found ({error})"
                continue
            if problem:
                where = f"{name or type(part).__name__}: {problem}"
                return Result(architecture, "wrong", where, len(ran), len(layers))
    if not ran:
        return Result(architecture, "not built", reason, 0, len(layers))
    return Result(architecture, "exact", OWN_REFERENCE.get(architecture, ""), len(ran), len(layers))


def _problem(compare: Callable[[Any, Any, Inputs], str], eager: Any, model: Any, inputs: Inputs) -> str:
    """Return what is wrong by ``compare``, in float64 if it is wrong in float32; or an empty string."""
    problem = compare(eager, model, inputs)
    if not problem:
        return ""
    double = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    try:
        return compare(copy.deepcopy(eager).double(), copy.deepcopy(model).double(), double)
    except UnusableError:
        return problem


class UnusableError(Exception):
    """The reference itself does not accept the inputs, or calls no attention."""


def _text(error: Exception, length: int | None = None) -> str:
    text = re.sub(r" from '/.*?'", "", " ".join(str(error).split()))  # paths of modules
    return f"{type(error).__name__}: {text[:length]}"


def _compare(part: str, eager: Any, model: Any, inputs: Inputs) -> str:
    """Return what is wrong with a part of ``model``, or an empty string."""
    ours, theirs = model.get_submodule(part), eager.get_submodule(part)
    with torch.no_grad():
        softmax = _run(theirs, inputs)
        _outputs(ours, inputs)  # models that keep biases from one forward to the next do so in both
    for bias in (BIAS, "log_visible"):
        _set_bias(model, bias)
        normalize = bool(getattr(model.config, "sigmoid_normalize", False))
        expected = _run(theirs, inputs, EagerSigmoid(bias, eager, model, normalize=normalize))
        found = _outputs(ours, inputs)
        if problem := _difference(found, expected, softmax):
            return f"bias {bias}: {problem}"
        try:
            sigmoid.check(ours, **_copies(inputs))
        except ValueError as error:  # a softmax remains
            return str(error)
        if bias == BIAS and (problem := _gradients(model, eager, found, expected)):
            return problem
    _set_bias(model, BIAS)
    return ""


def _set_bias(model: Any, bias: float | str) -> None:
    """Set the bias in the outermost configuration, and where transformers copied it from there."""
    model.config.sigmoid_bias = bias
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "sigmoid_bias"):
            module.config.sigmoid_bias = bias


def _run(part: nn.Module, inputs: Inputs, reference: EagerSigmoid | None = None) -> list[Tensor]:
    """Return the outputs of a softmax model, or those of its reference.

    Raises:
        UnusableError: if the model does not accept the inputs, or does not call the reference.
    """
    try:
        with reference or contextlib.nullcontext():
            out = _outputs(part, inputs)
    except Exception as error:
        raise UnusableError(_text(error, 120)) from error
    if reference is not None and not reference.calls:
        raise UnusableError("no eager attention")
    return out


def _copies(inputs: Inputs) -> Inputs:
    return {name: value.clone() for name, value in inputs.items()}


def _outputs(part: nn.Module, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    out = part(**_copies(inputs))
    values = dict(out) if hasattr(out, "keys") else {"": out}
    leaves = tree_leaves({n: v for n, v in values.items() if n not in ("past_key_values", "loss", "attentions")})
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _difference(found: list[Tensor], expected: list[Tensor], softmax: list[Tensor]) -> str:
    """Return how outputs differ from those of the reference, or an empty string."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return "outputs of other shapes"
    if [t.shape for t in softmax] != [t.shape for t in expected]:
        raise UnusableError("the length of the output depends on the weights")
    effect = max(map(_distance, expected, softmax), default=0.0)
    error = max(map(_distance, found, expected), default=0.0)
    if effect < 1e-4:
        raise UnusableError("attention does not change the output")
    if effect == float("inf"):
        raise UnusableError("the output of softmax is not finite, and any error would be small")
    return "" if error <= 1e-5 + 1e-3 * effect else f"error {error:.2g}, where softmax differs by {effect:.2g}"


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    if a.numel() == 0 or not (a.detach().isfinite() == b.detach().isfinite()).all():
        return 0.0 if a.numel() == 0 else float("inf")
    a, b = a.detach().nan_to_num(posinf=0, neginf=0), b.detach().nan_to_num(posinf=0, neginf=0)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def _gradients(model: Any, eager: Any, found: list[Tensor], expected: list[Tensor]) -> str:
    """Return which parameter's gradient differs, or an empty string."""
    eager_parameters = dict(eager.named_parameters())  # without the biases of layers, which are the model's
    named = [(n, p, eager_parameters.get(n, p)) for n, p in model.named_parameters() if p.requires_grad]
    losses: list[Any] = [sum(_projection(t) for t in outputs if t.requires_grad) for outputs in (found, expected)]
    if not all(isinstance(loss, Tensor) for loss in losses):
        return ""
    grad = functools.partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
    ours, theirs = grad(losses[0], [p for _, p, _ in named]), grad(losses[1], [q for _, _, q in named])
    scale = max((float(g.norm()) for g in theirs), default=0.0)
    for (name, *_), a, b in zip(named, ours, theirs, strict=True):
        error, size = float((a - b).norm()), float(b.norm())
        if error > 2e-3 * size + 1e-4 * scale:
            return f"gradient of {name}: error {error:.2g} of {size:.2g}"
    return ""


def _projection(t: Tensor) -> Tensor:
    """Return a sum with fixed weights of both signs (a norm would have no gradient where outputs are normalised)."""
    return t.flatten() @ torch.arange(t.numel()).cos().to(t.dtype) / t.numel() ** 0.5


# -- conversion ------------------------------------------------------------------------------------------------------


def _judge_conversion(architecture: str, _: Callable[..., Any], model: Any) -> Result:
    reason = "no inputs found"
    for name, part in tiny.parts(model):
        if name and not any(is_attention(m) for m in part.modules()):
            continue
        for inputs in tiny.inputs(part):
            try:
                with torch.no_grad():  # states that a model keeps with their graph could not be copied
                    _run(part, inputs)
            except UnusableError:
                continue
            try:
                problem = _problem_of_conversion(architecture, part, inputs)
            except ConversionError as error:
                reason = " ".join(str(error).split())
                if "do not reach the attention" not in reason:
                    return Result(architecture, "refused", reason)
            except UnusableError as error:
                reason = str(error)
            except Exception as error:
                return Result(architecture, "failed", f"{name}: {_text(error)}")
            else:
                status = "wrong" if problem else "exact"
                return Result(architecture, status, f"{name or type(part).__name__}: {problem}")
    return Result(architecture, "not built", reason)


def _problem_of_conversion(architecture: str, eager: Any, inputs: Inputs) -> str:
    """Return what is wrong with the converted copy of a model, or an empty string.

    Raises:
        ConversionError: if it is refused.
    """
    model = copy.deepcopy(eager)
    softmax = [t.detach() for t in _run(eager, inputs)]
    try:
        report = convert(model, [inputs, inputs])
    except ConversionError:
        new = model.config._attn_implementation != "eager" or any("sigmoid" in n for n in model.state_dict())
        if new or not all(torch.equal(a, b) for a, b in zip(_outputs(model, inputs), softmax, strict=True)):
            return "the refused model was changed"
        raise
    if [layer.name for layer in report.layers] != [name for name, m in model.named_modules() if is_attention(m)]:
        return f"converted {[layer.name for layer in report.layers]}"
    learned = [(n.rpartition(".")[2], p.data) for n, p in model.named_parameters() if ".sigmoid_bias." in n]
    torch.manual_seed(0)
    for name, values in learned:  # c and a are compared, with c so large that weights are not softmax's
        values.add_(0.3 * torch.randn_like(values) + (4.0 if name == "constant" else 0.0))
    if architecture in OWN_REFERENCE:
        eager.set_attn_implementation("reference")
    problem = _problem(_compare_conversion, eager, model, inputs)
    for _, values in learned:
        values.add_(0.1 * torch.randn_like(values))
    if not problem and (problem := _saved(model, inputs)) and _saved(eager, inputs):
        return ""  # transformers does not load the softmax model as it was, either
    return problem


def _compare_conversion(eager: Any, model: Any, inputs: Inputs) -> str:
    """Return how outputs differ from the reference's, or an empty string."""
    biases = {
        eager.get_submodule(name): (layer.sigmoid_bias.constant, layer.sigmoid_bias.slope)
        for name, layer in model.named_modules()
        if is_attention(layer)
    }
    expected = _run(eager, inputs, EagerSigmoid(biases, eager, model, normalize=True))
    found, expected, softmax = (
        _without_padding(t, inputs) for t in (_outputs(model, inputs), expected, _run(eager, inputs))
    )
    return _difference(found, expected, softmax) or _gradients(model, eager, found, expected)


def _without_padding(values: Iterable[Tensor], inputs: Inputs) -> list[Tensor]:
    """Leave out rows of padding: they see no key; with a mask of the lowest number logits are rounded off."""
    mask = inputs.get("attention_mask")
    return [t if mask is None or t.shape[:2] != mask.shape else t[mask.bool()] for t in values]


def _saved(model: Any, inputs: Inputs) -> str:
    """Return how the model differs after it was saved and loaded, or an empty string."""
    before = _outputs(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    for name, parameter in model.named_parameters():
        if ".sigmoid_bias." in name and not torch.equal(loaded.get_parameter(name), parameter):
            return f"{name} was not loaded"
    after = _outputs(loaded, inputs)[: len(before)]  # a part loaded alone may have a pooling layer more
    for found, expected in zip(after, before, strict=True):
        error = float((found - expected).detach().nan_to_num().abs().max())
        if error > 1e-5 * float(expected.detach().nan_to_num().abs().max()):
            return f"the loaded model's output differs by {error:.2g}"
    return ""
