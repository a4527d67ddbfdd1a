"""Fit of the output scale of a layer (``RowScale``), by weighted least squares per head from running moments.

The target of a row is log α, where α o is the multiple of the sigmoid's output o that is nearest to softmax's output;
the features are 1, log‖o‖ and o/‖o‖; and the weight of a row is the squared norm of softmax's output, because errors of
the layer's output count in absolute size. Coefficients of 0 stand for e^MARGIN, the scale that belongs to the margin of
the bias.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sigattn.conversion.fit import MARGIN, check_finite
from sigattn.conversion.measure import evaluate_rows
from sigattn.conversion.report import ConversionError
from sigattn.conversion.row_statistics import row_outputs, row_statistics
from sigattn.nn.bias import AttentionBias
from sigattn.nn.fitted_bias import EPS, QuadraticBias
from sigattn.nn.observer import Attend, AttentionCall
from sigattn.ops.autocast import without_autocast

_MAX_LOG_TARGET = math.log(10)  # of the factor beyond e^MARGIN
_RIDGE = 1e-3  # of the features' mean square
_PRIOR_ROWS = 4.0  # weight, in average rows, of coefficients of 0
_POWER = 2  # number of features without those of the direction


class OutputScaleFit:
    """Weighted least-squares fit of the log of the output's scale, for each head of one layer.

    Args:
        num_heads: number of query heads.
        head_dim: number of features of a value.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        size = head_dim + _POWER
        options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        self.products: Tensor = torch.zeros(num_heads, size, size, **options)  # Σ w x xᵀ
        self.targets: Tensor = torch.zeros(num_heads, size, **options)  # Σ w x (log α - MARGIN)
        self.rows: float = 0.0

    def update(self, output: Tensor, softmax: Tensor, counted: Tensor) -> None:
        """Add rows: the sigmoid's and softmax's outputs, (B, Hq, N, Dv), and True for the rows that count."""
        x, norm = _features(output)
        alpha = (output * softmax).sum(-1) / norm.square()
        target = (alpha.clamp(min=EPS).log() - MARGIN).clamp(-_MAX_LOG_TARGET, _MAX_LOG_TARGET).unsqueeze(-1)
        weight = (softmax.square().sum(-1) * counted).unsqueeze(-1)
        x, weighted = (t.transpose(0, 1).flatten(1, 2) for t in (x, x * weight))  # (Hq, rows, features)
        self.products += (weighted.mT @ x).double().cpu()
        self.targets += (weighted.mT @ target.transpose(0, 1).flatten(1, 2)).squeeze(-1).double().cpu()
        self.rows += float(counted.double().mean(1).sum())

    def candidates(self, bias: QuadraticBias) -> list[QuadraticBias]:
        """Return copies of a bias with the constant scale e^MARGIN, one that depends on the norm, and the full one."""
        return [self.solve(bias, count) for count in (0, _POWER, self.targets.shape[1])]

    def solve(self, bias: QuadraticBias, num_features: int) -> QuadraticBias:
        """Return a copy of a bias with a scale fitted to the first ``num_features`` features, 0 for e^MARGIN."""
        fitted = copy.deepcopy(bias)
        solution = torch.zeros_like(self.targets)
        if num_features:
            used = slice(num_features)
            products, targets = self.products[:, used, used], self.targets[:, used]
            strength = _RIDGE + _PRIOR_ROWS / max(self.rows, 1)
            square = products.diagonal(dim1=1, dim2=2).clone()
            square[:, _POWER:] = square[:, _POWER:].mean(1, keepdim=True)  # also where values hardly vary
            ridge = square * strength + torch.finfo(torch.float32).tiny
            solution[:, used] = torch.linalg.solve(products + torch.diag_embed(ridge), targets)
        fitted.row_scale.gain.copy_(solution[:, 0] + MARGIN)
        fitted.row_scale.power.copy_(solution[:, 1])
        fitted.row_scale.direction.copy_(solution[:, _POWER:].flatten())
        return fitted


def fit_output_scales(
    run: Callable[[Attend], object],
    run_held_out: Callable[[Attend], object],
    biases: Mapping[str, Sequence[QuadraticBias]],
) -> dict[str, AttentionBias]:
    """Fit an output scale to each bias of each layer; return for each layer what has the least error of the output.

    The error is that on held-out batches, of each bias with the full scale, that of the norm, and a constant one.

    Args:
        run, run_held_out: run the model on batches, with a function that answers its attention calls.
        biases: fitted biases of each layer, of which one is chosen.

    Raises:
        ConversionError: naming a layer whose outputs are not finite.
    """
    fits: dict[str, list[OutputScaleFit]] = {}

    def observe(call: AttentionCall) -> object:
        with without_autocast(call.problem.query.device.type):
            outputs, softmax, counted = _outputs(call, biases[call.name])
            fitted = fits.setdefault(call.name, [OutputScaleFit(o.shape[1], o.shape[3]) for o in outputs])
            for fit, output in zip(fitted, outputs, strict=True):
                fit.update(output, softmax, counted)
        check_outputs(call.name, *(t for fit in fitted for t in (fit.products, fit.targets)))
        return call.softmax()

    run(observe)
    candidates = {
        name: [fit.candidates(bias) for bias, fit in zip(of, fits[name], strict=True)] for name, of in biases.items()
    }
    errors = {name: torch.zeros(len(of), 3, dtype=torch.float64, device="cpu") for name, of in candidates.items()}

    def compare(call: AttentionCall) -> object:
        with without_autocast(call.problem.query.device.type):
            outputs, softmax, _ = _outputs(call, biases[call.name])
        for i, output in enumerate(outputs):
            for j, candidate in enumerate(candidates[call.name][i]):
                missed = candidate.scaled(output) - softmax  # 0 in rows that do not count
                errors[call.name][i, j] += missed.square().sum().double().cpu()
        check_outputs(call.name, errors[call.name])
        return call.softmax()

    run_held_out(compare)
    best = {name: divmod(int(of.argmin()), of.shape[1]) for name, of in errors.items()}
    return {name: candidates[name][i][j] for name, (i, j) in best.items()}


def check_outputs(name: str, *statistics: Tensor) -> None:
    """Raise ConversionError if statistics of a layer's outputs are not finite."""
    if not all(t.isfinite().all() for t in statistics):
        raise ConversionError(
            f"convert: the attention outputs of {name!r} are not finite: check the weights and the batches"
        )


def _outputs(call: AttentionCall, biases: Sequence[AttentionBias]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return outputs (B, Hq, N, Dv) with each bias and of softmax, and True for the rows that count, (B, Hq, N).

    Rows that do not count are 0, because those of padding need not be finite.
    """
    rows = row_statistics(call.problem)
    check_finite(call.name, rows)
    sigmoid, softmax = row_outputs(call.problem, [evaluate_rows(b, call.problem, rows) for b in biases])
    padding = ~rows.counted.unsqueeze(-1)
    return [o.masked_fill(padding, 0) for o in sigmoid], softmax.masked_fill(padding, 0), rows.counted


def _features(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1, log‖o‖ and o/‖o‖ of each row, (B, Hq, N, Dv + 2), and ‖o‖, (B, Hq, N)."""
    norm = torch.linalg.vector_norm(output, dim=-1, keepdim=True) + EPS
    return torch.cat([torch.ones_like(norm), norm.log(), output / norm], -1), norm.squeeze(-1)
