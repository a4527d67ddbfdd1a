"""Tables of speech recognition (App. ASR): errors by length and gradient spikes of variants of the speech model.

The tables are in ``speech_tables``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experiments import ablation, intervals, sweep
from experiments.ablation import Claim
from experiments.experiment import (
    SPEECH,
    Experiment,
    Finding,
    Result,
    Row,
    Scale,
    Setting,
    count_seeds_by,
    select,
)
from experiments.run_file import Trainings, write_run_file
from sigattn.data.corpora import spoken_digits
from sigattn.data.speech import CharTokenizer, Speech, Utterance
from sigattn.demo import drawing
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.ctc import CTC
from sigattn.train import metrics

UNTRAINED = 90.0  # character errors in per cent; a model that has learned nothing has 100
DIGITS = (2, 4, 7, 14)  # largest number of digits of the strings of each bucket; training strings have up to 7


def base(setting: Setting) -> Recipe:
    """Return the recipe of a transformer on strings of spoken digits.

    The learning rate is four times the recipe's and nothing is dropped: this halves the errors after as many seconds of
    speech, and their spread over seeds (docs/log.md).
    """
    recipe = find_recipe("asr-ls960-tiny").with_transformer(position="rope", dropout=0.0)
    return sweep.shortened(recipe, setting.steps(4, 800), setting.scaled(4, 10, None), learning_rate=8e-3)


@dataclass(frozen=True)
class SpeechTable:
    """Experiment that compares character error rates of variants by the length of a recording.

    Attributes:
        variants, claims: see ``Ablation``. smoke: the variants of the smallest scale.
        longer: claims about the longest strings, which do not occur in training.
        spikes: claims about the number of spikes of the gradient norm.
        curves: if True, plot losses and gradient norms over the steps, instead of the errors by length.
        paper: recipe of all variants at the paper's scale, or the trainings themselves.
    """

    variants: dict[str, dict[str, Any]]
    claims: Sequence[Claim]
    smoke: tuple[str, ...]
    longer: Sequence[Claim] = ()
    spikes: Sequence[Claim] = ()
    curves: bool = False
    paper: str | Trainings = "asr-ls960"

    def __call__(self, setting: Setting) -> Result:
        """Train all variants and evaluate them on strings of every length.

        Raises:
            ExperimentError: at the paper's scale, with the name of a run file.
        """
        if setting.scale == "paper":
            trainings = self.paper
            if isinstance(trainings, str):
                trainings = {name: (trainings, changes) for name, changes in self.variants.items()}
            then = "sigattn evaluate RUN --data LIBRISPEECH (errors by split), or TEDLIUM (by duration)"
            raise write_run_file(setting, trainings, "LIBRISPEECH", then)
        recipe = base(setting)
        outcomes = ablation.train_changes(setting, recipe, self.variants, self.smoke)
        parts = strings_by_length(setting, recipe)
        data: list[Row] = []
        for name, runs in outcomes.items():
            data += [row for row in setting.stored.rows if row["variant"] == name]
            for run in runs:
                spikes = metrics.count_spikes([row["gradient_norm"] for row in run.rows], 3.0)
                model = run.load_model()
                for part, speech in parts.items():
                    with torch.no_grad():
                        errors = CTC().evaluate(model, speech.validation(60))
                    row = {"variant": name, "seed": run.seed, "part": part, "gradient_spikes": spikes}
                    data.append({**row, "wer": errors["wer"], "cer": errors["cer"]})
        rows = []
        for name in outcomes:
            means = [intervals.mean_std(_errors_at_trained(data, key, name)) for key in ("wer", "cer")]
            cells = [intervals.mean_std(select(data, "cer", variant=name, part=part)) for part in parts]
            spikes_of_runs = select(data, "gradient_spikes", variant=name)
            rows.append((name, *means, *cells, f"{statistics.mean(spikes_of_runs):.0f}"))
        trained = f"mean to {DIGITS[-2]} digits"
        columns = (
            "variant", f"WER %, {trained}", f"CER %, {trained}", *(f"CER %, {part}" for part in parts),
            "gradient spikes",
        )  # fmt: skip
        if not self.curves:
            figure = _figure(data, list(parts), list(outcomes))
        else:  # stored seeds have no curves
            figure = None if setting.stored.rows else _plot_curves(outcomes)
        return Result(columns, rows, data, figure)

    def judge(self, data: Sequence[Row], _: Scale) -> list[Finding]:
        """Compare the mean CER over the groups of lengths that occur in training, and the CER of the longest group."""
        longest = list(dict.fromkeys(row["part"] for row in data))[-1]
        at_trained, at_longest, spikes = {}, {}, {}
        for name in dict.fromkeys(row["variant"] for row in data):
            at_trained[name] = _errors_at_trained(data, "cer", name)
            at_longest[name] = select(data, "cer", variant=name, part=longest)
            spikes[name] = [float(n) for n in select(data, "gradient_spikes", variant=name, part=longest)]
        checked = ((self.claims, at_trained), (self.longer, at_longest))
        findings = [f for claims, values in checked for f in ablation.check_claims(claims, values, _learned)]
        return [*findings, *ablation.check_claims(self.spikes, spikes)]


def _errors_at_trained(data: Sequence[Row], key: str, variant: str) -> list[float]:
    """Return the mean of errors over the groups of lengths that occur in training, by seed."""
    *trained, _ = dict.fromkeys(row["part"] for row in data)
    errors = [select(data, key, variant=variant, part=part) for part in trained]
    return [statistics.mean(of_seed) for of_seed in zip(*errors, strict=True)]


def _learned(character_errors: float) -> bool:
    return character_errors < UNTRAINED


def strings_by_length(setting: Setting, recipe: Recipe) -> dict[str, Speech]:
    """Return held-out strings grouped by number of digits; the last group is longer than any string in training."""
    _, strings, archive = spoken_digits(
        sweep.recordings_path(setting), training=1, held_out=setting.scaled(24, 160, 160), longest=DIGITS[-1]
    )
    assert isinstance(recipe.model, SpeechModelConfig)
    found: dict[str, list[Utterance]] = {}
    for fewest, most in zip((0, *DIGITS), DIGITS, strict=False):
        found[f"{fewest + 1}-{most} digits"] = [u for u in strings if fewest < len(u.pieces) <= most]
    tokens, mels = CharTokenizer(CTC().alphabet), recipe.model.num_mel_bins
    return {n: Speech((), part, tokens, num_mel_bins=mels, archive=archive) for n, part in found.items() if part}


def _figure(data: list[dict[str, Any]], parts: list[str], names: Sequence[str]) -> Any:
    figure, (axis,) = drawing.axes_grid(1, width=8.0, height=4.6)
    for name, style in drawing.variant_styles(names).items():
        means = [statistics.mean(select(data, "cer", variant=name, part=part)) for part in parts]
        axis.plot(range(len(parts)), means, style["linestyle"], marker="o", ms=3, label=name, color=style["colour"])
    axis.set_xticks(range(len(parts)), parts)
    axis.set_ylabel("character errors, %")
    axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _plot_curves(outcomes: dict[str, list[sweep.Outcome]]) -> Any:
    figure, axes = drawing.axes_grid(2, width=6.0, height=4.6)
    for name, style in drawing.variant_styles(outcomes).items():
        runs = [outcome.rows for outcome in outcomes[name]]
        for axis, metric in zip(axes, ("loss", "gradient_norm"), strict=True):
            drawing.plot_metric(axis, runs, metric, name, **style)
    axes[0].set(xlabel="step", ylabel="training loss")
    axes[1].set(xlabel="step", ylabel="gradient norm", yscale="log")
    drawing.band_legend(axes[1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def speech_experiment(name: str, title: str, source: str, table: SpeechTable) -> Experiment:
    """Return the experiment that runs a table and judges its claims (``Experiment``)."""
    return Experiment(
        name,
        title,
        source,
        table,
        table.judge,
        {"smoke": 0.2, "small": round(0.65 * len(table.variants)), "paper": None},  # with three seeds
        "8 GPUs of 80 GB",
        "strings of spoken digits (FSDD) instead of LibriSpeech, 2 layers of 64, 800 steps of 10 s, not converged, "
        "so character errors are compared rather than word errors; strings of 8 to 14 digits replace TED-LIUM's "
        "longer talks",
        takes=SPEECH,
        unequal_seeds=True,
        count_seeds=count_seeds_by("variant"),
    )
