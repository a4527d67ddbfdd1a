"""Measurements of a fitted conversion on held-out batches, before the model is changed."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sigattn.conversion.fit import RowStatistics, finite_statistics, is_padding
from sigattn.conversion.report import HeadReport, LayerReport
from sigattn.nn.bias import VisibleKeysLinearBias
from sigattn.nn.observer import Attend, AttentionCall


class _LayerMeasurement:
    """Running sums of one layer."""

    def __init__(self, num_heads: int) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        self.moments: Tensor = torch.zeros(5, num_heads, **options)  # rows, Σ y, Σ y², Σ (y - b), Σ (y - b)²
        self.squares: Tensor = torch.zeros(2, **options)  # ‖O‖², ‖O_fitted - O‖²

    def update(self, rows: RowStatistics, bias: VisibleKeysLinearBias, exact: Tensor, fitted: Tensor) -> None:
        """Add a call: its rows, and the layer's outputs with softmax and with the bias."""
        b = bias(visible=rows.visible.unsqueeze(-1)).squeeze(-1)
        y = torch.where(rows.counted, -rows.lse, 0).double().cpu()
        missed = torch.where(rows.counted.cpu(), y - b.double().cpu(), 0)
        counted = rows.counted.double().cpu().expand(y.shape)
        self.moments += torch.stack([t.sum((0, 2)) for t in (counted, y, y.square(), missed, missed.square())])
        self.squares += _squared_norms(exact, fitted)

    def report(self, name: str, bias: VisibleKeysLinearBias) -> LayerReport:
        count, total, square, missed, missed_square = self.moments
        variance, left = (s - t.square() / count.clamp(min=1) for s, t in ((square, total), (missed_square, missed)))
        r2 = torch.where(variance > 1e-9 * square, 1 - left / variance, torch.nan)
        heads = zip(r2.tolist(), bias.constant.tolist(), bias.slope.tolist(), strict=True)
        return LayerReport(name, tuple(HeadReport(*head) for head in heads), _relative_error(self.squares))


def measure_layers(run: Callable[[Attend], object], biases: Mapping[str, VisibleKeysLinearBias]) -> list[LayerReport]:
    """Return the report of each layer, on the inputs of the softmax model; ``run`` runs the held-out batches."""
    layers = {name: _LayerMeasurement(bias.num_heads) for name, bias in biases.items()}

    def observe(call: AttentionCall) -> Any:
        bias = biases[call.name]
        rows = finite_statistics(call, bias.num_heads)
        result = call.softmax()
        # a layer may return more than its output, such as its weights
        exact, fitted = (r if isinstance(r, Tensor) else r[0] for r in (result, call.normalized(bias)))
        padding = is_padding(call.problem)
        if padding is not None and exact.dim() == padding.dim() + 1:
            exact, fitted = (t.masked_fill(padding.unsqueeze(-1), 0) for t in (exact, fitted))
        layers[call.name].update(rows, bias, exact, fitted)
        return result

    run(observe)
    return [layers[name].report(name, bias) for name, bias in biases.items()]


def measure_model(
    model: nn.Module, runs: Sequence[Callable[[Attend], float | None]], attend: Attend
) -> tuple[float | None, float | None, float | None]:
    """Return the effect of a conversion, of which ``attend`` answers the calls, on a model.

    Each of ``runs`` runs the model on a held-out batch and returns its loss. The effect is the change
    ‖y - y_softmax‖ / ‖y_softmax‖ of the outputs y, None if there are none or their shapes differ; and the mean loss,
    with softmax and converted, None if a batch has none. The outputs of one batch are in memory at a time.
    """
    squares, losses = torch.zeros(2, dtype=torch.float64, device="cpu"), []
    comparable, outputs = True, list[Tensor]()

    def add_outputs(_module: nn.Module, _args: Any, output: Any) -> None:  # floating-point tensors, but no loss
        tensors = (t for t in tree_leaves(output) if isinstance(t, Tensor))
        outputs.extend(t.detach() for t in tensors if t.is_floating_point() and t.dim())

    hook = model.register_forward_hook(add_outputs)
    try:
        for run in runs:
            before = run(lambda call: call.softmax())
            softmax, outputs[:] = list(outputs), []
            losses.append((before, run(attend)))
            # a model that selects by its values has outputs of other shapes
            comparable &= [t.shape for t in softmax] == [t.shape for t in outputs]
            if comparable:
                squares += sum(map(_squared_norms, softmax, outputs), torch.zeros_like(squares))
            outputs.clear()
    finally:
        hook.remove()
    before, after = (None if None in of else sum(of) / len(of) for of in zip(*losses, strict=True))
    return _relative_error(squares) if comparable and squares[0] else None, before, after


def _squared_norms(exact: Tensor, other: Tensor) -> Tensor:
    """Return ‖exact‖² and ‖other - exact‖², float64."""
    exact, other = exact.double().cpu(), other.double().cpu()
    return torch.stack([exact.square().sum(), (other - exact).square().sum()])


def _relative_error(squares: Tensor) -> float:
    """Return the root of the second of two squared norms over the first; 0 if both are 0."""
    square, missed = squares.tolist()
    return math.sqrt(missed / square) if square else math.inf if missed else 0.0
