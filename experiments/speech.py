"""Tables of speech recognition (App. ASR): errors by length and gradient spikes of variants of the speech model.

The tables are in ``speech_tables``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from experiments import ablation, drawing, intervals, sweep
from experiments.ablation import SPIKES, Claim
from experiments.experiment import SPEECH, Experiment, Row, Setting, count_seeds_by, select
from experiments.run_file import Trainings
from sigattn.data.corpora import spoken_digits
from sigattn.data.speech import CharTokenizer, Speech
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe
from sigattn.tasks.ctc import CTC

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNTRAINED = 90.0  # character errors in per cent; a model that has learned nothing has 100
DIGITS = (2, 4, 7, 14)  # largest number of digits of the strings of each bucket; training strings have up to 7
TOLERANCE = 0.15  # of the baseline's errors, which are 3 to 30 % of the characters
LONGEST = "cer of the longest strings"  # which do not occur in training


def base(setting: Setting) -> Recipe:
    """Return the recipe of a transformer on strings of spoken digits.

    The learning rate is four times the recipe's and nothing is dropped: this halves the errors after as many seconds of
    speech, and their spread over seeds (docs/log.md).
    """
    recipe = find_recipe("asr-ls960-tiny").with_transformer(position="rope", dropout=0.0)
    return sweep.shortened(recipe, setting.steps(2, 800), setting.scaled(4, 10, None), learning_rate=8e-3)


@dataclass(frozen=True)
class SpeechTable(ablation.Ablation):
    """Ablation that compares character error rates by the length of a recording.

    The metric is the mean over the groups of lengths that occur in training; claims may also be about ``LONGEST``.
    """

    def measure(self, setting: Setting, recipe: Recipe, outcomes: dict[str, list[sweep.Outcome]]) -> list[Row]:
        """Evaluate all variants on strings of every length."""
        parts = strings_by_length(setting, recipe)
        data: list[Row] = []
        for name, runs in outcomes.items():
            data += [row for row in setting.stored.rows if row["variant"] == name]
            for run in runs:
                spikes, model = int(ablation.count_spikes(run)), run.load_model()
                for part, speech in parts.items():
                    with torch.no_grad():
                        errors = CTC().evaluate(model, speech.validation(60))
                    row = {"variant": name, "seed": run.seed, "part": part, SPIKES: spikes}
                    data.append({**row, "wer": errors["wer"], "cer": errors["cer"]})
        return data

    def values(self, data: Sequence[Row], metric: str) -> dict[str, list[float]]:
        """Return the values of a metric by variant and seed: "wer", "cer" (for ""), ``LONGEST`` or ``SPIKES``."""
        *trained, longest = _parts(data)

        def of_variant(name: str) -> list[float]:
            if metric == SPIKES:
                return [float(n) for n in select(data, SPIKES, variant=name, part=longest)]
            if metric == LONGEST:
                return select(data, "cer", variant=name, part=longest)
            errors = [select(data, metric or self.metric, variant=name, part=part) for part in trained]
            return [statistics.mean(of_seed) for of_seed in zip(*errors, strict=True)]

        return {name: of_variant(name) for name in dict.fromkeys(row["variant"] for row in data)}

    def table(self, data: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the columns and rows of the table."""
        parts, wer, cer, spikes = _parts(data), *(self.values(data, metric) for metric in ("wer", "cer", SPIKES))
        rows = []
        for name in cer:
            cells = [wer[name], cer[name], *(select(data, "cer", variant=name, part=part) for part in parts)]
            rows.append((name, *map(intervals.mean_std, cells), f"{statistics.mean(spikes[name]):.0f}"))
        trained = f"mean to {DIGITS[-2]} digits"
        of_parts = (f"CER %, {part}" for part in parts)
        return ("variant", f"WER %, {trained}", f"CER %, {trained}", *of_parts, "gradient spikes"), rows

    def plot(self, data: Sequence[Row]) -> Figure:
        """Plot each seed of each variant: errors at the lengths of training, errors of longer strings, and spikes."""
        errors, longest, spikes = (self.values(data, metric) for metric in ("", LONGEST, SPIKES))
        figure, axes = drawing.axes_grid(3, height=1.0 + 0.28 * len(errors))
        for axis, values in zip(axes, (errors, longest, spikes), strict=True):
            drawing.plot_seeds(axis, values)
        for axis, part in zip(axes, (f"to {DIGITS[-2]} digits", _parts(data)[-1]), strict=False):
            axis.set(xscale="log", xlabel=f"{self.label},\n{part}")
            low, high = axis.get_xlim()
            ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_xticks((), minor=True)
        for axis in axes[1:]:
            axis.tick_params(labelleft=False)
        axes[2].set_xlabel("gradient spikes")
        return figure

    def count_seeds(self, rows: Sequence[Row]) -> dict[str, int]:
        """Return the number of seeds by variant."""
        return count_seeds_by("variant")(rows)


def _parts(data: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in data))


def strings_by_length(setting: Setting, recipe: Recipe) -> dict[str, Speech]:
    """Return held-out strings grouped by number of digits; the last group is longer than any string in training."""
    _, strings = spoken_digits(
        sweep.recordings_path(setting), training=1, held_out=setting.scaled(24, 160, 160), longest=DIGITS[-1]
    )
    assert isinstance(recipe.model, SpeechModelConfig)
    tokens, mels = CharTokenizer(CTC().alphabet), recipe.model.num_mel_bins
    parts = {}
    for fewest, most in zip((0, *DIGITS), DIGITS, strict=False):
        if part := [u for u in strings if fewest < len(u.pieces) <= most]:
            parts[f"{fewest + 1}-{most} digits"] = Speech((), part, tokens, num_mel_bins=mels)
    return parts


def speech_experiment(
    name: str,
    title: str,
    source: str,
    variants: dict[str, dict[str, Any]],
    claims: Sequence[Claim],
    smoke: tuple[str, ...],
    *,
    paper: str | Trainings = "asr-ls960",
) -> Experiment:
    """Return the experiment of a table.

    Args:
        name, title, source: see ``Experiment``. variants, claims, smoke: see ``Ablation``.
        paper: recipe of all variants at the paper's scale, or the trainings themselves.
    """
    evaluation = "sigattn evaluate RUN --data LIBRISPEECH (errors by split), or TEDLIUM (by duration)"
    table = SpeechTable(
        base,
        variants,
        "cer",
        "character errors, %",
        claims,
        TOLERANCE,
        relative=True,
        smoke=smoke,
        learned=lambda errors: errors < UNTRAINED,
        paper=(paper, "LIBRISPEECH", evaluation),
    )
    return table.experiment(
        name,
        title,
        source,
        float(round(0.65 * len(variants))),  # with three seeds
        "8 GPUs of 80 GB",
        "strings of spoken digits (FSDD) instead of LibriSpeech, 2 layers of 64, 800 steps of 10 s, not converged, "
        "so character errors are compared rather than word errors; strings of 8 to 14 digits replace TED-LIUM's "
        "longer talks",
        SPEECH,
    )
