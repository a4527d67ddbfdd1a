"""Report page of a conversion: metrics before, after and while fine-tuning, and the fit of each head."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sigattn.conversion import ConversionReport
from sigattn.demo import drawing, report

INTRODUCTION = (
    "A model that was trained with softmax attention, converted to sigmoid attention with its weights unchanged. Each "
    "head got a bias that predicts -log of the softmax denominator of a row, less 2, and an output scale of about e². "
    "Where the prediction is right, the weights p of softmax become p / (1 + p e⁻²), nearly the same."
)
Stages = Mapping[str, Mapping[str, float]]


def html_page(source: str, conversion: ConversionReport, stages: Stages, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the report as an HTML page.

    Args:
        source: folder of the softmax model. conversion: report of the conversion.
        stages: held-out metrics of the softmax model, the converted model and, after fine-tuning, the fine-tuned one.
        rows: measurements of each step of the fine-tuning; empty without.
    """
    metrics = list(stages["softmax"])
    before = report.html_table(["model", *metrics], [[n, *(f"{v[m]:.4g}" for m in metrics)] for n, v in stages.items()])
    columns = ["layer", "head", "R²", "c", "a", "output error, b = −log n", "output error, fitted b"]
    heads = [
        [layer.name, h, _number(head.r2), f"{head.constant:.2f}", f"{head.slope:.2f}"]
        + ([f"{layer.error_log_n:.1%}", f"{layer.error:.1%}"] if h == 0 else ["", ""])
        for layer in conversion.layers
        for h, head in enumerate(layer.heads)
    ]
    notes = "".join(f"<p><b>{html.escape(w)}</b></p>" for w in conversion.warnings)
    training = f"<h2>Fine-tuning</h2>{training_curves(stages, rows)}" if rows else ""
    return report.page(
        "From softmax to sigmoid attention",
        INTRODUCTION,
        f"<p>Softmax model: {html.escape(source)}.</p><h2>Held-out data</h2>{before}{notes}{training}"
        f"<h2>Fit of each head</h2>{fit_figure(conversion)}{report.html_table(columns, heads)}",
    )


def fit_figure(conversion: ConversionReport) -> str:
    """Plot each layer's output error with b = -log n and the fitted bias, and each head's R², as an SVG element."""
    figure, (errors, fits) = drawing.axes_grid(2, 1, width=5.5, height=3.5)
    layers = range(1, len(conversion.layers) + 1)
    for values, label, colour in (
        ([layer.error_log_n for layer in conversion.layers], "b = −log n", drawing.OTHER_COLOURS[3]),
        ([layer.error for layer in conversion.layers], "fitted b", drawing.COLOUR_OF["sigmoid"]),
    ):
        errors.plot(layers, values, marker="o", ms=4, linewidth=1.4, color=colour, label=label)
    errors.set_title("relative error of the attention's output", fontsize=11)
    errors.legend(frameon=False)
    errors.set_ylim(bottom=0)
    for x, layer in zip(layers, conversion.layers, strict=True):
        values = [head.r2 for head in layer.heads if not math.isnan(head.r2)]
        fits.plot([x] * len(values), values, "o", ms=4, color=drawing.COLOUR_OF["sigmoid"])
    fits.set_title("R² of each head's bias", fontsize=11)
    for axes in (errors, fits):
        axes.set_xlabel("layer")
        axes.locator_params(axis="x", integer=True)
    return report.svg(figure)


def training_curves(stages: Stages, rows: Sequence[Mapping[str, Any]]) -> str:
    """Plot training loss, and held-out loss with those of the softmax and the converted model, as an SVG element."""
    figure, (training, held_out) = drawing.axes_grid(2, 1, width=5.5, height=3.5)
    training.plot(
        [r["step"] + 1 for r in rows], [r["loss"] for r in rows], linewidth=1.4, color=drawing.COLOUR_OF["sigmoid"]
    )
    training.set_title("training loss", fontsize=11)
    points = [(0, stages["converted"]["loss"])]
    points += [(r["step"] + 1, r["validation_loss"]) for r in rows if "validation_loss" in r]
    held_out.plot(
        *zip(*points, strict=True), marker="o", ms=4, linewidth=1.4, color=drawing.COLOUR_OF["sigmoid"], label="sigmoid"
    )
    held_out.axhline(
        stages["softmax"]["loss"], color=drawing.COLOUR_OF["softmax"], linewidth=1.2, label="softmax, before"
    )
    held_out.set_title("held-out loss", fontsize=11)
    held_out.legend(frameon=False)
    for axes in (training, held_out):
        axes.set_xlabel("step")
    return report.svg(figure)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
