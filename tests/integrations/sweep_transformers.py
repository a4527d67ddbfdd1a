"""Every architecture of the installed transformers: sigmoid attention is exact, or refused by name.

    python -m tests.integrations.sweep_transformers [ARCHITECTURE ...] [--write]
    python -m tests.integrations.sweep_transformers [ARCHITECTURE ...] --convert

The reference is the same model with transformers' eager attention, in which the softmax of ``eager_attention_forward``,
or of the layer itself, is replaced by the sigmoid: masks, biases and everything else are computed by transformers.

``judge`` chooses ``attn_implementation="sigmoid"``, with a number as bias, set in the outermost configuration only, and
with "log_visible", and compares outputs and gradients of all parameters. ``judge_conversion`` converts the model, the
whole or else its parts until one runs all of its attention layers. The converted model has a bias in each layer, and
must give the same outputs after it was saved and loaded; a refused one is unchanged.
"""

import argparse
import copy
import dataclasses
import functools
import inspect
import sys
import tempfile
import warnings
from collections import Counter

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sigattn.conversion import ConversionError, convert
from sigattn.integrations import transformers as sigmoid
from sigattn.integrations.transformers.configured import Configured, is_attention
from tests.integrations import compatibility_page as page
from tests.integrations import tiny_transformers as tiny

BIAS = -1.25
LARGEST = 80_000_000  # parameters


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


@dataclasses.dataclass
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


class EagerSigmoid(TorchFunctionMode):
    """Replaces the softmax of transformers' eager attention functions by the sigmoid.

    Args:
        bias: a number, "log_visible", or (c, a) of c + a · log visible for each layer, each (heads,).
        model: the model that is compared, whose classes say which layers outside of these functions are attention.
        normalize: divide the weights of a row by their sum, as biases of layers do.
    """

    def __init__(self, bias, model, normalize=None):
        super().__init__()
        self.kinds = tuple({m.softmax_class for m in model.modules() if isinstance(m, Configured)})
        self.bias, self.calls = bias, 0
        self.normalize = isinstance(bias, dict) if normalize is None else normalize

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and _softmax_layer(self.kinds) is not None:
            with self:
                return _written_sdpa(*args, **kwargs)
        if getattr(func, "__name__", "") != "softmax":
            return func(*args, **kwargs)
        logits, dim = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs.get("dim")
        if (call := _eager_attention()) is not None:
            layer, mask = call["module"], call.get("attention_mask")
            if call.get("sinks") is not None:  # before the largest logit was subtracted
                logits, mask = torch.cat([call["attn_weights"], call["sinks"]], -1), None
        elif (layer := _softmax_layer(self.kinds)) is not None and dim in (-1, logits.dim() - 1):
            mask = ...
        else:
            return func(*args, **kwargs)
        self.calls += 1
        bias = self.bias[layer] if isinstance(self.bias, dict) else self.bias
        log_weights = _log_weights(logits, bias, mask, margin=6.0 if self.normalize else 0.0)
        # the weights of a row sum to 1, however low they are, or to 0 where nothing is visible
        weights = torch.softmax(log_weights, -1).nan_to_num(0.0) if self.normalize else log_weights.exp()
        return weights.to(kwargs.get("dtype") or logits.dtype)


