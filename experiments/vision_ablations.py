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
from experiments.ablation import Ablation, Claim
from experiments.experiment import Experiment, Setting
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe

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
    return sweep.shortened(find_recipe("vit-supervised-tiny"), setting.steps(2, 400), setting.scaled(8, 128, None))


_DIFFERS = "handwritten digits of 8 × 8 pixels instead of ImageNet, 2 layers of 64, 400 steps, LayerScale from 0.01"
_SAME = Claim("Sigmoid matches softmax.", "sigmoid", "same", "softmax")


def _experiment(
    name: str,
    title: str,
    source: str,
    small_minutes: float,
    variants: dict[str, dict[str, Any]],
    claims: tuple[Claim, ...],
    differs: str = _DIFFERS,
    **study: Any,
) -> Experiment:
    paper = ("vit-supervised", "IMAGENET", "read validation_top1 in the last line of each metrics.jsonl")
    ablation = Ablation(base, variants, "top1", "held-out top-1", claims, tolerance=0.03, paper=paper, **study)
    return ablation.experiment(name, title, source, small_minutes, "8 GPUs of 80 GB", differs)


EXPERIMENTS = (
    _experiment(
        "vision-ablations",
        "Supervised vision: QK-norm, LayerScale, key heads, activations",
        'Fig. 10, Sect. "Ablations"',
        7.0,
        VARIANTS,
        (
            Claim("With LayerScale, sigmoid needs no QK-norm.", "sigmoid, no QK-norm", "same", "sigmoid"),
            Claim(
                "Without LayerScale, sigmoid's accuracy falls (by 1 %).",
                "sigmoid, no LayerScale",
                "lower",
                "sigmoid",
                0.01,
            ),
            Claim("One key head is as good as all, for sigmoid.", "sigmoid, one key head", "same", "sigmoid"),
            Claim("One key head is as good as all, for softmax.", "softmax, one key head", "same", "softmax"),
            Claim("ReLU with QK-norm and LayerScale is as good as sigmoid.", "relu", "same", "sigmoid"),
            Claim("GELU with both is as good as sigmoid.", "gelu", "same", "sigmoid"),
            Claim("Tanh is worse.", "tanh", "lower", "sigmoid"),
            Claim("ReLU² needs QK-norm and LayerScale.", "relu², neither", "lower", "relu²"),
            _SAME,
        ),
        smoke=("sigmoid", "softmax", "relu²"),
    ),
    _experiment(
        "layerscale-free",
        "Vision without LayerScale: temperature and bias learned",
        'Fig. "layerscale_free_sigmoid", App. Vision',
        3.0,
        FREE,
        (
            Claim(
                "With learned t and b, sigmoid without LayerScale and QK-norm reaches softmax.",
                LEARNED,
                "same",
                "softmax",
            ),
            Claim("So it does from t = 10, after an epoch-long plateau.", f"{LEARNED}, from t = 10", "same", "softmax"),
            Claim("It is better than without learning them.", LEARNED, "higher", "sigmoid, neither"),
        ),
        f"{_DIFFERS}; t = 1 as well as the paper's 10, whose plateau of 25 epochs is longer than this training",
        smoke=("softmax", LEARNED),
        learned=lambda top1: top1 > 0.5,  # from t = 10 the plateau is longer than the training at the small scale
    ),
    _experiment(
        "relaxations",
        "Vision with sigmoid, softmax, linear attention and Performer",
        'Fig. "attention_relaxations", App. Vision',
        3.0,
        RELAXED,
        (
            _SAME,
            Claim("Linear attention is worse than sigmoid.", "linear", "lower", "sigmoid"),
            Claim("Performer is worse than sigmoid.", "performer", "lower", "sigmoid"),
        ),
    ),
)
