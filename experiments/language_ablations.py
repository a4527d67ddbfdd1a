"""Language models: placement of norms, with and without a bias; and n^(-α) instead of a bias.

    python -m experiments norm-structure | norm-structure-4k    (--scale paper: 64 GPUs of 80 GB, RedPajama)
    python -m experiments lm-stability --scale small            (QK-norm of softmax; gradient norms)
    python -m experiments length-power --scale small            (--scale paper: 1 GPU of 80 GB, --data: C4's realnews)

Expected at 2,048 tokens: pre-norm with ALiBi and a bias equals softmax; without a bias, RoPE falls behind (46.0 on
average, compared with 50.6); hybrid-norm makes the bias unnecessary. Output divided by n or √n: slightly worse than
b = -log n.
"""

from __future__ import annotations

from typing import Any

from experiments import sweep
from experiments.ablation import SPIKES, Ablation, Claim
from experiments.experiment import LANGUAGE, Setting
from experiments.position_ablation import one_block_recipe
from experiments.run_file import Trainings
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe

NORMS: dict[str, dict[str, Any]] = {
    "softmax, pre, ALiBi": {"activation": "softmax"},
    "sigmoid, pre, ALiBi, b = -log n": {},
    "sigmoid, pre, RoPE, b = -log n": {"position": "rope"},
    "sigmoid, pre, RoPE, b = 0": {"position": "rope", "attention_bias": 0.0},
    "softmax, hybrid, ALiBi": {"activation": "softmax", "norm_placement": "hybrid"},
    "sigmoid, hybrid, ALiBi, b = 0": {"norm_placement": "hybrid", "attention_bias": 0.0},
    "softmax, pre, RoPE": {"activation": "softmax", "position": "rope"},
    "sigmoid, hybrid, ALiBi, b = -log n": {"norm_placement": "hybrid"},
}
SOFTMAX, PRE, ROPE, BARE, SOFT_HYBRID, HYBRID, SOFT_ROPE, BIASED_HYBRID = NORMS
LONG: dict[str, dict[str, Any]] = {
    **{name: NORMS[name] for name in (SOFT_ROPE, SOFTMAX, PRE, SOFT_HYBRID, BIASED_HYBRID, HYBRID)},
    "softmax, hybrid, RoPE": {"activation": "softmax", "norm_placement": "hybrid", "position": "rope"},
    "sigmoid, hybrid, RoPE, b = 0": {"norm_placement": "hybrid", "position": "rope", "attention_bias": 0.0},
}
# lm-1b-4k has hybrid-norm and no bias
LONG_NORMS = {n: {"norm_placement": "pre", "attention_bias": None, **changes} for n, changes in LONG.items()}
TOLERANCE = 0.1  # bits or nats

POWERS: dict[str, dict[str, Any]] = {
    "softmax": {"activation": "softmax", "attention_bias": None},
    "sigmoid, b = -log n": {},
    "sigmoid, n^-1": {"attention_bias": 0.0, "length_power": 1.0},
    "sigmoid, n^-0.5": {"attention_bias": 0.0, "length_power": 0.5},
}


def norm_recipe(setting: Setting) -> Recipe:
    """Return a small form of the 1B model."""
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=setting.scaled(32, 256, None))
    return sweep.shortened(recipe, setting.steps(2, 1200), setting.scaled(2, 4, None))


