"""``convert``: turn a model's softmax attention into sigmoid attention."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.conversion.adapter import Adapter, refuse_distributed, refuse_offloaded
from sigattn.conversion.fit import fit_biases
from sigattn.conversion.measure import measure_layers
from sigattn.conversion.modules import ModuleAdapter, is_over_channels
from sigattn.conversion.output_scale import fit_output_scales
from sigattn.conversion.refinement import refine
from sigattn.conversion.report import ConversionError, ConversionReport
from sigattn.nn.bias import AttentionBias, BatchLengthBias, QueryBias, as_bias
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.fitted_bias import FITTED, QuadraticBias
from sigattn.nn.observer import Attend, AttentionCall
from sigattn.ops import validation

Loss = Callable[[Any, Any], Tensor]
REFINE_STEPS = 64


@torch.inference_mode(False)  # or the new parameters could not be trained
@torch.no_grad()
def convert(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    bias: AttentionBias | float | type[AttentionBias] | None = None,
    loss: Loss | None = None,
    refine_steps: int | None = None,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    allow_softmax: Sequence[str] = (),
) -> ConversionReport:
    """Turn a model's softmax attention into sigmoid attention, in place and with its weights.

    Without batches, each attention gets the same rule for b. The model computes another function: train it from the
    start, or further.

    With batches, each head gets a bias that is fitted on them, and the model computes nearly the same as before. It is
    run on the batches, in evaluation mode and without gradient, while statistics of its attention logits are collected:
    memory is linear in the length, and there is no second copy of the model. A quarter of the batches is held out and
    measures the conversion. Each layer gets a bias and a scale of its output (``sigattn.nn.QuadraticBias``), whose
    parameters are ordinary ones of the model. They are fitted by least squares, and refined by gradient descent on the
    error of the layer's output. The terms in the query, the scale and the refinement are used in a layer if they lower
    that error on the held-out batches.

    Every attention is converted, or the call raises, names it, and leaves the model unchanged. A softmax that does not
    belong to an attention (a classifier, a router) stays, and the report lists it.

    Args:
        model: any module whose attention is ``sigattn.nn.Attention``, ``nn.MultiheadAttention`` or calls
            ``F.scaled_dot_product_attention``: models of this library, timm, torchvision, and ``nn.Transformer``; or
            that is, or contains, models of transformers.
        batches: a few batches, such as those of training: each a tensor, a sequence of positional arguments, or a
            mapping of keyword arguments of the model; with ``loss``, anything that it takes. Two or more, so that one
            can be held out; eight of some thousand tokens are enough. All are kept in memory, and the model is run on
            each about five times, so do not pass a loader of a whole data set (``itertools.islice`` takes a part).
        bias: without batches, b of every layer: a number, one of ``sigattn.nn.bias`` (copied for each layer,
            where it is learned), or None for -log of the number of visible keys: of those that the query sees, or, in
            layers of PyTorch and of your own, that at least one query of the sample sees. With a KV cache the latter
            grows from call to call; pass ``log_length_bias(context)`` instead. With batches, the class of the biases:
            None for ``QuadraticBias``, or ``sigattn.nn.VisibleKeysLinearBias`` for c + a · log(visible keys), without a
            scale of the output: a layer then takes the time of one with a number for each head, and is further from
            softmax until it is trained.
        loss: with batches, function from model and batch to a scalar, which also runs the model. None runs
            ``model(batch)``; its loss is then the output's attribute ``loss``, if there is one.
        refine_steps: with batches, number of steps of the refinement, each of which runs the model on one batch and
            differentiates its attention only; None for 64, 0 for none.
        example: without batches, arguments of one forward call, positional or by name. The model is run once, in
            evaluation mode: a softmax is an attention's if its weights are multiplied with a matrix of activations.
            Layers that the run does not reach, and all layers without an example, are judged by the code of their
            classes and of the functions that these call. That cannot see which of two paths a flag selects, and takes a
            softmax for an attention's if its layer multiplies matrices. With batches, the first one is the example.
        allow_softmax: without batches, names of layers that may keep their softmax, or patterns of names
            ("decoder.*.router").

    Raises:
        TypeError: if model is no module, batches cannot be iterated or is a single mapping or tensor, loss is no
            function, refine_steps is no integer, allow_softmax is a string, or bias is of another type.
        ValueError: if refine_steps is negative, bias is another class, or an argument is given that applies only with,
            or only without, batches.
        ConversionError: a ValueError, if an attention cannot be converted, or there is none; if there are no batches,
            one does not run, or an attention is not reached by them; or if statistics, outputs or losses (but that of
            b = -log n) are not finite.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    >>> print(convert(encoder))
    layers.0.self_attn  MultiheadAttention  multi_head_attention_forward  converted
    layers.1.self_attn  MultiheadAttention  multi_head_attention_forward  converted
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a module, got {model!r}")
    if batches is None:
        _refuse_arguments("with", loss=loss, refine_steps=refine_steps)
        return _replace(model, bias, example, allow_softmax)
    _refuse_arguments("without", example=example, allow_softmax=allow_softmax or None)
    if bias is not None and bias not in FITTED.values():
        raise ValueError(
            f"convert: with batches, bias must be {' or '.join(FITTED)}, a class of sigattn.nn, got {bias!r}"
        )
    steps = REFINE_STEPS if refine_steps is None else validation.count("convert", "refine_steps", refine_steps)
    kind: Any = QuadraticBias if bias is None else bias
    return _fit(model, _checked_batches(batches), _checked_loss(loss), steps, kind)


