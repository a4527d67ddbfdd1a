"""``convert``: turn a model's softmax attention into sigmoid attention that computes nearly the same."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.conversion.attention_call import Adapter, Attend, AttentionCall, ConversionError
from sigattn.conversion.fit import fit_biases
from sigattn.conversion.measure import measure_layers
from sigattn.conversion.modules import ModuleAdapter
from sigattn.conversion.output_scale import fit_output_scales
from sigattn.conversion.refinement import refine
from sigattn.conversion.report import ConversionReport
from sigattn.nn.bias import AttentionBias, BatchLengthBias
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.fitted_bias import FITTED, QuadraticBias
from sigattn.ops import validation

Loss = Callable[[Any, Any], Tensor]


@torch.inference_mode(False)  # or the new parameters could not be trained
@torch.no_grad()
def convert(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    refine_steps: int = 64,
    bias: type[AttentionBias] = QuadraticBias,
) -> ConversionReport:
    """Turn a model's softmax attention into sigmoid attention with a fitted bias and output scale, in place.

    The model is run on the batches, in evaluation mode and without gradient, while statistics of its attention logits
    are collected: memory is linear in the length, and there is no second copy of the model. A quarter of the batches is
    held out and measures the conversion. The weights are unchanged; each layer gets a bias and a scale of its output
    (``sigattn.nn.QuadraticBias``), whose parameters are ordinary ones of the model. They are fitted by least squares,
    and refined by gradient descent on the error of the layer's output. The terms in the query, the scale and the
    refinement are used in a layer if they lower that error on the held-out batches.

    Every attention is converted, or the call raises and the model is unchanged. A softmax that does not belong to an
    attention (a classifier, a router) stays.

    Args:
        model: any module whose attention is ``sigattn.nn.Attention``, ``nn.MultiheadAttention`` or calls
            ``F.scaled_dot_product_attention``: models of this library, timm, torchvision, and ``nn.Transformer``; or
            that is, or contains, models of transformers that use its attention interface.
        batches: a few batches, such as those of training: each a tensor, a sequence of positional arguments, or a
            mapping of keyword arguments of the model; with ``loss``, anything that it takes. Two or more, so that one
            can be held out; eight of some thousand tokens are enough. All are kept in memory, and the model is run on
            each about five times, so do not pass a loader of a whole data set (``itertools.islice`` takes a part).
        loss: function from model and batch to a scalar, which also runs the model. None runs ``model(batch)``; its loss
            is then the output's attribute ``loss``, if there is one.
        refine_steps: number of steps of the refinement, each of which runs the model on one batch and differentiates
            its attention only; 0 for none.
        bias: class of the biases: ``QuadraticBias``, or ``sigattn.nn.VisibleKeysLinearBias`` for c + a · log(visible
            keys), without a scale of the output: a layer then takes the time of one with a number for each head, and
            is further from softmax until it is trained.

    Raises:
        TypeError: if model is no module, batches cannot be iterated or is a single mapping or tensor, loss is no
            function, or refine_steps is no integer.
        ValueError: if refine_steps is negative, or bias is another class.
        ConversionError: a ValueError, if there are no batches, a batch does not run, an attention cannot be converted
            or is not reached by the batches, there is none, it is sigmoid already, or statistics, outputs or losses
            (but that of b = -log n) are not finite.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    >>> report = convert(encoder, torch.randn(5, 8, 20, 64).unbind())
    >>> [layer.name for layer in report.layers]
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    start = time.perf_counter()
    _check_types(model, batches, loss)
    _refuse_adapters(model)
    refine_steps = validation.count("convert", "refine_steps", refine_steps)
    if bias not in FITTED.values():
        raise ValueError(f"convert: bias must be {' or '.join(FITTED)}, a class of sigattn.nn, got {bias!r}")
    batches = list(batches)
    if not batches:
        raise ConversionError("convert: batches is empty; pass a few batches of the model's inputs")
    every = range(len(batches))
    held_out = every[-max(1, len(batches) // 4) :]
    fitted_on = every[: len(batches) - len(held_out)] or held_out
    with _evaluation(model):
        run_first = functools.partial(_run, model, batches, fitted_on[:1], loss)
        adapter = _adapter(model, run_first)
        names = adapter.layers()
        if bias is QuadraticBias and isinstance(adapter, ModuleAdapter):
            adapter.refuse_channel_attention(run_first)

        def run(given: Sequence[int], attend: Attend) -> float | None:
            with adapter.observe(torch.no_grad()(attend)):  # threads of the model have gradients enabled
                return _run(model, batches, given, loss)

        def run_held_out(attend: Attend) -> float | None:
            return run(held_out, attend)

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
        tuple(layers),
        loss_softmax,
        loss_log_n,
        loss_converted,
        len(fitted_on),
        len(held_out),
        fitted_on is not held_out,
        time.perf_counter() - start,
    )


def _adapter(model: nn.Module, run: Callable[[], object]) -> Adapter:
    """Return the adapter of a model's family."""
    if "transformers.modeling_utils" in sys.modules:  # else no model can be of transformers, whose import takes seconds
        from sigattn.conversion.transformers import TransformersAdapter, contains_transformers_model

        if contains_transformers_model(model):
            return TransformersAdapter(model, run)
    return ModuleAdapter(model, run)


def _check_types(model: object, batches: object, loss: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be an nn.Module, got {type(model).__name__}")
    if isinstance(batches, (Mapping, str, Tensor)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"convert: batches must be an iterable of batches, got {type(batches).__name__}; pass a single batch as "
            "[batch]"
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"convert: loss must be a function of model and batch, or None, got {loss!r}")


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


def _run(model: nn.Module, batches: Sequence[Any], given: Sequence[int], loss: Loss | None) -> float | None:
    """Run a model on the batches of these indices, and return its mean loss; None if a batch has none.

    Random numbers, such as the masks of an autoencoder, are the same in each run, so that losses can be compared.

    Raises:
        ConversionError: if the model or the loss raises.
    """
    with torch.random.fork_rng(sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)):
        losses = [_loss(model, batches, i, loss) for i in given]
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