def long_norm_recipe(setting: Setting) -> Recipe:
    """Return the same model with twice the context and half the batch, as in the table."""
    recipe = norm_recipe(setting).with_transformer(max_seq_len=setting.scaled(64, 512, None))
    return recipe.with_training(batch_size=recipe.training.batch_size // 2)


def alibi_recipe(setting: Setting) -> Recipe:
    """Return the one-block model of Figs. 3-6, with ALiBi."""
    return one_block_recipe(setting, 256, position="alibi", attention_bias="log_context")


_SMALLER = "2 layers of 64 instead of 1B parameters"
NORM_STRUCTURE = Ablation(
    norm_recipe,
    NORMS,
    "bits",
    "held-out bits per byte",
    (
        Claim("Pre-norm sigmoid with ALiBi and -log n equals softmax at 2,048 tokens.", PRE, "same", SOFTMAX),
        Claim("With RoPE and pre-norm, leaving out the bias makes sigmoid worse.", BARE, "higher", ROPE),
        Claim("Hybrid-norm in place of a bias reaches softmax.", HYBRID, "same", SOFTMAX),
        Claim("Hybrid-norm without a bias equals pre-norm with one.", HYBRID, "same", PRE),
        Claim("With a bias, RoPE is worse than ALiBi.", ROPE, "higher", PRE),
        Claim("Hybrid-norm needs no bias: with one it is not better.", BIASED_HYBRID, "same", HYBRID),
    ),
    TOLERANCE,
    smoke=(SOFTMAX, PRE),
    curves="attention_norm",
    paper=("lm-1b-2k", "REDPAJAMA", "sigattn lm-eval"),
).experiment(
    "norm-structure",
    "Pre-norm and hybrid-norm in language models",
    'Table "lm_norm_ablations", App. G.3',
    10.0,
    "64 GPUs of 80 GB",
    f"{_SMALLER}, 256 bytes, 1,200 steps; held-out bits instead of nine evaluations",
    LANGUAGE,
)
LONG_NORM_STRUCTURE = Ablation(
    long_norm_recipe,
    LONG_NORMS,
    "bits",
    "held-out bits per byte",
    (
        Claim(
            "At 4,096 tokens pre-norm sigmoid with a bias is slightly worse than softmax.", PRE, "higher", SOFTMAX, 0.0
        ),
        Claim("Hybrid-norm with a bias reaches softmax with hybrid-norm.", BIASED_HYBRID, "same", SOFT_HYBRID),
        Claim("Hybrid-norm needs no bias: with one it is not better.", BIASED_HYBRID, "same", HYBRID),
        Claim("Hybrid-norm improves on pre-norm with a bias.", HYBRID, "lower", PRE),
    ),
    TOLERANCE,
    smoke=(PRE, HYBRID),
    curves="attention_norm",
    paper=("lm-1b-4k", "REDPAJAMA", "sigattn lm-eval"),
).experiment(
    "norm-structure-4k",
    "Pre-norm and hybrid-norm in language models of twice the context",
    'Table "lm_norm_ablations" at 4,096 tokens, Fig. "1b_4k_nll", App. G.3',
    12.0,
    "64 GPUs of 80 GB",
    f"{_SMALLER}, 512 bytes, 1,200 steps; held-out bits instead of nine evaluations",
    LANGUAGE,
)
STABILITY: dict[str, dict[str, Any]] = {
    "softmax, QK-norm": {"activation": "softmax"},
    "softmax, no QK-norm": {"activation": "softmax", "qk_norm": "none"},
    "sigmoid, QK-norm": {},
}
LONG_85M: dict[str, Any] = {"max_seq_len": 4096, "training.batch_size": 256}
PAPER_STABILITY: Trainings = {
    **{f"1B, 2k, {name}": ("lm-1b-2k", changes) for name, changes in STABILITY.items()},
    "85M, 4k, softmax": ("lm-85m-2k-softmax", LONG_85M),
    "85M, 4k, sigmoid": ("lm-85m-2k", LONG_85M),
}
LANGUAGE_STABILITY = Ablation(
    norm_recipe,
    STABILITY,
    "bits",
    "held-out bits per byte",
    (
        Claim("QK-norm does not hurt softmax.", "softmax, QK-norm", "same", "softmax, no QK-norm"),
        Claim(
            "Sigmoid's gradient norm has more spikes than softmax's.",
            "sigmoid, QK-norm",
            "higher",
            "softmax, QK-norm",
            1.0,
            SPIKES,
        ),
    ),
    TOLERANCE,
    curves="gradient_norm",
    paper=(PAPER_STABILITY, "REDPAJAMA", "compare the metrics.jsonl of the runs"),
).experiment(
    "lm-stability",
    "Language models: QK-norm of softmax, and gradient norms",
    'Figs. "lm_1b_qknorm", "lm_grad_norm", "85m_4k_nll", App. G.3',
    4.0,
    "64 GPUs of 80 GB",
    f"{_SMALLER}, 256 bytes, 1,200 steps",
    LANGUAGE,
)
LENGTH_POWER = Ablation(
    alibi_recipe,
    POWERS,
    "loss",
    "held-out loss, nats",
    (
        Claim("n^-1 is slightly worse than b = -log n.", "sigmoid, n^-1", "higher", "sigmoid, b = -log n"),
        Claim("n^-0.5 is slightly worse than b = -log n.", "sigmoid, n^-0.5", "higher", "sigmoid, b = -log n"),
        Claim("b = -log n equals softmax.", "sigmoid, b = -log n", "same", "softmax", TOLERANCE),
    ),
    curves="attention_norm",
).experiment(
    "length-power",
    "Output divided by n or √n, or a bias of -log n",
    'Figs. "no_scaling", "seq_len_scaling", "sqrt_scaling", App. G.1',
    5.0,
    "1 GPU of 80 GB",
    "width 128 instead of 3072, 256 bytes instead of 4096 tokens, 1,200 steps instead of 65,536",
    LANGUAGE,
)
EXPERIMENTS = (NORM_STRUCTURE, LONG_NORM_STRUCTURE, LANGUAGE_STABILITY, LENGTH_POWER)
