"""Speech recognition: bias kinds and positions, depth, post-norm, conformer and hybrid-norm (App. ASR).

    python -m experiments speech-bias --speech FSDD.tar.gz  (--scale paper: 8 GPUs of 80 GB, LibriSpeech, TED-LIUM v3)
    python -m experiments speech-structure | speech-stability | speech-hybrid | speech-post --speech FSDD.tar.gz

Expected: with b = -log n of each sample, sigmoid matches softmax with every position; -log of the longest sample of a
batch is equally good; without a bias it may match too, but gradients spike; hybrid-norm needs no bias; post-norm is
worse than softmax; a conformer with a learned b = -10 fails on longer recordings.
"""

from __future__ import annotations

from typing import Any

from experiments.ablation import Claim
from experiments.run_file import Trainings
from experiments.speech import SpeechTable, speech_experiment

TOLERANCE = 0.15  # of the baseline's errors, which are 3 to 30 % of the characters
SPIKE = 1.0  # per run: the smallest difference of gradient spikes that would matter
SOFTMAX: dict[str, Any] = {"activation": "softmax", "qk_norm": "none"}
BIASES: dict[str, dict[str, Any]] = {
    "softmax, RoPE": {**SOFTMAX, "position": "rope"},
    "softmax, RoPE, QK-norm": {"activation": "softmax", "position": "rope"},  # not in the paper's table
    "sigmoid, RoPE, b = -log n": {"position": "rope"},
    "sigmoid, RoPE, b = -log of the batch's longest": {"position": "rope", "attention_bias": "log_batch"},
    "sigmoid, RoPE, b = 0": {"position": "rope", "attention_bias": 0.0},
    "sigmoid, RoPE, b = -10, learned": {"position": "rope", "attention_bias": -10.0, "learn_bias": "layer"},
    "softmax, ALiBi": {**SOFTMAX, "position": "alibi"},
    "sigmoid, ALiBi, b = -log n": {"position": "alibi"},
    "softmax, CAPE": {**SOFTMAX, "position": "cape"},
    "sigmoid, CAPE, b = -log n": {"position": "cape"},
}
NO_QK: dict[str, Any] = {"qk_norm": "none"}
DEPTHS: dict[str, dict[str, Any]] = {  # Table "asr-pre-100h" has CAPE, and QK-norm in none of its rows
    f"{name}, CAPE, {layers} layer{'s' * (layers > 1)}": {**changes, "position": "cape", "num_layers": layers}
    for layers in (1, 3)
    for name, changes in (
        ("softmax", SOFTMAX),
        ("sigmoid without QK-norm", NO_QK),
        ("sigmoid without QK-norm and bias", {**NO_QK, "attention_bias": 0.0}),
    )
}
STRUCTURES: dict[str, dict[str, Any]] = {
    **DEPTHS,
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
LEARNED: dict[str, Any] = {"attention_bias": -10.0, "learn_bias": "layer"}
IN_QUERY: dict[str, Any] = {"attention_bias": -5.0, "learn_bias": "query"}
STABILITY: dict[str, dict[str, Any]] = {  # by position; rows of Table "asr-results" and Figs. "asr-spikes", "asr-logn"
    f"{name}, {label}": {"position": position, **changes}
    for position, label, rows in (
        (
            "cape",
            "CAPE",
            {
                "softmax": SOFTMAX,
                "sigmoid": {},
                "sigmoid without QK-norm": NO_QK,
                "sigmoid without LayerScale": {"init_values": None},
                "sigmoid without QK-norm and bias": {**NO_QK, "attention_bias": 0.0},
                "sigmoid, b = -10 learned": LEARNED,
                "sigmoid, b = -5 in Q": IN_QUERY,
                "sigmoid, b = -5 in Q, without QK-norm": {**IN_QUERY, **NO_QK},
            },
        ),
        (
            "rope",
            "RoPE",
            {
                "sigmoid": {},
                "sigmoid, b = -10 learned": LEARNED,
                "sigmoid, b = -10 learned, α = 1": {**LEARNED, "length_power": 1.0},
                "sigmoid, b = -5 in Q": IN_QUERY,
            },
        ),
        (
            "alibi",
            "ALiBi",
            {
                "sigmoid": {},
                "sigmoid, b = -10 learned": LEARNED,
                "sigmoid, b = -10 learned, α = 1": {**LEARNED, "length_power": 1.0},
                "sigmoid, b = -5 in Q": IN_QUERY,
            },
        ),
    )
    for name, changes in rows.items()
}
HYBRID: dict[str, Any] = {"position": "rope", "norm_placement": "hybrid_attention", "attention_bias": 0.0}
HYBRIDS: dict[str, dict[str, Any]] = {
    "softmax, RoPE": {**SOFTMAX, "position": "rope"},
    "sigmoid, RoPE": {"position": "rope"},
    "sigmoid, hybrid-norm": HYBRID,
    "sigmoid, hybrid-norm, no QK-norm": {**HYBRID, **NO_QK},
    "sigmoid, hybrid-norm, no QK-norm, no LayerScale": {**HYBRID, **NO_QK, "init_values": None},
    "sigmoid, CAPE": {"position": "cape"},
    "sigmoid, CAPE, b = -log of the batch's longest": {"position": "cape", "attention_bias": "log_batch"},
    "sigmoid, ALiBi": {"position": "alibi"},
    "sigmoid, ALiBi, b = -log of the batch's longest": {"position": "alibi", "attention_bias": "log_batch"},
}
POST: dict[str, Any] = {"norm_placement": "post"}
POSTS: dict[str, dict[str, Any]] = {
    "softmax, CAPE": {**SOFTMAX, **POST, "position": "cape"},
    "softmax, CAPE, QK-norm": {"activation": "softmax", **POST, "position": "cape"},
    "sigmoid, CAPE": {**POST, "position": "cape"},
    "sigmoid, CAPE, no QK-norm": {**POST, **NO_QK, "position": "cape"},
    "sigmoid, CAPE, no LayerScale": {**POST, "position": "cape", "init_values": None},
    "sigmoid, CAPE, neither": {**POST, **NO_QK, "position": "cape", "init_values": None},
    "sigmoid, CAPE, b = 0, no QK-norm": {**POST, **NO_QK, "position": "cape", "attention_bias": 0.0},
    "sigmoid, CAPE, b = -10 learned": {**POST, **LEARNED, "position": "cape"},
    "softmax, RoPE": {**SOFTMAX, **POST, "position": "rope"},
    "sigmoid, RoPE": {**POST, "position": "rope"},
    "sigmoid, RoPE, b = -10 learned": {**POST, **LEARNED, "position": "rope"},
    "softmax, ALiBi": {**SOFTMAX, **POST, "position": "alibi"},
    "sigmoid, ALiBi": {**POST, "position": "alibi"},
    "sigmoid, ALiBi, b = -10 learned": {**POST, **LEARNED, "position": "alibi"},
}
PAPER_STRUCTURES: Trainings = {
    **{
        f"{kind}, {layers} layers": (f"asr-ls100-{layers}{suffix}", changes)
        for layers in (36, 24, 12)
        for kind, suffix, changes in (
            ("softmax", "-softmax", {}),
            ("sigmoid", "", {}),
            ("sigmoid, b = 0", "", {"attention_bias": 0.0}),
        )
    },
    "softmax, conformer": ("asr-conformer-ls960-softmax", {}),
    "sigmoid, conformer": ("asr-conformer-ls960", {}),
    "sigmoid, conformer, b = -10, learned": ("asr-conformer-ls960", LEARNED),
}


def _matches(position: str) -> Claim:
    return Claim(
        f"With {position} and b = -log n, sigmoid matches softmax.",
        f"sigmoid, {position}, b = -log n",
        "same",
        f"softmax, {position}",
        relative=TOLERANCE,
    )


RULED = "sigmoid, RoPE, b = -log n"
BIAS = speech_experiment(
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
                relative=TOLERANCE,
            ),
        ),
        smoke=("softmax, RoPE", RULED, "sigmoid, RoPE, b = -log of the batch's longest"),
        longer=(
            Claim(
                "On longer recordings, -log n with RoPE still matches softmax.",
                RULED,
                "same",
                "softmax, RoPE",
                relative=TOLERANCE,
            ),
        ),
    ),
)
STRUCTURE = speech_experiment(
    "speech-structure",
    "Speech recognition: depth, post-norm, hybrid-norm, conformer",
    'Tables "asr-pre-100h", "asr-post-100h", "asr-conformer", "asr-results-ext", App. ASR',
    SpeechTable(
        STRUCTURES,
        (
            *(
                Claim(
                    f"{text} matches softmax with CAPE, both without QK-norm ({layers}).",
                    f"{name}, CAPE, {layers}",
                    "same",
                    f"softmax, CAPE, {layers}",
                    relative=TOLERANCE,
                )
                for layers in ("1 layer", "3 layers")
                for text, name in (
                    ("b = -log n", "sigmoid without QK-norm"),
                    ("b = 0", "sigmoid without QK-norm and bias"),
                )
            ),
            Claim(
                "With post-norm, sigmoid is worse.",
                "sigmoid, post-norm",
                "higher",
                "softmax, post-norm",
                relative=TOLERANCE,
            ),
            Claim(
                "A conformer with -log n matches.",
                "sigmoid, conformer",
                "same",
                "softmax, conformer",
                relative=TOLERANCE,
            ),
        ),
        smoke=(*list(DEPTHS)[:2], "sigmoid, conformer, b = -10, learned"),
        longer=(
            Claim(
                "A conformer with a learned b = -10 fails on longer recordings, where -log n does not.",
                "sigmoid, conformer, b = -10, learned",
                "higher",
                "sigmoid, conformer",
                relative=1.0,  # to fail is more than to double the errors
            ),
        ),
        paper=PAPER_STRUCTURES,
    ),
)
STABILITY_TABLE = speech_experiment(
    "speech-stability",
    "Speech recognition: what stabilises training",
    'Table "asr-results", Figs. "asr-spikes", "asr-logn", App. ASR',
    SpeechTable(
        STABILITY,
        (
            Claim(
                "LayerScale is needed for generalisation.",
                "sigmoid without LayerScale, CAPE",
                "higher",
                "sigmoid, CAPE",
                relative=TOLERANCE,
            ),
            *(
                Claim(
                    f"A learned b = -10 is as good as -log n ({p}).",
                    f"sigmoid, b = -10 learned, {p}",
                    "same",
                    f"sigmoid, {p}",
                    relative=TOLERANCE,
                )
                for p in ("CAPE", "ALiBi")
            ),
            *(
                Claim(
                    f"b = -5 added to Q is as good as -log n ({p}).",
                    f"sigmoid, b = -5 in Q, {p}",
                    "same",
                    f"sigmoid, {p}",
                    relative=TOLERANCE,
                )
                for p in ("CAPE", "ALiBi")
            ),
            *(
                Claim(
                    f"Division by n is worse ({p}).",
                    f"sigmoid, b = -10 learned, α = 1, {p}",
                    "higher",
                    f"sigmoid, b = -10 learned, {p}",
                    relative=TOLERANCE,
                )
                for p in ("RoPE", "ALiBi")
            ),
        ),
        smoke=("sigmoid, CAPE", "sigmoid, b = -5 in Q, CAPE"),
        spikes=(
            Claim(
                "Without QK-norm gradients spike.", "sigmoid without QK-norm, CAPE", "higher", "sigmoid, CAPE", SPIKE
            ),
            Claim(
                "Without QK-norm and bias gradients spike.",
                "sigmoid without QK-norm and bias, CAPE",
                "higher",
                "softmax, CAPE",
                SPIKE,
            ),
            Claim(
                "With RoPE a bias in Q makes gradients spike.",
                "sigmoid, b = -5 in Q, RoPE",
                "higher",
                "sigmoid, RoPE",
                SPIKE,
            ),
        ),
        curves=True,
    ),
)
HYBRID_TABLE = speech_experiment(
    "speech-hybrid",
    "Speech recognition: hybrid-norm, and the bias of the batch's longest sample",
    'Table "asr-results-ext", App. ASR',
    SpeechTable(
        HYBRIDS,
        (
            *(
                Claim(f"Hybrid-norm {words} matches softmax.", name, "same", "softmax, RoPE", relative=TOLERANCE)
                for words, name in (
                    ("in place of the bias", "sigmoid, hybrid-norm"),
                    ("in place of bias and QK-norm", "sigmoid, hybrid-norm, no QK-norm"),
                )
            ),
            Claim(
                "With hybrid-norm, the feed-forward layers' LayerScale is needed.",
                "sigmoid, hybrid-norm, no QK-norm, no LayerScale",
                "higher",
                "sigmoid, hybrid-norm, no QK-norm",
                relative=TOLERANCE,
            ),
            *(
                Claim(
                    f"-log of the batch's longest sample is as good as each sample's own ({p}).",
                    f"sigmoid, {p}, b = -log of the batch's longest",
                    "same",
                    f"sigmoid, {p}",
                    relative=TOLERANCE,
                )
                for p in ("CAPE", "ALiBi")
            ),
        ),
        smoke=("softmax, RoPE", "sigmoid, hybrid-norm, no QK-norm"),
        curves=True,
    ),
)
POST_TABLE = speech_experiment(
    "speech-post",
    "Speech recognition with post-norm",
    'Table "asr-post-100h", Fig. "asr-spikes", App. ASR',
    SpeechTable(
        POSTS,
        (
            *(
                Claim(
                    f"Sigmoid is worse than softmax ({p}).",
                    f"sigmoid, {p}",
                    "higher",
                    f"softmax, {p}",
                    relative=TOLERANCE,
                )
                for p in ("CAPE", "RoPE", "ALiBi")
            ),
            Claim(
                "Without QK-norm and LayerScale sigmoid is better.",
                "sigmoid, CAPE, neither",
                "lower",
                "sigmoid, CAPE",
                relative=TOLERANCE,
            ),
        ),
        smoke=("softmax, CAPE", "sigmoid, CAPE"),
        spikes=(
            Claim(
                "Without LayerScale gradients spike.", "sigmoid, CAPE, no LayerScale", "higher", "sigmoid, CAPE", SPIKE
            ),
            Claim(
                "Without a bias gradients spike.", "sigmoid, CAPE, b = 0, no QK-norm", "higher", "softmax, CAPE", SPIKE
            ),
        ),
        curves=True,
        paper="asr-ls100-post",
    ),
)
EXPERIMENTS = (BIAS, STRUCTURE, STABILITY_TABLE, HYBRID_TABLE, POST_TABLE)