def _refuse_arguments(condition: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"convert: {name} applies only {condition} batches, got {name}={value!r}")


def _replace(
    model: nn.Module,
    bias: Any,
    example: Sequence[Any] | Mapping[str, Any] | None,
    allow_softmax: Sequence[str],
) -> ConversionReport:
    """Convert a model without a fit."""
    start = time.perf_counter()
    if isinstance(allow_softmax, str):
        raise TypeError(f"convert: allow_softmax is a sequence of names, got the string {allow_softmax!r}")
    if isinstance(bias, type) and issubclass(bias, AttentionBias):
        raise ValueError(
            f"convert: without batches, bias must be a number or an instance, got the class {bias.__name__}"
        )
    rule = None if bias is None else as_bias("convert: bias", bias)
    if isinstance(rule, QueryBias):
        raise ConversionError(
            "convert does not support QueryBias, because layers compute Q themselves: use another bias"
        )
    is_learned = rule is not None and next(rule.parameters(), None) is not None
    if is_learned:
        refuse_distributed(model)
    adapter = _transformers_adapter(model, None) if not allow_softmax else None
    adapter = adapter or ModuleAdapter(model, example, allow_softmax, fitted=False)
    names = adapter.layers()
    if is_learned:
        refuse_offloaded({name: model.get_submodule(name) for name in names})
    adapter.swap({name: copy.deepcopy(rule) for name in names})
    return ConversionReport(adapter.softmax, seconds=time.perf_counter() - start)


