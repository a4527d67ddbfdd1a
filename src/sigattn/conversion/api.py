"""``convert``: turn a model's softmax attention into sigmoid attention."""

import copy
import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sigattn.conversion.adapter import Adapter, device_of, refuse_distributed, refuse_offloaded, refuse_peft
from sigattn.conversion.fit import fit_biases
from sigattn.conversion.measure import measure_layers, measure_model
from sigattn.conversion.modules import ModuleAdapter
from sigattn.conversion.report import ConversionError, ConversionReport, errors_of
from sigattn.nn.bias import AttentionBias, as_bias
from sigattn.nn.evaluation import evaluation_mode
from sigattn.nn.observer import Attend, AttentionCall

Loss = Callable[[Any, Any], Tensor]


@torch.inference_mode(False)  # or the new parameters could not be trained
@torch.no_grad()
@errors_of("convert")
def convert(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    normalize: bool = True,
    bias: AttentionBias | float | None = None,
    loss: Loss | None = None,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    keep: Sequence[str] = (),
    max_error: float | None = None,
) -> ConversionReport:
    """Turn a model's softmax attention into sigmoid attention, in place and with its weights.

    With batches, the model computes nearly the same as before. It is run on them, in evaluation mode and without
    gradient, while statistics of its attention logits are collected: memory is linear in the length, and there is no
    second copy of the model. Each head gets the bias c + a · log(visible keys) of
    ``sigattn.nn.VisibleKeysLinearBias``, fitted by least squares, whose parameters are ordinary ones of the model; the
    weights of each query are divided by their sum. A quarter of the batches is held out and measures the conversion.

    Without batches, each attention gets the same rule for b. The model computes another function: train it from the
    start, or further.

    Every attention is converted but those of ``keep`` and ``max_error``, or the call raises, names what cannot be
    converted, and leaves the model unchanged. A layer that writes its softmax out computes sigmoid weights of the same
    logits in its place, in the memory that it had, with one bias for all heads if its logits do not show the heads. A
    softmax that does not belong to an attention (a classifier, a router) stays. The report lists every softmax.

    Args:
        model: any module whose attention is ``sigattn.nn.Attention`` or ``nn.MultiheadAttention``, or calls
            ``F.scaled_dot_product_attention`` or a softmax over keys: models of this library, timm, torchvision, and
            ``nn.Transformer``; or that is, or contains, models of transformers.
        batches: a few batches, such as those of training, of all lengths that matter: each a tensor, a sequence of
            positional arguments, or a mapping of keyword arguments of the model (or its one argument, if it takes a
            mapping); of a ``SentenceTransformer`` also a list of texts; with ``loss``, anything that it takes. Eight of
            some thousand tokens are enough. All are kept in memory (``itertools.islice`` takes a part of a loader).
        normalize: divide the weights of each query by their sum, as ``sigmoid_attention(normalize=True)`` does. False
            is the paper's sigmoid attention, without batches only: no bias of a head brings it near to softmax.
        bias: without batches, b of every layer: a number, one of ``sigattn.nn.bias`` (copied for each layer,
            where it is learned), or None for -log of the number of visible keys: of those that the query sees, or, in
            layers of PyTorch and of your own, that at least one query of the sample sees. With a KV cache the latter
            grows from call to call; pass ``log_length_bias(context)`` instead.
        loss: with batches, function from model and batch to a scalar, which also runs the model. None runs
            ``model(batch)``; its loss is then the output's attribute ``loss``, if there is one.
        example: without batches, arguments of one forward call, positional or by name. The model is run once, in
            evaluation mode: a softmax is an attention's if its weights are multiplied with a matrix of activations.
            Layers that the run does not reach, and all layers without an example, are judged by their code, which does
            not tell which path a flag selects: a softmax is an attention's if its layer multiplies matrices, and one
            that is written out is refused. With batches, the first one is the example.
        keep: names of layers that keep their softmax, or patterns of names ("decoder.*").
        max_error: with batches, the largest relative error of a layer's output, ‖O - O_softmax‖ / ‖O_softmax‖ on the
            held-out batches; layers above it keep their softmax, and the report names them.

    Raises:
        TypeError, ValueError: if an argument is of another type, out of range, or applies only with, or only without,
            batches.
        ConversionError: a ValueError, if an attention cannot be converted, or there is none; if a name of ``keep`` is
            no layer with a softmax, or a model of this library would have softmax in some layers, which its
            configuration cannot say; if there are no batches, one does not run, or an attention is not reached by them;
            or if logits, outputs or losses are not finite.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    >>> print(convert(encoder))
    layers.0.self_attn  MultiheadAttention  multi_head_attention_forward  converted
    layers.1.self_attn  MultiheadAttention  multi_head_attention_forward  converted
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a module, got {type(model).__name__}")
    if not isinstance(normalize, bool):
        raise TypeError(f"convert: normalize must be True or False, got {normalize!r}")
    if isinstance(keep, str):
        raise TypeError(f"convert: keep is a sequence of names, got the string {keep!r}")
    if batches is None:
        _refuse_arguments("with", loss=loss, max_error=max_error)
        return _replace(model, bias, normalize, example, keep)
    _refuse_arguments("without", bias=bias, example=example)
    if not normalize:
        raise ValueError(
            "convert: normalize=False applies only without batches, because no bias of a head brings the paper's "
            "sigmoid attention near to softmax: leave out the batches and train the model, or leave out normalize=False"
        )
    if max_error is not None and (max_error is True or not (isinstance(max_error, (int, float)) and max_error > 0)):
        raise ValueError(f"convert: max_error must be a positive number, got {max_error!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"convert: loss must be a function of model and batch, or None, got {loss!r}")
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"convert: batches must be an iterable of batches, got {type(batches).__name__}; pass a single batch as "
            "[batch]"
        )
    if not (batches := list(batches)):
        raise ConversionError("batches is empty; pass a few batches of the model's inputs")
    return _fit(model, batches, loss, keep, math.inf if max_error is None else max_error)


def _refuse_arguments(condition: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"convert: {name} applies only {condition} batches, got {name}={value!r}")


def _replace(model: nn.Module, bias: Any, normalize: bool, example: Any, keep: Sequence[str]) -> ConversionReport:
    """Convert a model without a fit."""
    start = time.perf_counter()
    rule = None if bias is None else as_bias("convert: bias", bias)
    is_learned = rule is not None and next(rule.parameters(), None) is not None
    if is_learned:
        refuse_distributed(model)
    adapter = _transformers_adapter(model, None, keep) or ModuleAdapter(model, example, keep)
    names = adapter.layers()
    if is_learned:
        refuse_offloaded(model, names)
    adapter.swap({name: copy.deepcopy(rule) for name in names}, normalize)
    return ConversionReport(adapter.softmax, seconds=time.perf_counter() - start)


def _fit(
    model: nn.Module, batches: list[Any], loss: Loss | None, keep: Sequence[str], max_error: float
) -> ConversionReport:
    """Convert a model with biases that are fitted on batches."""
    start = time.perf_counter()
    refuse_peft(model)
    refuse_distributed(model)
    count = len(batches)
    first_held_out = count - max(1, count // 4)
    held_out, fitted_on = range(first_held_out, count), range(first_held_out or count)
    texts = loss is None and hasattr(model, "encode") and all(map(_is_texts, batches))
    called = _TextEncoder(model) if texts else model
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        run_first = functools.partial(_run, called, batches, fitted_on[:1], loss)
        adapter = _transformers_adapter(model, run_first, keep) or ModuleAdapter(model, run_first, keep)
        names = adapter.layers()
        refuse_offloaded(model, names)

        def run(indices: Sequence[int], attend: Attend) -> float | None:
            with adapter.observe(torch.no_grad()(attend)):  # threads of the model have gradients enabled
                return _run(called, batches, indices, loss)

        fits = fit_biases(lambda attend: run(fitted_on, attend), names)
        biases = {name: fit.solve().to(device_of(model.get_submodule(name))) for name, fit in fits.items()}
        layers = measure_layers(lambda attend: run(held_out, attend), biases)
        layers = [replace(layer, visible_keys=fits[layer.name].visible_keys) for layer in layers]
        if not_finite := ", ".join(repr(layer.name) for layer in layers if not math.isfinite(layer.error)):
            raise ConversionError(
                f"the attention outputs of {not_finite} are not finite: check the weights and the batches"
            )
        biases = {layer.name: biases[layer.name] for layer in layers if layer.error <= max_error}
        if not biases:
            raise ConversionError(
                f"the error of every layer is above max_error={max_error:g} (the smallest is "
                f"{min(layer.error for layer in layers):.3g}), so that none is to be converted"
            )

        def attend(call: AttentionCall) -> Any:
            return call.normalized(biases[call.name]) if call.name in biases else call.softmax()

        change, loss_softmax, loss_converted = measure_model(
            called, [functools.partial(run, [i]) for i in held_out], attend
        )
    for state, value in (("with softmax", loss_softmax), ("converted", loss_converted)):
        if value is not None and not math.isfinite(value):
            raise ConversionError(f"the loss must be finite, got {value} {state}")
    adapter.swap(biases, True)
    measured = tuple(layers), change, loss_softmax, loss_converted, len(fitted_on), len(held_out), count > 1
    return ConversionReport(adapter.softmax, *measured, seconds=time.perf_counter() - start)


def _transformers_adapter(model: nn.Module, run: Callable[[], object] | None, keep: Sequence[str]) -> Adapter | None:
    """Return the adapter of models of transformers; None for others, and if no batches run one with other attention."""
    if "transformers.modeling_utils" not in sys.modules:  # no model can be of transformers, whose import takes seconds
        return None
    from sigattn.conversion import transformers

    adapter = transformers.TransformersAdapter(model, run, keep)
    return adapter if adapter.roots and (run is not None or adapter.reaches_all()) else None


def _run(model: nn.Module, batches: Sequence[Any], indices: Sequence[int], loss: Loss | None) -> float | None:
    """Run a model on batches with the same random numbers each time; return the mean loss, None if a batch has none."""
    with torch.random.fork_rng(sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)):
        losses = [_loss(model, batches, i, loss) for i in indices]
    known = [value for value in losses if value is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None


def _loss(model: nn.Module, batches: Sequence[Any], i: int, loss: Loss | None) -> float | None:
    batch = _copied(batches[i])  # a model may write into its arguments, and is run again
    try:
        value = getattr(_forward(model, batch), "loss", None) if loss is None else loss(model, batch)
        return None if value is None else float(value)
    except ConversionError:
        raise
    except Exception as error:
        advice = ""
        if loss is None and (isinstance(batch, str) or _is_texts(batch)):
            advice = ". A SentenceTransformer takes texts if every batch is a list of them: [texts[:8], texts[8:16], …]"
        elif loss is None and isinstance(batch, (tuple, list)) and len(batch) > 1:
            advice = ". A tuple has the arguments of one call: for pairs of inputs and targets pass loss=…"
        failure = "the model does not run" if loss is None else "loss fails"
        raise ConversionError(
            f"{failure} on batch {i} of {len(batches)}: {type(error).__name__}: {error}{advice}"
        ) from error


def _copied(batch: Any) -> Any:
    """Return a copy of a batch and its containers, with copies of its tensors."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # of a class of its own, such as BatchEncoding
        return {name: _copied(value) for name, value in batch.items()}
    return tree_map_only(Tensor, torch.clone, batch)


def _forward(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: arguments by name (or, if it has none of these, the mapping), by position, or one."""
    if isinstance(batch, Mapping):
        try:
            inspect.signature(model.forward).bind(**batch)
        except TypeError as mismatch:
            try:
                return model(batch)
            except Exception as error:
                raise TypeError(f"by name, {mismatch}; as its one argument, {type(error).__name__}: {error}") from error
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _is_texts(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and bool(batch) and all(isinstance(text, str) for text in batch)


class _TextEncoder(nn.Module):
    """Module whose output are the embeddings that a ``SentenceTransformer`` computes of texts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, *texts: str) -> Any:
        return self.model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
