"""Ablations of sigmoid attention in supervised vision (ViT-B/16 on ImageNet-1k in the paper).

    python -m experiments vision-ablations --scale small        (--scale paper: 8 GPUs of 80 GB, ImageNet-1k)
    python -m experiments layerscale-free | relaxations

Expected: QK-norm hardly changes accuracy with LayerScale; without LayerScale accuracy falls, unless temperature and
bias are learned; one key head is enough; activations are equally good with both, except tanh; linear attention and
Performer are worse.
"""

from __future__ import annotations

from typing import Any

from experiments import sweep
from experiments.ablation import Ablation, Claim, make_experiment
from experiments.experiment import Setting
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe

NEITHER: dict[str, Any] = {"qk_norm": "none", "init_values": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid, no QK-norm": {"qk_norm": "none"},
    "sigmoid, no LayerScale": {"init_values": None},
    "sigmoid, neither": NEITHER,
    "sigmoid, n^-1, no LayerScale": {"length_power": 1.0, "init_values": None},
    "sigmoid, one key head": {"num_kv_heads": 1},
    "softmax": {"activation": "softmax"},
    "softmax, no LayerScale": {"activation": "softmax", "init_values": None},
    "softmax, one key head": {"activation": "softmax", "num_kv_heads": 1},
    "relu": {"activation": "relu"},
    "relu²": {"activation": "relu2"},
    "relu², neither": {"activation": "relu2", **NEITHER},
    "gelu": {"activation": "gelu"},
    "tanh": {"activation": "tanh"},
}
LEARNED = "sigmoid, neither, learned t and b"
FREE: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "softmax": {"activation": "softmax"},
    "sigmoid, neither": NEITHER,
    LEARNED: {**NEITHER, "temperature": 1.0, "attention_bias": -10.0, "learn_bias": "layer"},
    f"{LEARNED}, from t = 10": {**NEITHER, "temperature": 10.0, "attention_bias": -10.0, "learn_bias": "layer"},
}
RELAXED: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "softmax": {"activation": "softmax"},
    "linear": {"activation": "identity"},
    "performer": {"activation": "performer"},
}


def base(setting: Setting) -> Recipe:
    """Return the recipe of a ViT on handwritten digits."""
    return sweep.shortened(find_recipe("vit-supervised-tiny"), setting.steps(4, 400), setting.scaled(8, 128, None))


_PAPER = ("vit-supervised", "IMAGENET", "read validation_top1 in the last line of each metrics.jsonl")
_HARDWARE = "8 GPUs of 80 GB"
_DIFFERS = "handwritten digits of 8 × 8 pixels instead of ImageNet, 2 layers of 64, 400 steps, LayerScale from 0.01"
TOLERANCE = 0.03  # of the accuracy
_SAME = Claim("Sigmoid matches softmax.", "sigmoid", "same", "softmax", TOLERANCE)


ABLATIONS = make_experiment(
    "vision-ablations",
    "Supervised vision: QK-norm, LayerScale, key heads, activations",
    'Fig. 10, Sect. "Ablations"',
    Ablation(
        base,
        VARIANTS,
        "top1",
        "held-out top-1",
        (
            Claim("With LayerScale, sigmoid needs no QK-norm.", "sigmoid, no QK-norm", "same", "sigmoid", TOLERANCE),
            Claim(
                "Without LayerScale, sigmoid's accuracy falls (by 1 %).",
                "sigmoid, no LayerScale",
                "lower",
                "sigmoid",
                0.01,
            ),
            Claim(
                "One key head is as good as all, for sigmoid.", "sigmoid, one key head", "same", "sigmoid", TOLERANCE
            ),
            Claim(
                "One key head is as good as all, for softmax.", "softmax, one key head", "same", "softmax", TOLERANCE
            ),
            Claim("ReLU with QK-norm and LayerScale is as good as sigmoid.", "relu", "same", "sigmoid", TOLERANCE),
            Claim("GELU with both is as good as sigmoid.", "gelu", "same", "sigmoid", TOLERANCE),
            Claim("Tanh is worse.", "tanh", "lower", "sigmoid", TOLERANCE),
            Claim("ReLU² needs QK-norm and LayerScale.", "relu², neither", "lower", "relu²", TOLERANCE),
            _SAME,
        ),
        smoke=("sigmoid", "softmax", "relu²"),
        paper=_PAPER,
    ),
    {"smoke": 0.2, "small": 7.0, "paper": None},
    _HARDWARE,
    _DIFFERS,
)
LAYERSCALE_FREE = make_experiment(
    "layerscale-free",
    "Vision without LayerScale: temperature and bias learned",
    'Fig. "layerscale_free_sigmoid", App. Vision',
    Ablation(
        base,
        FREE,
        "top1",
        "held-out top-1",
        (
            Claim(
                "With learned t and b, sigmoid without LayerScale and QK-norm reaches softmax.",
                LEARNED,
                "same",
                "softmax",
                TOLERANCE,
            ),
            Claim(
                "So it does from t = 10, after an epoch-long plateau.",
                f"{LEARNED}, from t = 10",
                "same",
                "softmax",
                TOLERANCE,
            ),
            Claim("It is better than without learning them.", LEARNED, "higher", "sigmoid, neither", TOLERANCE),
        ),
        smoke=("softmax", LEARNED),
        learned=lambda top1: top1 > 0.5,  # from t = 10 the plateau is longer than the training at the small scale
        paper=_PAPER,
    ),
    {"smoke": 0.2, "small": 3.0, "paper": None},
    _HARDWARE,
    f"{_DIFFERS}; t = 1 as well as the paper's 10, whose plateau of 25 epochs is longer than this training",
)
RELAXATIONS = make_experiment(
    "relaxations",
    "Vision with sigmoid, softmax, linear attention and Performer",
    'Fig. "attention_relaxations", App. Vision',
    Ablation(
        base,
        RELAXED,
        "top1",
        "held-out top-1",
        (
            _SAME,
            Claim("Linear attention is worse than sigmoid.", "linear", "lower", "sigmoid", TOLERANCE),
            Claim("Performer is worse than sigmoid.", "performer", "lower", "sigmoid", TOLERANCE),
        ),
        paper=_PAPER,
    ),
    {"smoke": 0.2, "small": 3.0, "paper": None},
    _HARDWARE,
    _DIFFERS,
)
EXPERIMENTS = (ABLATIONS, LAYERSCALE_FREE, RELAXATIONS)
