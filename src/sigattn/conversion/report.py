"""Report of a conversion: every softmax and its outcome, and with batches the fit, errors and losses."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sigattn.files import write_text
from sigattn.validation import UserError

# In language models of 4 layers (300 steps, RoPE and ALiBi) one layer alone with an output error of 0.5 raised the loss
# by 2 to 7 %, the first by 13 to 36 %, and all layers together by 25 to 50 %.
POOR_ERROR = 0.5
POOR_LOSS = 1.05  # ratio to the loss of softmax


class ConversionError(UserError, ValueError):
    """A model cannot be converted; the message names the layer or the batch, and the model is unchanged."""


@contextlib.contextmanager
def errors_of(function: str) -> Iterator[None]:
    """Within the context, the message of a ``ConversionError`` begins with the name of the public function."""
    try:
        yield
    except ConversionError as error:
        error.args = (f"{function}: {error}",)
        raise


@dataclass(frozen=True)
class SoftmaxLayer:
    """Layer that computed a softmax before the conversion.

    Attributes:
        name: name within the model ("" for the model itself).
        kind: name of its class before. call: the function that computed the softmax.
        outcome: "converted" to sigmoid attention, or "materialised": the layer writes its softmax out, and computes
            sigmoid weights in its place, with the memory that it had; or the reason for which it still computes a
            softmax: "kept" (by ``keep`` or ``max_error``), "not attention", or "not called": its code can call the
            function, but the example, which runs the layer, does not come to it.
    """

    name: str
    kind: str
    call: str
    outcome: Literal["converted", "materialised", "kept", "not attention", "not called"]

    @property
    def is_sigmoid(self) -> bool:
        """True if it computes sigmoid attention now."""
        return self.outcome in ("converted", "materialised")


@dataclass(frozen=True)
class HeadReport:
    """Fit of one head.

    Attributes:
        r2: share of the variance of -lse over the held-out rows that the bias explains, up to a constant; NaN if -lse
            is constant.
        constant, slope: c and a of the bias c + a · log(visible keys).
    """

    r2: float
    constant: float
    slope: float


@dataclass(frozen=True)
class LayerReport:
    """Fit of one layer.

    Attributes:
        name: name of the layer within the model. heads: fit of each head.
        error: ‖O - O_softmax‖ / ‖O_softmax‖ of its output with the fitted bias, on the inputs of the softmax model.
        visible_keys: least and largest number of keys that a query of the fit saw.
    """

    name: str
    heads: tuple[HeadReport, ...]
    error: float
    visible_keys: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ConversionReport:
    """Report of a conversion. ``print`` shows it, ``save`` writes it as JSON.

    Attributes:
        softmax: each layer that computed a softmax, and its outcome; for models of transformers, its attention layers.
        layers: fit of each layer, also of those that ``max_error`` keeps. Without batches it is empty, and the
            attributes below have no meaning.
        change: ‖y - y_softmax‖ / ‖y_softmax‖ of the model's floating-point outputs y over the held-out batches; None if
            it returned none.
        loss_softmax: mean loss of the softmax model over the held-out batches; None if the batches have no loss.
        loss: that of the converted model.
        num_batches: number of batches of the fit. num_held_out: number of batches that the numbers above are from.
        held_out: False if there was one batch only, which is then used for both.
        seconds: time that the conversion took.
    """

    softmax: tuple[SoftmaxLayer, ...]
    layers: tuple[LayerReport, ...] = ()
    change: float | None = None
    loss_softmax: float | None = None
    loss: float | None = None
    num_batches: int = 0
    num_held_out: int = 0
    held_out: bool = False
    seconds: float = 0.0

    @property
    def warnings(self) -> list[str]:
        """Sentences that say where a fitted conversion is poor."""
        if not self.layers:
            return []
        sentences = []
        if not self.held_out:
            sentences.append("There was one batch only, so errors and losses are those of the batch of the fit.")
        kept = {layer.name for layer in self.softmax if layer.outcome == "kept"}
        if poor := [s.name for s in self.layers if not s.error < POOR_ERROR and s.name not in kept]:
            sentences.append(
                f"The outputs of {', '.join(poor)} differ from softmax's by {POOR_ERROR:.0%} or more, because the "
                "denominators of their rows differ too much for one bias of a head. Train the model further before "
                f"use, or let them keep softmax: max_error={POOR_ERROR:g}."
            )
        before, after = self.loss_softmax, self.loss
        if before is not None and after is not None and after - before > (POOR_LOSS - 1) * abs(before):
            sentences.append(
                f"The loss rose from {self.loss_softmax:.4g} to {self.loss:.4g}: fine-tune the model, for example for "
                "a tenth of its original steps."
            )
        return sentences

    def __repr__(self) -> str:  # also what a notebook shows
        listed = [s for s in self.softmax if s.outcome != "converted"] if self.layers else self.softmax
        lines = _aligned([(s.name or "(model)", s.kind, s.call, s.outcome) for s in listed], str.ljust)
        if not self.layers:
            return "\n".join(lines)
        rows = [("layer", "visible keys", "R² (min … max)", "c", "a", "error")]
        for layer in self.layers:
            r2, c, a = map(_range, zip(*((h.r2, h.constant, h.slope) for h in layer.heads), strict=True))
            keys = " … ".join(map(str, layer.visible_keys))
            rows.append((layer.name or "(model)", keys, r2, c, a, f"{layer.error:.2%}"))
        lines = [*_aligned(rows, str.rjust), *lines]
        if self.change is not None:
            lines.append(f"change of the model's output: {self.change:.2%}")
        if self.loss_softmax is not None:
            lines.append(f"loss: {self.loss_softmax:.4f} with softmax, {self.loss:.4f} converted")
        lines.append(f"converted in {self.seconds:.1f} s")
        return "\n".join([*lines, *self.warnings])

    def save(self, path: Path | str) -> None:
        """Write the report as JSON; numbers that are not finite become null."""
        report = _finite({**asdict(self), "warnings": self.warnings})
        write_text(Path(path), json.dumps(report, indent=1) + "\n")


def _aligned(rows: Sequence[tuple[str, ...]], justify: Callable[[str, int], str]) -> list[str]:
    """Return rows as lines with columns of equal width: the first at the left, the others as ``justify`` does."""
    columns = [[*map(len, column)] for column in zip(*rows, strict=True)]
    sides = [str.ljust] + [justify] * (len(columns) - 1)
    return [
        "  ".join(side(cell, max(width)) for side, cell, width in zip(sides, row, columns, strict=True)).rstrip()
        for row in rows
    ]


def _range(values: tuple[float, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} … {high:.2f}"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
