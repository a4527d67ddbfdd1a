"""Report of a conversion: the fit of each head, the error of each layer's output, the loss before and after."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from sigattn.files import write_text

# In language models of 4 layers (300 steps, RoPE and ALiBi) one layer alone with an output error of 0.5 raised the loss
# by 2 to 7 %, the first by 13 to 36 %, and all layers together by 25 to 50 %.
POOR_ERROR = 0.5
POOR_LOSS = 1.05  # ratio to the loss of softmax


@dataclass(frozen=True)
class HeadReport:
    """Fit of one head.

    Attributes:
        r2: share of the variance of -lse over the held-out rows that the bias explains, up to a constant; NaN if -lse
            is constant.
        constant, slope: c and a of the bias c + a · log(visible keys) + …
    """

    r2: float
    constant: float
    slope: float


@dataclass(frozen=True)
class LayerReport:
    """Fit of one layer.

    Attributes:
        name: name of the layer within the model.
        heads: fit of each head.
        error_log_n: ‖O_sigmoid - O_softmax‖ / ‖O_softmax‖ of the attention's output on the same inputs, b = -log n.
        error: the same with the fitted bias.
    """

    name: str
    heads: tuple[HeadReport, ...]
    error_log_n: float
    error: float


@dataclass(frozen=True)
class ConversionReport:
    """Report of a conversion. ``print`` shows it, ``save`` writes it as JSON.

    Attributes:
        layers: each converted layer.
        loss_softmax: mean loss of the softmax model over the held-out batches; None if the batches have no loss.
        loss_log_n: loss with sigmoid attention and b = -log n, which may not be finite. loss: loss of the converted
            model.
        num_batches: number of batches of the fit. num_held_out: number of batches that the numbers above are from,
            which also decide between the forms of bias and scale.
        held_out: False if these are batches of the fit, because there was only one.
        seconds: duration of the conversion.
    """

    layers: tuple[LayerReport, ...]
    loss_softmax: float | None
    loss_log_n: float | None
    loss: float | None
    num_batches: int
    num_held_out: int
    held_out: bool
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """Sentences that say where the conversion is poor."""
        found = []
        if not self.held_out:
            found.append("There was one batch only, so errors and losses are those of the batch of the fit.")
        if poor := [layer.name for layer in self.layers if not layer.error < POOR_ERROR]:
            found.append(
                f"The outputs of {', '.join(poor)} differ from softmax's by {POOR_ERROR:.0%} or more: the bias does "
                "not follow rows in which single keys dominate. Train the model further before use."
            )
        if self.loss is None or self.loss_softmax is None:
            found.append("There was no loss, so the effect on it was not measured: pass loss to convert.")
        elif self.loss - self.loss_softmax > (POOR_LOSS - 1) * abs(self.loss_softmax):
            found.append(
                f"The loss rose from {self.loss_softmax:.4g} to {self.loss:.4g}: fine-tune the model, for example for "
                "a tenth of its original steps."
            )
        return found

    def __str__(self) -> str:
        rows = [("layer", "R² (min … max)", "c", "a", "error, −log n", "error, fitted")]
        for layer in self.layers:
            r2, c, a = zip(*((h.r2, h.constant, h.slope) for h in layer.heads), strict=True)
            rows.append(
                (
                    layer.name or "(model)",
                    _range(r2),
                    _range(c),
                    _range(a),
                    f"{layer.error_log_n:.1%}",
                    f"{layer.error:.1%}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))
            )
            for r in rows
        ]
        if self.loss_softmax is not None:
            lines.append(
                f"loss: {self.loss_softmax:.4f} with softmax, {self.loss_log_n:.4f} with b = −log n, "
                f"{self.loss:.4f} converted"
            )
        lines.append(f"converted in {self.seconds:.1f} s")
        return "\n".join([*lines, *self.warnings])

    def save(self, path: Path | str) -> None:
        """Write the report as JSON; numbers that are not finite become null.

        Raises:
            OSError: if the file cannot be written.
        """
        report = _finite({**asdict(self), "warnings": self.warnings})
        write_text(Path(path), json.dumps(report, indent=1) + "\n")


def _range(values: tuple[float, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} … {high:.2f}"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