def _fit(
    model: nn.Module, batches: list[Any], loss: Loss | None, refine_steps: int, bias: type[AttentionBias]
) -> ConversionReport:
    """Convert a model with biases of a class that are fitted on batches."""
    start = time.perf_counter()
    _refuse_adapters(model)
    refuse_distributed(model)
    every = range(len(batches))
    held_out = every[-max(1, len(batches) // 4) :]
    fitted_on = every[: len(batches) - len(held_out)] or held_out
    with _evaluation(model):
        run_first = functools.partial(_run, model, batches, fitted_on[:1], loss)
        adapter = _transformers_adapter(model, run_first) or ModuleAdapter(model, run_first)
        names = adapter.layers()
        refuse_offloaded({name: model.get_submodule(name) for name in names})

        def run(indices: Sequence[int], attend: Attend) -> float | None:
            with adapter.observe(torch.no_grad()(attend)):  # threads of the model have gradients enabled
                return _run(model, batches, indices, loss)

        def run_held_out(attend: Attend) -> float | None:
            return run(held_out, attend)

        if bias is QuadraticBias and isinstance(adapter, ModuleAdapter):
            _refuse_channels(model, lambda attend: run(fitted_on[:1], attend))
        fits = fit_biases(lambda attend: run(fitted_on, attend), names, bias)
        biases: dict[str, AttentionBias] = {name: of[0] for name, of in fits.items()}
        if bias is QuadraticBias:
            biases = fit_output_scales(lambda attend: run(fitted_on, attend), run_held_out, fits)
        if refine_steps:
            single = [functools.partial(run, fitted_on[i : i + 1]) for i in range(len(fitted_on))]
            biases = refine(single, run_held_out, biases, refine_steps)
        layers, loss_softmax = measure_layers(run_held_out, biases)
        loss_log_n = loss_converted = None
        if loss_softmax is not None:
            log_n = dict.fromkeys(names, BatchLengthBias())
            loss_log_n, loss_converted = (run_held_out(_answer_by(b)) for b in (log_n, biases))
    for kind, value in (("with softmax", loss_softmax), ("converted", loss_converted)):
        if value is not None and not math.isfinite(value):
            raise ConversionError(f"convert: the loss must be finite, got {value} {kind}")
    adapter.swap(biases)
    return ConversionReport(
        adapter.softmax,
        tuple(layers),
        loss_softmax,
        loss_log_n,
        loss_converted,
        len(fitted_on),
        len(held_out),
        fitted_on is not held_out,
        time.perf_counter() - start,
    )


def _transformers_adapter(model: nn.Module, run: Callable[[], object] | None) -> Adapter | None:
    """Return the adapter of models of transformers, or None for others.

    Without a run it is None, too, if the attention interface does not reach all of a model, whose layers are replaced.
    """
    if "transformers.modeling_utils" not in sys.modules:  # no model can be of transformers, whose import takes seconds
        return None
    from sigattn.conversion import transformers

    if not transformers.find_roots(model) or (run is None and not transformers.interface_reaches_all(model)):
        return None
    return transformers.TransformersAdapter(model, run)


def _checked_batches(batches: Any) -> list[Any]:
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"convert: batches must be an iterable of batches, got {type(batches).__name__}; pass a single batch as "
            "[batch]"
        )
    batches = list(batches)
    if not batches:
        raise ConversionError("convert: batches is empty; pass a few batches of the model's inputs")
    return batches


def _checked_loss(loss: Any) -> Loss | None:
    if loss is not None and not callable(loss):
        raise TypeError(f"convert: loss must be a function of model and batch, or None, got {loss!r}")
    function: Loss | None = loss
    return function


def _refuse_channels(model: nn.Module, run: Callable[[Attend], object]) -> None:
    """Raise ConversionError for attention over channels, whose bias would be tied to the number of positions."""
    refused: dict[str, None] = {}

    def observe(call: AttentionCall) -> Any:
        if is_over_channels(model, call):
            refused[call.name] = None
        return call.softmax()

    run(observe)
    if refused:
        names = ", ".join(f"{name!r} ({type(model.get_submodule(name)).__name__})" for name in refused)
        raise ConversionError(
            f"convert: the features of the queries of {names} are positions (attention over channels). A bias with a "
            "coefficient for each would fit inputs of one size only: pass bias=VisibleKeysLinearBias"
        )


def _refuse_adapters(model: nn.Module) -> None:
    """Raise for adapters of peft: they are saved without their model, and would be loaded on one with softmax."""
    for name, module in model.named_modules():
        if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
            where = f"{name} is a {type(module).__name__}" if name else f"it is a {type(module).__name__}"
            raise ConversionError(
                f"convert: {type(model).__name__} has an adapter of peft ({where}), which is saved without the "
                "converted attention: convert the base model, save it, and add the adapter to it; or convert "
                "model.merge_and_unload()"
            )


def _answer_by(biases: Mapping[str, AttentionBias]) -> Attend:
    """Return the function that answers each call with sigmoid attention of its layer's bias."""

    def attend(call: AttentionCall) -> Any:
        return call.sigmoid(biases[call.name])

    return attend


def _run(model: nn.Module, batches: Sequence[Any], indices: Sequence[int], loss: Loss | None) -> float | None:
    """Run a model on the batches of these indices, and return its mean loss; None if a batch has none.

    Random numbers, such as the masks of an autoencoder, are the same in each run, so that losses can be compared.

    Raises:
        ConversionError: if the model or the loss raises.
    """
    with torch.random.fork_rng(sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)):
        losses = [_loss(model, batches, i, loss) for i in indices]
    known = [value for value in losses if value is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None


def _loss(model: nn.Module, batches: Sequence[Any], i: int, loss: Loss | None) -> float | None:
    try:
        value = getattr(_forward(model, batches[i]), "loss", None) if loss is None else loss(model, batches[i])
        return None if value is None else float(value)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"convert: the model does not run on batch {i} of {len(batches)}: {type(error).__name__}: {error}"
        ) from error


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Within the context, run a model uncompiled in evaluation mode and without PyTorch's fused encoder layers."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
