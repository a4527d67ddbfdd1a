"""Positional encodings with sigmoid attention: SinCos, RoPE, ALiBi, and RoPE with a bias (Figs. 3-6, "Ablations").

    python -m experiments position-ablation --scale small       (--scale paper: 1 GPU of 80 GB, data: C4's realnews)

One block is trained as a language model, with sigmoid without a bias and with softmax. Expected: with SinCos and RoPE
the output of sigmoid attention is initially far larger than that of softmax and the loss higher; with ALiBi or a bias
it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import drawing, intervals, sweep
from experiments.experiment import LANGUAGE, Experiment, Finding, Result, Row, Scale, Setting, select
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe

POSITIONS: dict[str, dict[str, Any]] = {
    "SinCos": {"position": "sincos", "attention_bias": 0.0},
    "RoPE": {"position": "rope", "attention_bias": 0.0},
    "ALiBi": {"position": "alibi", "attention_bias": 0.0},
    "RoPE, b": {"position": "rope"},
}
CONTEXT = 1024  # bytes of a sequence at the small scale
TOLERANCE = 0.1  # nats


def one_block_recipe(setting: Setting, context: int, **model: Any) -> Recipe:
    """Return the recipe of the one-block model with changed fields, smaller below the paper's scale.

    Args:
        context: bytes of a sequence at the small scale. A step has 1,024 bytes.
    """
    recipe = find_recipe("lm-realnews").with_transformer(**model)
    if setting.scale == "paper":
        return recipe
    context, batch_size = setting.scaled((32, 4), (context, 1024 // context), None)
    recipe = recipe.with_transformer(vocab_size=256, max_seq_len=context, embed_dim=128, num_heads=4, mlp_dim=512)
    rates = {"learning_rate": 2e-3, "final_learning_rate": 0.05}
    return sweep.shortened(recipe, setting.steps(3, 1200), batch_size, precision="float32", **rates)


def variants(setting: Setting) -> dict[str, Recipe]:
    """Return recipes of sigmoid with each position and bias, and of softmax with each position."""
    recipes = {}
    for name, settings in POSITIONS.items():
        # the paper's b = -10 is somewhat below -log n = -8.3 of its 4096 tokens; scaled here to the shorter contexts
        bias = settings.get("attention_bias", setting.scaled(-4.0, -8.5, -10.0))
        recipes[f"sigmoid, {name}"] = one_block_recipe(setting, CONTEXT, **{**settings, "attention_bias": bias})
        if name != "RoPE, b":
            recipes[f"softmax, {name}"] = one_block_recipe(setting, CONTEXT, position=settings["position"]).softmax()
    return recipes


def compare_positions(setting: Setting) -> Result:
    """Train all variants and compare their losses and attention norms."""
    recipes = variants(setting)
    outcomes = sweep.train_variants(setting, recipes)
    figure, axes = drawing.axes_grid(2, len(POSITIONS), height=2.6)
    rows, data = [], []
    for i, name in enumerate(POSITIONS):
        loss_axis, norm_axis = axes[2 * i : 2 * i + 2]
        finals = {}
        for activation, variant in (("softmax", name.partition(",")[0]), ("sigmoid", name)):
            found, colour = outcomes[f"{activation}, {variant}"], drawing.COLOUR_OF[activation]
            drawing.plot_metric(loss_axis, [o.rows for o in found], "loss", activation, colour, window=10)
            drawing.plot_metric(norm_axis, [o.rows for o in found], "attention_norm", activation, colour)
            first, last = ([o.rows[at]["attention_norm"] for o in found] for at in (0, -1))
            finals[activation] = [o.mean_of_last() for o in found]
            rows.append((name, activation, *(intervals.mean_std(v) for v in (finals[activation], first, last))))
            data += [
                {"position": name, "activation": activation, "seed": s, "loss": loss, "first_norm": a, "last_norm": b}
                for s, (loss, a, b) in enumerate(zip(finals[activation], first, last, strict=True))
            ]
        bias = recipes[f"sigmoid, {name}"].transformer.attention_bias
        loss_axis.set_title(f"{name.partition(',')[0]}, b = {bias:g}")
        norm_axis.set(yscale="log", xlabel="step")
    axes[0].set_ylabel("training loss, nats")
    axes[1].set_ylabel("‖P V‖")
    drawing.band_legend(axes[0])
    return Result(("position", "", "final training loss", "norm, first", "norm, last"), rows, data, figure)


def judge_positions(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the training losses of sigmoid and softmax with each position."""
    findings = []
    for name in POSITIONS:
        losses = (select(data, "loss", position=name, activation=a) for a in ("softmax", "sigmoid"))
        difference = intervals.welch(*losses)
        evidence = f"sigmoid - softmax {difference} nats, tolerance {TOLERANCE:g}"
        if name in ("SinCos", "RoPE"):
            claim = f"With {name} and no bias, sigmoid falls behind softmax."
            verdict = difference.verdict_positive(TOLERANCE)
        else:
            position = name if name == "ALiBi" else "RoPE and a negative bias"
            claim, verdict = f"With {position}, sigmoid equals softmax.", difference.verdict_equal(TOLERANCE)
        findings.append(Finding(claim, verdict, evidence))
    return findings


EXPERIMENTS = (
    Experiment(
        "position-ablation",
        "Positions and the bias in a one-block language model",
        'Figs. 3-6, Sect. "Ablations"',
        compare_positions,
        judge_positions,
        {"smoke": 0.2, "small": 12.0, "paper": None},
        "1 GPU of 80 GB",
        "width 128 instead of 3072, 1,024 bytes instead of 4096 tokens, 1,200 steps instead of 65,536, b = -8.5 "
        "instead of -10",
        LANGUAGE,
        unequal_seeds=True,
    ),
)
