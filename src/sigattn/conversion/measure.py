"""Measurements of a fitted conversion on held-out batches, before the model is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sigattn.conversion.report import HeadReport, LayerReport
from sigattn.conversion.row_statistics import RowStatistics, row_statistics
from sigattn.nn.bias import AttentionBias, BatchLengthBias
from sigattn.nn.observer import Attend, AttentionCall
from sigattn.ops.autocast import without_autocast
from sigattn.ops.problem import Problem


class _LayerMeasurement:
    """Running sums of one layer."""

    def __init__(self, num_heads: int) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        self.moments: Tensor = torch.zeros(5, num_heads, **options)  # rows, Σ y, Σ y², Σ (y - b), Σ (y - b)²
        self.squares: Tensor = torch.zeros(3, **options)  # ‖O‖², ‖O_log_n - O‖², ‖O_fitted - O‖²

    def update(self, rows: RowStatistics, bias: Tensor, outputs: Sequence[Tensor]) -> None:
        """Add a call: its rows, the bias (B, Hq, N) of each, and the outputs of softmax, b = -log n and this bias."""
        y = torch.where(rows.counted, -rows.lse, 0).double().cpu()
        missed = torch.where(rows.counted, y - bias.double().cpu(), 0)
        counted = rows.counted.double().cpu()
        self.moments += torch.stack([t.sum((0, 2)) for t in (counted, y, y.square(), missed, missed.square())])
        exact, *others = (t.double().cpu() for t in outputs)
        if exact.shape[:-1] == rows.counted.shape:
            exact, *others = (t * counted.unsqueeze(-1) for t in (exact, *others))
        self.squares += torch.stack([t.square().sum() for t in (exact, *(o - exact for o in others))])

    def report(self, name: str, bias: Any) -> LayerReport:
        """Return the report of the layer with its fitted bias."""
        count, total, square, missed, missed_square = self.moments
        variance, left = (s - t.square() / count.clamp(min=1) for s, t in ((square, total), (missed_square, missed)))
        r2 = torch.where(variance > 1e-9 * square, 1 - left / variance, torch.nan)
        log_n, fitted = (self.squares[1:] / self.squares[0]).sqrt().tolist()
        heads = zip(r2.tolist(), bias.constant.tolist(), bias.slope.tolist(), strict=True)
        return LayerReport(name, tuple(HeadReport(*head) for head in heads), log_n, fitted)


def measure_layers(
    run: Callable[[Attend], float | None], biases: Mapping[str, AttentionBias]
) -> tuple[list[LayerReport], float | None]:
    """Return the report of each layer and the loss of the softmax model; ``run`` runs the held-out batches."""
    log_n = BatchLengthBias()
    layers: dict[str, _LayerMeasurement] = {}

    def observe(call: AttentionCall) -> Any:
        with without_autocast(call.problem.query.device.type):
            rows, bias = row_statistics(call.problem), biases[call.name]
        result = call.softmax()
        outputs = [result, call.sigmoid(log_n), call.sigmoid(bias)]
        outputs = [o if isinstance(o, Tensor) else o[0] for o in outputs]
        measurement = layers.setdefault(call.name, _LayerMeasurement(rows.lse.shape[1]))
        measurement.update(rows, evaluate_rows(bias, call.problem, rows), outputs)
        return result

    loss = run(observe)
    return [layers[name].report(name, bias) for name, bias in biases.items()], loss


def evaluate_rows(bias: AttentionBias, problem: Problem, rows: RowStatistics) -> Tensor:
    """Return b of each row of a call, (B, Hq, N)."""
    query = problem.query
    b = bias(
        query.shape[2],
        problem.key.shape[2],
        query_offset=problem.query_offset,
        key_lengths=problem.key_lengths,
        device=query.device,
        visible=rows.visible.unsqueeze(-1),
        query=query,
    )
    return torch.as_tensor(b, device=query.device).expand(*query.shape[:3], 1).squeeze(-1)