def _multi_head_attention(*args, **kwargs):
    """Compute ``F.multi_head_attention_forward`` of (N, B, E) as a formula; ``EagerSigmoid`` replaces the softmax."""
    call = inspect.signature(nn.functional.multi_head_attention_forward).bind(*args, **kwargs).arguments
    heads = call["num_heads"]
    apart = call.get("use_separate_proj_weight", False)
    weights = [call[f"{n}_proj_weight"] for n in "qkv"] if apart else call["in_proj_weight"].chunk(3)
    inputs = call["query"], call["key"], call["value"]
    q, k, v = (  # (B, H, N, D)
        nn.functional.linear(x, w, b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, weights, call["in_proj_bias"].chunk(3), strict=True)
    )
    mask, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if mask is not None:
        mask = (~mask if mask.dtype is torch.bool else mask).view(-1, heads, *mask.shape[-2:])
    if padding is not None:
        hidden = (padding if padding.dtype is torch.bool else padding < -90)[:, None, None]
        mask = (
            ~hidden if mask is None else mask & ~hidden if mask.dtype is torch.bool else mask.masked_fill(hidden, -1e9)
        )
    out = _written_sdpa(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
    return nn.functional.linear(out, call["out_proj_weight"], call["out_proj_bias"]), None


def _written_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Compute softmax attention as a formula; ``EagerSigmoid`` replaces the softmax."""
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return nn.functional.softmax(_masked(logits, attn_mask), dim=-1) @ value


def _masked(logits, mask):
    if mask is None:
        return logits
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min) if mask.dtype is torch.bool else logits + mask


def _frames(frame, count):
    """Iterate over a frame and those that called it."""
    while frame is not None and count:
        yield frame
        frame, count = frame.f_back, count - 1


def _eager_attention():
    """Return the variables of the eager attention function that calls the softmax; None outside of eager attention."""
    frames = _frames(sys._getframe(2), 6)
    return next((f.f_locals for f in frames if f.f_code.co_name.endswith("eager_attention_forward")), None)


def _softmax_layer(kinds):
    """Return the layer of these classes whose own code calls the softmax, or a function of PyTorch."""
    layers = (frame.f_locals.get("self") for frame in _frames(sys._getframe(2), 12))
    return next((layer for layer in layers if isinstance(layer, kinds)), None)


def reference_eager_attention_forward(
    module, query, key, value, attention_mask, scaling, position_bias=None, s_aux=None, **_
):
    """Compute softmax attention with boolean masks; ``EagerSigmoid`` replaces the softmax."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    logits = query @ key.mT * scaling + (0.0 if position_bias is None else position_bias)
    logits = _masked(logits, attention_mask)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
        attention_mask = None  # its width is another
    weights = nn.functional.softmax(logits, dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _log_weights(logits, bias, mask, margin=0.0):
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
        b = c + a * log_visible
    else:
        b = -log_visible - margin if bias == "log_visible" else bias
    return torch.where(visible, nn.functional.logsigmoid(logits + b), -torch.inf)


# -- one architecture -------------------------------------------------------------------------------------------------


def judge(architecture):
    """Compare the choice of "sigmoid" with the reference, in the smallest configuration that works.

    With weights of sum 1 where sigmoid attention asks for it: attention sinks act by the sum of a row.
    """
    result = _in_some_size(architecture, _judge)
    asks = "set config.sigmoid_normalize = True" in result.why
    return _in_some_size(architecture, functools.partial(_judge, normalize=True)) if asks else result


def judge_conversion(architecture):
    """Compare the converted model with the reference, in the smallest configuration that works."""
    return _in_some_size(architecture, _judge_conversion)


def _in_some_size(architecture, judge_size):
    warnings.filterwarnings("ignore")
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
            reasons.append(text_of(error))
            continue
        result = judge_size(architecture, make, model)
        if result.status != "not built":
            return result
        reasons.append(result.why)
    return Result(architecture, "not built", "; ".join(dict.fromkeys(reasons)))


def _judge(architecture, make, eager, normalize=False):
    try:
        config = make(CONFIG_MAPPING[architecture], sigmoid_bias=BIAS, sigmoid_normalize=normalize)
        model = tiny.build(config, "sigmoid")
    except Exception as error:
        return _error(architecture, error)
    layers = [m for m in model.modules() if is_attention(m)]
    if not layers:
        return Result(architecture, "no attention")
    ran, reason = _recorded_calls(layers), "no inputs found"
    if architecture in OWN_REFERENCE:
        eager = tiny.build(make(CONFIG_MAPPING[architecture]), "reference")
    eager.load_state_dict(model.state_dict())
    for name, part in tiny.parts(model):
        inside = set(part.modules())
        if name and all(layer in ran for layer in layers if layer in inside):
            continue
        for inputs in tiny.inputs(part):
            try:
                problem = _problem(functools.partial(_compare, name), eager, model, inputs)
            except Unusable as error:
                reason = f"no inputs found ({error})"
                continue
            except Exception as error:
                return _error(architecture, error)
            if problem:
                where = f"{name or type(part).__name__}: {problem}"
                return Result(architecture, "wrong", where, len(ran), len(layers))
    if not ran:
        return Result(architecture, "not built", reason, 0, len(layers))
    return Result(architecture, "exact", OWN_REFERENCE.get(architecture, ""), len(ran), len(layers))


def _problem(compare, eager, model, inputs):
    """Return what is wrong by ``compare``, in float64 if it is wrong in float32; or an empty string."""
    problem = compare(eager, model, inputs)
    if not problem:
        return ""
    double = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    try:
        return compare(copy.deepcopy(eager).double(), copy.deepcopy(model).double(), double)
    except Unusable:
        return problem


class Unusable(Exception):
    """The reference itself does not accept the inputs, or calls no attention."""


def _recorded_calls(layers):
    """Return a set to which each of the layers is added when it runs."""
    ran = set()
    for layer in layers:  # a copy of the model calls the hooks, too
        layer.register_forward_hook(lambda module, *_: ran.add(module) if module in layers else None)
    return ran


def text_of(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _error(architecture, error):
    text = " ".join(str(error).split())
    refused = isinstance(error, ValueError) and 'attn_implementation="sigmoid"' in text
    return Result(
        architecture, "refused" if refused else "failed", text if refused else f"{type(error).__name__}: {text}"
    )


def _compare(part, eager, model, inputs):
    """Return what is wrong with a part of ``model``, or an empty string."""
    with torch.no_grad():
        softmax = run(eager.get_submodule(part), inputs, None)
        outputs(model.get_submodule(part), inputs)  # models that keep biases from one forward to the next do so in both
    for bias in (BIAS, "log_visible"):
        _set_bias(model, bias)
        reference = EagerSigmoid(bias, model, bool(getattr(model.config, "sigmoid_normalize", False)))
        expected = run(eager.get_submodule(part), inputs, reference)
        if not reference.calls:
            raise Unusable("no eager attention")
        found = outputs(model.get_submodule(part), inputs)
        if problem := difference(found, expected, softmax):
            return f"bias {bias}: {problem}"
        if problem := _remaining_softmax(model.get_submodule(part), inputs):
            return problem
        if bias == BIAS and (problem := _gradients(model, eager, found, expected)):
            return problem
    _set_bias(model, BIAS)
    return ""


def _set_bias(model, bias):
    """Set the bias in the outermost configuration, and where transformers copied it from there."""
    model.config.sigmoid_bias = bias
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "sigmoid_bias"):
            module.config.sigmoid_bias = bias


def _remaining_softmax(part, inputs):
    try:
        sigmoid.check(part, **{name: value.clone() for name, value in inputs.items()})
    except ValueError as error:
        return str(error)
    return ""


def run(part, inputs, mode):
    try:
        if mode is None:
            return outputs(part, inputs)
        with mode:
            return outputs(part, inputs)
    except Exception as error:
        raise Unusable(text_of(error)) from error


def outputs(part, inputs):
    torch.manual_seed(0)
    out = part(**{name: value.clone() for name, value in inputs.items()})
    values = dict(out) if hasattr(out, "keys") else {"": out}
    leaves = tree_leaves({n: v for n, v in values.items() if n not in ("past_key_values", "loss", "attentions")})
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def difference(found, expected, softmax):
    if [t.shape for t in found] != [t.shape for t in expected]:
        return "outputs of other shapes"
    if [t.shape for t in softmax] != [t.shape for t in expected]:
        raise Unusable("the length of the output depends on the weights")
    effect = max((_distance(a, b) for a, b in zip(expected, softmax, strict=True)), default=0.0)
    error = max((_distance(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if effect < 1e-4:
        raise Unusable("attention does not change the output")
    if effect == float("inf"):
        raise Unusable("the output of softmax is not finite, and any error would be small")
    return "" if error <= 1e-5 + 1e-3 * effect else f"error {error:.2g}, where softmax differs by {effect:.2g}"


def _distance(a, b):
    """Return the largest difference, relative to the largest value."""
    if a.numel() == 0 or not (a.detach().isfinite() == b.detach().isfinite()).all():
        return 0.0 if a.numel() == 0 else float("inf")
    a, b = a.detach().nan_to_num(posinf=0, neginf=0), b.detach().nan_to_num(posinf=0, neginf=0)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def _gradients(model, eager, found, expected):
    eager_parameters = dict(eager.named_parameters())  # without the biases of layers, which are the model's
    named = [(n, p, eager_parameters.get(n, p)) for n, p in model.named_parameters() if p.requires_grad]
    losses = [sum(_projection(t) for t in outputs if t.requires_grad) for outputs in (found, expected)]
    if not all(isinstance(loss, Tensor) for loss in losses):
        return ""
    ours = torch.autograd.grad(losses[0], [p for _, p, _ in named], allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(losses[1], [q for _, _, q in named], allow_unused=True, materialize_grads=True)
    scale = max((float(g.norm()) for g in theirs), default=0.0)
    for (name, *_), a, b in zip(named, ours, theirs, strict=True):
        error, size = float((a - b).norm()), float(b.norm())
        if error > 2e-3 * size + 1e-4 * scale:
            return f"gradient of {name}: error {error:.2g} of {size:.2g}"
    return ""


def _projection(t):
    """Return a sum with fixed weights of both signs (a norm would have no gradient where outputs are normalised)."""
    return t.flatten() @ torch.arange(t.numel()).cos().to(t.dtype) / t.numel() ** 0.5


# -- conversion ------------------------------------------------------------------------------------------------------


def _judge_conversion(architecture, _, model):
    reason = "no inputs found"
    for name, part in tiny.parts(model):
        if name and not any(is_attention(m) for m in part.modules()):
            continue
        for inputs in tiny.inputs(part):
            try:
                with torch.no_grad():  # else models that keep their states could not be copied
                    run(part, inputs, None)
            except Unusable:
                continue
            try:
                problem = _problem_of_conversion(architecture, part, inputs)
            except ConversionError as error:
                reason = " ".join(str(error).split())
                if "do not reach the attention" in reason:
                    continue
                changed = part.config._attn_implementation != "eager" or any("sigmoid" in n for n in part.state_dict())
                return Result(architecture, "wrong" if changed else "refused", reason)
            except Unusable as error:
                reason = str(error)
                continue
            except Exception as error:
                return Result(architecture, "failed", f"{name}: {text_of(error)}")
            return Result(architecture, "wrong" if problem else "exact", f"{name or type(part).__name__}: {problem}")
    return Result(architecture, "not built", reason)


def _problem_of_conversion(architecture, eager, inputs):
    """Return what is wrong with the converted copy of a model, or an empty string.

    Raises:
        ConversionError: if it is refused.
    """
    model = copy.deepcopy(eager)
    softmax = [t.detach() for t in run(eager, inputs, None)]
    try:
        report = convert(model, [inputs, inputs])
    except ConversionError:
        unchanged = all(torch.equal(a, b) for a, b in zip(outputs(model, inputs), softmax, strict=True))
        if not unchanged or model.config._attn_implementation != "eager":
            return "the refused model was changed"
        raise
    if [layer.name for layer in report.layers] != [name for name, m in model.named_modules() if is_attention(m)]:
        return f"converted {[layer.name for layer in report.layers]}"
    learned = [(n.rpartition(".")[2], p.data) for n, p in model.named_parameters() if ".sigmoid_bias." in n]
    torch.manual_seed(0)
    for name, values in learned:  # c and a are compared, with c so large that weights are not softmax's
        values.add_(0.3 * torch.randn_like(values) + (4.0 if name == "constant" else 0.0))
    if architecture in OWN_REFERENCE:
        for module in eager.modules():
            if isinstance(module, PreTrainedModel):
                module.config._attn_implementation_internal = "reference"
    problem = _problem(_compare_conversion, eager, model, inputs)
    for _, values in learned:
        values.add_(0.1 * torch.randn_like(values))
    if not problem and (problem := _saved(model, inputs)) and _saved(eager, inputs):
        return ""  # transformers does not load the softmax model as it was, either
    return problem


def _compare_conversion(eager, model, inputs):
    """Return how outputs differ from the reference's, or an empty string."""
    biases = {
        eager.get_submodule(name): (layer.sigmoid_bias.constant, layer.sigmoid_bias.slope)
        for name, layer in model.named_modules()
        if is_attention(layer)
    }
    reference = EagerSigmoid(biases, model)
    expected = run(eager, inputs, reference)
    if not reference.calls:
        raise Unusable("no eager attention")
    found, expected, softmax = (
        _without_padding(t, inputs) for t in (outputs(model, inputs), expected, run(eager, inputs, None))
    )
    return difference(found, expected, softmax) or _gradients(model, eager, found, expected)


def _without_padding(values, inputs):
    """Leave out rows of padding: they see no key; with a mask of the lowest number logits are rounded off."""
    mask = inputs.get("attention_mask")
    return [t if mask is None or t.shape[:2] != mask.shape else t[mask.bool()] for t in values]


def _saved(model, inputs):
    """Return how the model differs after it was saved and loaded, or an empty string."""
    before = outputs(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    for name, parameter in model.named_parameters():
        if ".sigmoid_bias." in name and not torch.equal(loaded.get_parameter(name), parameter):
            return f"{name} was not loaded"
    after = outputs(loaded, inputs)[: len(before)]  # a part loaded alone may have a pooling layer more
    for found, expected in zip(after, before, strict=True):
        error = float((found - expected).detach().nan_to_num().abs().max())
        if error > 1e-5 * float(expected.detach().nan_to_num().abs().max()):
            return f"the loaded model's output differs by {error:.2g}"
    return ""


# -- all architectures ------------------------------------------------------------------------------------------------


def write(results):
    """Write results into the page, in place of older ones for the same architectures."""
    try:
        rows = page.results("transformers")
    except FileNotFoundError:
        rows = {}
    known = set(tiny.architectures())
    rows = {name: row for name, row in rows.items() if name in known}
    # a missing package, such as torchvision, is no result
    judged = [r for r in results if "ImportError" not in r.why or r.architecture not in rows]
    rows |= {result.architecture: dataclasses.asdict(result) for result in judged}
    page.write("transformers", f"transformers {transformers.__version__}", list(rows.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="default: all of the registry")
    parser.add_argument("--convert", action="store_true", help="convert softmax models")
    parser.add_argument("--write", action="store_true", help="write the results into docs/compatibility.md")
    chosen = parser.parse_args()
    results = []
    for architecture in chosen.architectures or tiny.architectures():
        result = judge_conversion(architecture) if chosen.convert else judge(architecture)
        results.append(result)
        ran = f"{result.ran}/{result.layers}"
        print(f"{result.architecture:32} {result.status:12} {ran:6} {result.why[:200]}", flush=True)
        if chosen.write and not chosen.convert:
            write(results)
    print(Counter(result.status for result in results))


if __name__ == "__main__":
    main()
