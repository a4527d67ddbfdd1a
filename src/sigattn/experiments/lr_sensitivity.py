"""Sensitivity of the loss to the learning rate: LayerScale and QK-norm (Figs. 9, 10), and the bias (App. G.3).

    sigattn reproduce lr-sensitivity --scale small          (--scale paper: 1 GPU, κ to 16, data: C4's realnews)

LR sensitivity is the mean over the rates of min(loss, loss at initialisation) - the best rate's loss. Expected: QK-norm
lowers it for both mechanisms; LayerScale hardly changes it for sigmoid; it is lower with a bias between -10 and -4 than
with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting
from sigattn.experiments.report import COLOURS
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
BIASES = (-15.0, -10.0, -6.0, -4.0, -1.0)


def base(setting: Setting, kappa: int) -> Recipe:
    """Return the recipe with κ heads, 2κ layers and width 64κ, smaller below the paper's scale."""
    recipe = find_recipe(f"lm-kappa-{kappa}")
    if setting.scale == "paper":
        return recipe
    context, steps, batch = setting.scaled((32, 6, 4), (64, 150, 8), None)
    training = replace(
        recipe.training, max_steps=steps, batch_size=batch, precision="float32", warmup_steps=steps // 16,
        validate_every=steps, checkpoint_every=steps, log_attention_every=0,
    )  # fmt: skip
    return replace(recipe.with_transformer(vocab_size=256, max_seq_len=context), training=training)


def at_rates(recipe: Recipe, name: str, rates: Sequence[float]) -> dict[str, Recipe]:
    """Return a recipe at each learning rate."""
    return {f"{name}, {r:g}": replace(recipe, training=replace(recipe.training, learning_rate=r)) for r in rates}


def sensitivity(losses: Sequence[float], start: float) -> float:
    """Return LR sensitivity, the mean over learning rates η of min(ℓ(η), ℓ₀) - ℓ*, where ℓ₀ is ``start``."""
    capped = [min(loss, start) for loss in losses]
    return sum(capped) / len(capped) - min(capped)


def losses_of(outcomes: Sequence[sweep.Outcome]) -> list[float]:
    """Return held-out losses; infinity where training diverged."""
    return [float("inf") if o.diverged else o.final["loss"] for o in outcomes]


def measure(
    setting: Setting, variants: dict[str, Recipe]
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]], tuple[float, ...]]:
    """Return each variant's losses, by rate and seed, its sensitivity for each seed, and the rates."""
    rates = setting.scaled((1e-3, 1e-1), RATES, RATES)
    wanted = {k: v for name, recipe in variants.items() for k, v in at_rates(recipe, name, rates).items()}
    found = sweep.train_all(setting, sweep.make_jobs(wanted, setting))
    losses = {name: [losses_of(found[f"{name}, {r:g}"]) for r in rates] for name in variants}
    # the first loss of a variant and seed does not depend on the rate
    starts = {name: [o.rows[0]["loss"] for o in found[f"{name}, {rates[0]:g}"]] for name in variants}
    sensitive = {
        name: [sensitivity([at[s] for at in losses[name]], starts[name][s]) for s in range(setting.seeds)]
        for name in variants
    }
    return losses, sensitive, rates


