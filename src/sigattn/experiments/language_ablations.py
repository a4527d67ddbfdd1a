"""Language models: placement of norms, with and without a bias; and n^(-α) instead of a bias.

    sigattn reproduce norm-structure --scale small          (--scale paper: 64 GPUs of 80 GB, RedPajama)
    sigattn reproduce length-power --scale small            (--scale paper: 1 GPU of 80 GB, --data: C4's realnews)

Expected at 2,048 tokens: pre-norm with ALiBi and a bias equals softmax; without a bias, RoPE falls behind (46.0 on
average, compared with 50.6); hybrid-norm makes the bias unnecessary. Output divided by n or √n: slightly worse than
b = -log n.
"""

from __future__ import annotations

from typing import Any

from sigattn.experiments import sweep
from sigattn.experiments.ablation import Ablation, Claim, make_experiment
from sigattn.experiments.experiment import ExperimentError, Setting
from sigattn.experiments.position_ablation import one_block_recipe
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe

NORMS: dict[str, dict[str, Any]] = {
    "softmax, pre, ALiBi": {"activation": "softmax"},
    "sigmoid, pre, ALiBi, b = -log n": {},
    "sigmoid, pre, RoPE, b = -log n": {"position": "rope"},
    "sigmoid, pre, RoPE, b = 0": {"position": "rope", "attention_bias": 0.0},
    "softmax, hybrid, ALiBi": {"activation": "softmax", "norm_placement": "hybrid"},
    "sigmoid, hybrid, ALiBi, b = 0": {"norm_placement": "hybrid", "attention_bias": 0.0},
}
SOFTMAX, PRE, ROPE, BARE, SOFT_HYBRID, HYBRID = NORMS

POWERS: dict[str, dict[str, Any]] = {
    "softmax": {"activation": "softmax", "attention_bias": None},
    "sigmoid, b = -log n": {},
    "sigmoid, n^-1": {"attention_bias": 0.0, "length_power": 1.0},
    "sigmoid, n^-0.5": {"attention_bias": 0.0, "length_power": 0.5},
}


def norm_recipe(setting: Setting) -> Recipe:
    """Return a small form of the 1B model.

    Raises:
        ExperimentError: at the paper's scale.
    """
    if setting.scale == "paper":
        raise ExperimentError(
            "norm-structure at the paper's scale trains six models of 1B parameters: run sigattn train lm-1b-2k --data "
            "REDPAJAMA with --model.norm-placement, --model.position and --model.attention-bias, then sigattn lm-eval"
        )
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=setting.scaled(32, 256, None))
    return sweep.shortened(recipe, setting.steps(4, 300), setting.scaled(2, 16, None))


def alibi_recipe(setting: Setting) -> Recipe:
    """Return the one-block model of Figs. 3-6, with ALiBi."""
    return one_block_recipe(setting, position="alibi", attention_bias="log_context")


NORM_STRUCTURE = make_experiment(
    "norm-structure",
    "Pre-norm and hybrid-norm in language models",
    'Table "lm_norm_ablations", App. G.3',
    Ablation(
        norm_recipe,
        NORMS,
        "bits",
        "held-out bits per byte",
        (
            Claim("Pre-norm sigmoid with ALiBi and -log n equals softmax at 2,048 tokens.", PRE, "same", SOFTMAX, 0.1),
            Claim("With RoPE and pre-norm, leaving out the bias makes sigmoid worse.", BARE, "higher", ROPE),
            Claim("Hybrid-norm in place of a bias reaches softmax.", HYBRID, "same", SOFTMAX, 0.1),
            Claim("Hybrid-norm without a bias equals pre-norm with one.", HYBRID, "same", PRE, 0.1),
        ),
        curves=True,
    ),
    {"smoke": 0.2, "small": 6.0, "paper": None},
    "64 GPUs of 80 GB",
    "2 layers of 64 instead of 1B parameters, 256 bytes, 300 steps; held-out bits instead of nine evaluations",
)
LENGTH_POWER = make_experiment(
    "length-power",
    "Output divided by n or √n, or a bias of -log n",
    'Figs. "no_scaling", "seq_len_scaling", "sqrt_scaling", App. G.1',
    Ablation(
        alibi_recipe,
        POWERS,
        "loss",
        "held-out loss, nats",
        (
            Claim("n^-1 is slightly worse than b = -log n.", "sigmoid, n^-1", "higher", "sigmoid, b = -log n"),
            Claim("n^-0.5 is slightly worse than b = -log n.", "sigmoid, n^-0.5", "higher", "sigmoid, b = -log n"),
            Claim("b = -log n equals softmax.", "sigmoid, b = -log n", "same", "softmax", 0.1),
        ),
        curves=True,
    ),
    {"smoke": 0.2, "small": 4.0, "paper": None},
    "1 GPU of 80 GB",
    "width 128 instead of 3072, 256 bytes instead of 4096 tokens, 300 steps instead of 65,536",
)
EXPERIMENTS = (NORM_STRUCTURE, LENGTH_POWER)
