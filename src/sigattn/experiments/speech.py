"""Speech recognition: bias kinds and positions, depth, post-norm, conformer and hybrid-norm (App. ASR).

    sigattn reproduce speech-bias --speech FSDD.tar.gz      (--scale paper: 8 GPUs of 80 GB, LibriSpeech, TED-LIUM v3)
    sigattn reproduce speech-structure --speech FSDD.tar.gz

Expected: with b = -log n of each sample, sigmoid matches softmax with every position; -log of the longest sample of a
batch is equally good; without a bias it may match too, but gradients spike; hybrid-norm needs no bias; post-norm is
worse than softmax; a conformer with a learned b = -10 fails on longer recordings.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sigattn.data.corpora import spoken_digits
from sigattn.data.speech import CharTokenizer, Speech, Utterance
from sigattn.experiments import ablation, drawing, intervals, sweep
from sigattn.experiments.ablation import Claim
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Row, Scale, Setting, select
from sigattn.models.speech import SpeechModelConfig
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.ctc import CTC
from sigattn.train import metrics

SOFTMAX: dict[str, Any] = {"activation": "softmax", "qk_norm": "none"}
BIASES: dict[str, dict[str, Any]] = {
    "softmax, RoPE": {**SOFTMAX, "position": "rope"},
    "sigmoid, RoPE, b = -log n": {"position": "rope"},
    "sigmoid, RoPE, b = -log of the batch's longest": {"position": "rope", "attention_bias": "log_batch"},
    "sigmoid, RoPE, b = 0": {"position": "rope", "attention_bias": 0.0},
    "sigmoid, RoPE, b = -10, learned": {"position": "rope", "attention_bias": -10.0, "learn_bias": "layer"},
    "softmax, ALiBi": {**SOFTMAX, "position": "alibi"},
    "sigmoid, ALiBi, b = -log n": {"position": "alibi"},
    "softmax, CAPE": {**SOFTMAX, "position": "cape"},
    "sigmoid, CAPE, b = -log n": {"position": "cape"},
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "softmax, 1 layer": {**SOFTMAX, "num_layers": 1},
    "sigmoid, 1 layer": {"num_layers": 1},
    "softmax, 3 layers": {**SOFTMAX, "num_layers": 3},
    "sigmoid, 3 layers": {"num_layers": 3},
    "sigmoid, hybrid-norm, no QK-norm, b = 0": {
        "norm_placement": "hybrid_attention",
        "qk_norm": "none",
        "attention_bias": 0.0,
    },
    "softmax, post-norm": {**SOFTMAX, "norm_placement": "post"},
    "sigmoid, post-norm": {"norm_placement": "post"},
    "softmax, conformer": {**SOFTMAX, "block_kind": "conformer"},
    "sigmoid, conformer": {"block_kind": "conformer"},
    "sigmoid, conformer, b = -10, learned": {"block_kind": "conformer", "attention_bias": -10.0, "learn_bias": "layer"},
}
DIGITS = (2, 4, 7, 14)  # largest number of digits of the strings of each bucket; training strings have up to 7
TOLERANCE = 4.0  # points of CER, about a tenth of the error


def base(setting: Setting) -> Recipe:
    """Return the recipe of a transformer on strings of spoken digits.

    Raises:
        ExperimentError: at the paper's scale.
    """
    if setting.scale == "paper":
        raise ExperimentError(
            "at the paper's scale these are models of 255M parameters on LibriSpeech: run sigattn train asr-ls960 "
            "--data LIBRISPEECH (or asr-ls100-12, -24, -36, -post, asr-conformer-ls960, asr-ls960-hybrid), and "
            "sigattn evaluate RUN --data TEDLIUM for the errors by duration"
        )
    recipe = find_recipe("asr-ls960-tiny").with_transformer(position="rope")
    return sweep.shortened(recipe, setting.steps(4, 400), setting.scaled(4, 20, None))


@dataclass(frozen=True)
class SpeechTable:
    """Experiment that compares character error rates of variants by the length of a recording.

    Attributes:
        variants, claims: see ``Ablation``. smoke: the variants of the smallest scale.
        longer: claims about the longest strings, which do not occur in training.
    """

    variants: dict[str, dict[str, Any]]
    claims: Sequence[Claim]
    smoke: tuple[str, ...]
    longer: Sequence[Claim] = ()

    def __call__(self, setting: Setting) -> Result:
        """Train all variants and evaluate them on strings of every length."""
        recipe = base(setting)
        outcomes = ablation.train_changes(setting, recipe, self.variants, self.smoke)
        parts = strings_by_length(setting, recipe)
        data: list[dict[str, Any]] = []
        for name, runs in outcomes.items():
            for run in runs:
                spikes = metrics.count_spikes([row["gradient_norm"] for row in run.rows], 3.0)
                model = run.load_model()
                for part, speech in parts.items():
                    with torch.no_grad():
                        errors = CTC().evaluate(model, speech.validation(60))
                    row = {"variant": name, "seed": run.seed, "part": part, "gradient_spikes": spikes}
                    data.append({**row, "wer": errors["wer"], "cer": errors["cer"]})
        rows = []
        for name, runs in outcomes.items():
            cells = [intervals.mean_std(select(data, "cer", variant=name, part=part)) for part in parts]
            words = intervals.mean_std([run.final["wer"] for run in runs])
            spikes = statistics.mean(select(data, "gradient_spikes", variant=name))
            characters = intervals.mean_std([run.final["cer"] for run in runs])
            rows.append((name, words, characters, *cells, f"{spikes:.0f}"))
        columns = ("variant", "WER %", "CER %", *(f"CER %, {part}" for part in parts), "gradient spikes")
        return Result(columns, rows, data, _figure(data, list(parts), list(outcomes)))

    def judge(self, data: Sequence[Row], _: Scale) -> list[Finding]:
        """Compare the mean CER over the groups of lengths that occur in training, and the CER of the longest group."""
        *trained, longest = dict.fromkeys(row["part"] for row in data)
        at_trained, at_longest = {}, {}
        for name in dict.fromkeys(row["variant"] for row in data):
            errors = [select(data, "cer", variant=name, part=part) for part in trained]
            at_trained[name] = [statistics.mean(of_seed) for of_seed in zip(*errors, strict=True)]
            at_longest[name] = select(data, "cer", variant=name, part=longest)
        return ablation.check_claims(self.claims, at_trained) + ablation.check_claims(self.longer, at_longest)


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
    for name, colour in drawing.variant_colours(names).items():
        style = "-" if name.startswith("sigmoid") else "--"
        means = [statistics.mean(select(data, "cer", variant=name, part=part)) for part in parts]
        axis.plot(range(len(parts)), means, style, marker="o", ms=3, label=name, color=colour)
    axis.set_xticks(range(len(parts)), parts)
    axis.set_ylabel("character errors, % (dashed: softmax)")
    axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _experiment(name: str, title: str, source: str, table: SpeechTable, minutes: float) -> Experiment:
    return Experiment(
        name,
        title,
        source,
        table,
        table.judge,
        {"smoke": 0.2, "small": minutes, "paper": None},
        "8 GPUs of 80 GB",
        "strings of spoken digits (FSDD) instead of LibriSpeech, 2 layers of 64, 400 steps of 20 s, not converged, "
        "so character errors are compared rather than word errors; strings of 8 to 14 digits replace TED-LIUM's "
        "longer talks",
    )


def _matches(position: str) -> Claim:
    return Claim(
        f"With {position} and b = -log n, sigmoid matches softmax.",
        f"sigmoid, {position}, b = -log n",
        "same",
        f"softmax, {position}",
        TOLERANCE,
    )


RULED = "sigmoid, RoPE, b = -log n"
BIAS = _experiment(
    "speech-bias",
    "Speech recognition: biases and positions, by length",
    'Tables "asr-results", "asr-results-ext", App. ASR',
    SpeechTable(
        BIASES,
        (
            *(_matches(position) for position in ("RoPE", "ALiBi", "CAPE")),
            Claim(
                "-log of the batch's longest sample is as good as each sample's own.",
                "sigmoid, RoPE, b = -log of the batch's longest",
                "same",
                RULED,
                TOLERANCE,
            ),
            Claim(
                "Without a bias sigmoid can still match.", "sigmoid, RoPE, b = 0", "same", "softmax, RoPE", TOLERANCE
            ),
        ),
        smoke=("softmax, RoPE", RULED, "sigmoid, RoPE, b = -log of the batch's longest"),
        longer=(
            Claim(
                "On longer recordings, -log n with RoPE still matches softmax.",
                RULED,
                "same",
                "softmax, RoPE",
                TOLERANCE,
            ),
        ),
    ),
    8.0,
)
STRUCTURE = _experiment(
    "speech-structure",
    "Speech recognition: depth, post-norm, hybrid-norm, conformer",
    'Tables "asr-pre-100h", "asr-post-100h", "asr-conformer", "asr-results-ext", App. ASR',
    SpeechTable(
        STRUCTURES,
        (
            Claim("A shallow model matches softmax.", "sigmoid, 1 layer", "same", "softmax, 1 layer", TOLERANCE),
            Claim("So does a deeper one.", "sigmoid, 3 layers", "same", "softmax, 3 layers", TOLERANCE),
            Claim("With post-norm, sigmoid is worse.", "sigmoid, post-norm", "higher", "softmax, post-norm"),
            Claim("A conformer with -log n matches.", "sigmoid, conformer", "same", "softmax, conformer", TOLERANCE),
        ),
        smoke=("softmax, 1 layer", "sigmoid, 1 layer", "sigmoid, conformer, b = -10, learned"),
        longer=(
            Claim(
                "A conformer with a learned b = -10 fails on longer recordings, where -log n does not.",
                "sigmoid, conformer, b = -10, learned",
                "higher",
                "sigmoid, conformer",
            ),
        ),
    ),
    8.0,
)
EXPERIMENTS = (BIAS, STRUCTURE)