def run(setting: Setting) -> Result:
    """Compare both mechanisms with and without QK-norm and LayerScale."""
    kappas = setting.scaled((1,), (1,), (1, 2, 4, 8, 16))
    changes: dict[str, dict[str, Any]] = {"both": {}, "no QK-norm": {"qk_norm": "none"}}
    changes["no LayerScale"] = {"init_values": None}
    variants = {}
    for kappa in kappas:
        for change, settings in changes.items():
            recipe = base(setting, kappa).with_transformer(**settings)
            for mechanism in ("softmax", "sigmoid"):
                named = recipe if mechanism == "sigmoid" else recipe.softmax()
                variants[f"{mechanism}, {change}, κ = {kappa}"] = named
    losses, sensitive, rates = measure(setting, variants)
    picture, axes = drawing.axes_grid(len(changes))
    for axis, change in zip(axes, changes, strict=True):
        for mechanism in ("softmax", "sigmoid"):
            values = [[min(x, 8.0) for x in at] for at in losses[f"{mechanism}, {change}, κ = {kappas[-1]}"]]
            drawing.plot_band(axis, rates, values, mechanism, drawing.COLOUR_OF[mechanism])
        axis.set(xscale="log", title=f"QK-norm and LayerScale: {change}", xlabel="learning rate")
    axes[0].set_ylabel(f"held-out loss, κ = {kappas[-1]}")
    axes[0].legend(frameon=False)
    rows = [
        (name, f"{min(min(at) for at in losses[name]):.4g}", intervals.mean_std(sensitive[name])) for name in variants
    ]
    last = kappas[-1]
    findings = [
        _lower(
            sensitive, f"{m}, no QK-norm, κ = {last}", f"{m}, both, κ = {last}", f"QK-norm lowers {m}'s sensitivity."
        )
        for m in ("softmax", "sigmoid")
    ]
    delta, margin = intervals.welch(
        sensitive[f"sigmoid, no LayerScale, κ = {last}"], sensitive[f"sigmoid, both, κ = {last}"]
    )
    findings.append(
        Finding(
            "LayerScale hardly changes sigmoid's sensitivity in language.",
            intervals.verdict_equal(delta, margin, 0.1),
            f"with - without {intervals.interval(delta, margin)} nats",
        )
    )
    data = [{"variant": n, "rates": list(rates), "losses": losses[n], "sensitivity": sensitive[n]} for n in variants]
    return Result(("variant", "best held-out loss", "sensitivity"), rows, findings, data, picture)


def _lower(sensitive: dict[str, list[float]], without: str, having: str, claim: str) -> Finding:
    delta, margin = intervals.welch(sensitive[without], sensitive[having])
    return Finding(
        claim,
        intervals.verdict_positive(-delta, margin),
        f"with - without {intervals.interval(delta, margin)} nats",
    )


def run_bias(setting: Setting) -> Result:
    """Compare constant biases of sigmoid attention."""
    kappa = setting.scaled(1, 1, 4)
    recipe = base(setting, kappa)
    losses, sensitive, rates = measure(
        setting,
        {
            f"b = {b:g}": recipe.with_transformer(attention_bias=b)
            for b in setting.scaled((-10.0, -1.0), BIASES, BIASES)
        },
    )
    picture, axes = drawing.axes_grid(1, width=6.0, height=4.0)
    colours = (*COLOURS, "#56b4e9")
    for (name, at), colour in zip(losses.items(), colours, strict=False):
        drawing.plot_band(axes[0], rates, [[min(x, 8.0) for x in v] for v in at], name, colour)
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="held-out loss")
    axes[0].legend(frameon=False)
    rows = [(n, f"{min(min(at) for at in losses[n]):.4g}", intervals.mean_std(sensitive[n])) for n in losses]
    findings = []
    best = {name: [min(at[s] for at in losses[name]) for s in range(setting.seeds)] for name in losses}
    delta, margin = intervals.welch(best["b = -1"], best["b = -10"])
    findings.append(
        Finding(
            "A bias of -10 reaches a lower loss than one of -1.",
            intervals.verdict_positive(-delta, margin),
            f"b = -10 less b = -1: {intervals.interval(delta, margin)} nats at the best rate of each",
        )
    )
    if "b = -15" in best:
        delta, margin = intervals.welch(best["b = -10"], best["b = -15"])
        findings.append(
            Finding(
                "A bias of -15 regularises too much.",
                intervals.verdict_positive(delta, margin),
                f"b = -15 less b = -10: {intervals.interval(delta, margin)} nats",
            )
        )
    data = [{"variant": n, "rates": list(rates), "losses": losses[n], "sensitivity": sensitive[n]} for n in losses]
    return Result(("bias", "best held-out loss", "sensitivity"), rows, findings, data, picture)


_DIFFERS = "κ = 1 only, 64 bytes instead of 512 tokens, batch 8, 150 steps instead of 16,384"
EXPERIMENT = Experiment(
    "lr-sensitivity",
    "Learning rates with and without QK-norm and LayerScale",
    'Figs. 9 and 10, Sect. "Ablations"',
    run,
    {"smoke": 0.3, "small": 6.0, "paper": None},
    "1 GPU",
    _DIFFERS,
)
BIAS = Experiment(
    "constant-bias",
    "Constant biases from -15 to -1",
    'App. "Attention Bias Ablation"',
    run_bias,
    {"smoke": 0.2, "small": 5.0, "paper": None},
    "1 GPU",
    _DIFFERS,
)
