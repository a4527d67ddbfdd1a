"""Speech recognition: bias kinds and positions, depth, post-norm, conformer and hybrid-norm (App. ASR).

    python -m experiments speech-bias --speech FSDD.tar.gz  (--scale paper: 8 GPUs of 80 GB, LibriSpeech, TED-LIUM v3)
    python -m experiments speech-structure | speech-stability | speech-hybrid | speech-post --speech FSDD.tar.gz

Expected: with b = -log n of each sample, sigmoid matches softmax with every position; -log of the longest sample of a
batch is equally good; without a bias it may match too, but gradients spike; hybrid-norm needs no bias; post-norm is
worse than softmax; a conformer with a learned b = -10 fails on longer recordings.
"""

from __future__ import annotations

from typing import Any

from experiments.ablation import SPIKES, Claim
from experiments.run_file import Trainings
from experiments.speech import LONGEST, speech_experiment

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
_LEARNED_OR_IN_QUERY: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid, b = -10 learned": LEARNED,
    "sigmoid, b = -10 learned, α = 1": {**LEARNED, "length_power": 1.0},
    "sigmoid, b = -5 in Q": IN_QUERY,
}
_WITHOUT: dict[str, dict[str, Any]] = {
    "softmax": SOFTMAX,
    "sigmoid": {},
    "sigmoid without QK-norm": NO_QK,
    "sigmoid without LayerScale": {"init_values": None},
    "sigmoid without QK-norm and bias": {**NO_QK, "attention_bias": 0.0},
    "sigmoid, b = -10 learned": LEARNED,
    "sigmoid, b = -5 in Q": IN_QUERY,
    "sigmoid, b = -5 in Q, without QK-norm": {**IN_QUERY, **NO_QK},
}
STABILITY: dict[str, dict[str, Any]] = {  # by position; rows of Table "asr-results" and Figs. "asr-spikes", "asr-logn"
    f"{name}, {label}": {"position": label.lower(), **changes}
    for label, variants in (("CAPE", _WITHOUT), ("RoPE", _LEARNED_OR_IN_QUERY), ("ALiBi", _LEARNED_OR_IN_QUERY))
    for name, changes in variants.items()
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


RULED, LONGEST_OF_BATCH = "sigmoid, RoPE, b = -log n", "sigmoid, RoPE, b = -log of the batch's longest"
BIAS = speech_experiment(
    "speech-bias",
    "Speech recognition: biases and positions, by length",
    'Tables "asr-results", "asr-results-ext", App. ASR',
    BIASES,
    (
        *(
            Claim(
                f"With {p} and b = -log n, sigmoid matches softmax.",
                f"sigmoid, {p}, b = -log n",
                "same",
                f"softmax, {p}",
            )
            for p in ("RoPE", "ALiBi", "CAPE")
        ),
        Claim("-log of the batch's longest sample is as good as each sample's own.", LONGEST_OF_BATCH, "same", RULED),
        Claim(
            "On longer recordings, -log n with RoPE still matches softmax.",
            RULED,
            "same",
            "softmax, RoPE",
            metric=LONGEST,
        ),
    ),
    smoke=("softmax, RoPE", RULED, LONGEST_OF_BATCH),
)
CONFORMER, LEARNED_CONFORMER = "sigmoid, conformer", "sigmoid, conformer, b = -10, learned"
STRUCTURE = speech_experiment(
    "speech-structure",
    "Speech recognition: depth, post-norm, hybrid-norm, conformer",
    'Tables "asr-pre-100h", "asr-post-100h", "asr-conformer", "asr-results-ext", App. ASR',
    STRUCTURES,
    (
        *(
            Claim(
                f"{text} matches softmax with CAPE, both without QK-norm ({layers}).",
                f"{name}, CAPE, {layers}",
                "same",
                f"softmax, CAPE, {layers}",
            )
            for layers in ("1 layer", "3 layers")
            for text, name in (
                ("b = -log n", "sigmoid without QK-norm"),
                ("b = 0", "sigmoid without QK-norm and bias"),
            )
        ),
        Claim("With post-norm, sigmoid is worse.", "sigmoid, post-norm", "higher", "softmax, post-norm"),
        Claim("A conformer with -log n matches.", CONFORMER, "same", "softmax, conformer"),
        Claim(
            "A conformer with a learned b = -10 fails on longer recordings, where -log n does not.",
            LEARNED_CONFORMER,
            "higher",
            CONFORMER,
            1.0,  # to fail is more than to double the errors
            LONGEST,
        ),
    ),
    smoke=(*list(DEPTHS)[:2], LEARNED_CONFORMER),
    paper=PAPER_STRUCTURES,
)


def _spikes(text: str, name: str, baseline: str) -> Claim:
    """Return the claim that gradients of ``name`` spike more often, where one spike in a run would matter."""
    return Claim(text, name, "higher", baseline, 1.0, SPIKES)


STABILITY_TABLE = speech_experiment(
    "speech-stability",
    "Speech recognition: what stabilises training",
    'Table "asr-results", Figs. "asr-spikes", "asr-logn", App. ASR',
    STABILITY,
    (
        Claim(
            "LayerScale is needed for generalisation.", "sigmoid without LayerScale, CAPE", "higher", "sigmoid, CAPE"
        ),
        *(
            Claim(f"{text} is as good as -log n ({p}).", f"{name}, {p}", "same", f"sigmoid, {p}")
            for text, name in (
                ("A learned b = -10", "sigmoid, b = -10 learned"),
                ("b = -5 added to Q", "sigmoid, b = -5 in Q"),
            )
            for p in ("CAPE", "ALiBi")
        ),
        *(
            Claim(
                f"Division by n is worse ({p}).",
                f"sigmoid, b = -10 learned, α = 1, {p}",
                "higher",
                f"sigmoid, b = -10 learned, {p}",
            )
            for p in ("RoPE", "ALiBi")
        ),
        _spikes("Without QK-norm gradients spike.", "sigmoid without QK-norm, CAPE", "sigmoid, CAPE"),
        _spikes("Without QK-norm and bias gradients spike.", "sigmoid without QK-norm and bias, CAPE", "softmax, CAPE"),
        _spikes("With RoPE a bias in Q makes gradients spike.", "sigmoid, b = -5 in Q, RoPE", "sigmoid, RoPE"),
    ),
    smoke=("sigmoid, CAPE", "sigmoid, b = -5 in Q, CAPE"),
)
NO_QK_HYBRID = "sigmoid, hybrid-norm, no QK-norm"
HYBRID_TABLE = speech_experiment(
    "speech-hybrid",
    "Speech recognition: hybrid-norm, and the bias of the batch's longest sample",
    'Table "asr-results-ext", App. ASR',
    HYBRIDS,
    (
        Claim("Hybrid-norm in place of the bias matches softmax.", "sigmoid, hybrid-norm", "same", "softmax, RoPE"),
        Claim("Hybrid-norm in place of bias and QK-norm matches softmax.", NO_QK_HYBRID, "same", "softmax, RoPE"),
        Claim(
            "With hybrid-norm, the feed-forward layers' LayerScale is needed.",
            f"{NO_QK_HYBRID}, no LayerScale",
            "higher",
            NO_QK_HYBRID,
        ),
        *(
            Claim(
                f"-log of the batch's longest sample is as good as each sample's own ({p}).",
                f"sigmoid, {p}, b = -log of the batch's longest",
                "same",
                f"sigmoid, {p}",
            )
            for p in ("CAPE", "ALiBi")
        ),
    ),
    smoke=("softmax, RoPE", NO_QK_HYBRID),
)
POST_TABLE = speech_experiment(
    "speech-post",
    "Speech recognition with post-norm",
    'Table "asr-post-100h", Fig. "asr-spikes", App. ASR',
    POSTS,
    (
        *(
            Claim(f"Sigmoid is worse than softmax ({p}).", f"sigmoid, {p}", "higher", f"softmax, {p}")
            for p in ("CAPE", "RoPE", "ALiBi")
        ),
        Claim("Without QK-norm and LayerScale sigmoid is better.", "sigmoid, CAPE, neither", "lower", "sigmoid, CAPE"),
        _spikes("Without LayerScale gradients spike.", "sigmoid, CAPE, no LayerScale", "sigmoid, CAPE"),
        _spikes("Without a bias gradients spike.", "sigmoid, CAPE, b = 0, no QK-norm", "softmax, CAPE"),
    ),
    smoke=("softmax, CAPE", "sigmoid, CAPE"),
    paper="asr-ls100-post",
)
EXPERIMENTS = (BIAS, STRUCTURE, STABILITY_TABLE, HYBRID_TABLE, POST_TABLE)
