"""Sensitivity of the loss to the learning rate: LayerScale and QK-norm (Figs. 8, 9), and the bias (App. G.1).

    python -m experiments lr-sensitivity --scale small          (--scale paper: 1 GPU, κ to 16, data: C4's realnews)

LR sensitivity is the mean over the rates of min(loss, loss at initialisation) - the best rate's loss. Expected: QK-norm
lowers it for both activations; LayerScale hardly changes it for sigmoid; loss and sensitivity decrease with the bias
from -1 to -10, and the loss is higher again at -15.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments import drawing, intervals, sweep
from experiments.experiment import LANGUAGE, Experiment, Finding, Result, Row, Scale, Setting, select
from sigattn.recipes import find_recipe
from sigattn.recipes.recipe import Recipe

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
BIASES = (-15.0, -10.0, -6.0, -4.0, -1.0)
TOLERANCE = 0.1  # nats
CHANGES: dict[str, dict[str, Any]] = {
    "both": {},
    "no QK-norm": {"qk_norm": "none"},
    "no LayerScale": {"init_values": None},
}


def base(setting: Setting, kappa: int) -> Recipe:
    """Return the recipe with κ heads, 2κ layers and width 64κ, smaller below the paper's scale."""
    recipe = find_recipe(f"lm-kappa-{kappa}")
    if setting.scale == "paper":
        return recipe
    context, batch_size = setting.scaled((32, 4), (64, 8), None)
    steps = setting.steps(3, 600)
    recipe = recipe.with_transformer(vocab_size=256, max_seq_len=context)
    return sweep.shortened(
        recipe, steps, batch_size, precision="float32", warmup_steps=steps // 16, log_attention_every=0
    )


def at_rates(recipe: Recipe, name: str, rates: Sequence[float]) -> dict[str, Recipe]:
    """Return a recipe at each learning rate."""
    return {f"{name}, {rate:g}": recipe.with_training(learning_rate=rate) for rate in rates}


def sensitivity(losses: Sequence[float], start: float) -> float:
    """Return LR sensitivity, the mean over learning rates η of min(ℓ(η), ℓ₀) - ℓ*, where ℓ₀ is ``start``."""
    capped = [min(loss, start) for loss in losses]
    return sum(capped) / len(capped) - min(capped)


def final_losses(outcomes: Sequence[sweep.Outcome]) -> list[float]:
    """Return held-out losses; infinity where training diverged."""
    return [float("inf") if o.diverged else o.final["loss"] for o in outcomes]


@dataclass(frozen=True)
class Sensitivities:
    """Losses of variants over learning rates.

    Attributes:
        rates: the learning rates. losses: each variant's held-out losses by rate and seed.
        sensitivity: each variant's LR sensitivity by seed.
    """

    rates: Sequence[float]
    losses: dict[str, list[list[float]]]
    sensitivity: dict[str, list[float]]

    def result(self, column: str, figure: Any) -> Result:
        """Return the result with one row per variant."""
        rows = [
            (name, f"{min(min(at) for at in losses):.4g}", intervals.mean_std(self.sensitivity[name]))
            for name, losses in self.losses.items()
        ]
        data = [
            {"variant": name, "rates": list(self.rates), "losses": losses, "sensitivity": self.sensitivity[name]}
            for name, losses in self.losses.items()
        ]
        return Result((column, "best held-out loss", "sensitivity"), rows, data, figure)

    def plot(self, axis: Any, variant: str, label: str, colour: Any) -> None:
        """Plot a variant's losses, at most 8, over the learning rates."""
        losses = [[min(x, 8.0) for x in at] for at in self.losses[variant]]
        drawing.plot_band(axis, self.rates, losses, label, colour)
        axis.set(xscale="log", xlabel="learning rate")


def measure_sensitivities(setting: Setting, variants: dict[str, Recipe]) -> Sensitivities:
    """Train every variant at every learning rate with each of its seeds."""
    setting.check_variants(variants)
    rates = setting.scaled((1e-3, 1e-1), RATES, RATES)
    at_all_rates = {k: v for name, recipe in variants.items() for k, v in at_rates(recipe, name, rates).items()}
    more = {run: n for name, n in setting.more_seeds.items() for run in at_rates(variants[name], name, rates)}
    outcomes = sweep.train_variants(replace(setting, more_seeds=more), at_all_rates, may_diverge=True)
    losses = {name: [final_losses(outcomes[f"{name}, {r:g}"]) for r in rates] for name in variants}
    # the first loss of a variant and seed does not depend on the rate
    starts = {name: [o.rows[0]["loss"] for o in outcomes[f"{name}, {rates[0]:g}"]] for name in variants}
    sensitivities = {
        name: [sensitivity([at[s] for at in losses[name]], start) for s, start in enumerate(starts[name])]
        for name in variants
    }
    for row in setting.stored.rows:
        name = row["variant"]
        losses[name] = [kept + new for kept, new in zip(row["losses"], losses[name], strict=True)]
        sensitivities[name] = row["sensitivity"] + sensitivities[name]
    return Sensitivities(rates, losses, sensitivities)


def count_seeds(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of seeds by run of the rows of data (``Experiment.count_seeds``)."""
    return {f"{row['variant']}, {rate:g}": len(row["sensitivity"]) for row in rows for rate in row["rates"]}


def compare_norms(setting: Setting) -> Result:
    """Compare both activations with and without QK-norm and LayerScale."""
    kappas = setting.scaled((1,), (1,), (1, 2, 4, 8, 16))
    variants = {}
    for kappa in kappas:
        for change, settings in CHANGES.items():
            recipe = base(setting, kappa).with_transformer(**settings)
            variants[f"softmax, {change}, κ = {kappa}"] = recipe.softmax()
            variants[f"sigmoid, {change}, κ = {kappa}"] = recipe
    found = measure_sensitivities(setting, variants)
    last = kappas[-1]
    figure, axes = drawing.axes_grid(len(CHANGES))
    for axis, change in zip(axes, CHANGES, strict=True):
        for activation in ("softmax", "sigmoid"):
            found.plot(axis, f"{activation}, {change}, κ = {last}", activation, drawing.COLOUR_OF[activation])
        axis.set_title("QK-norm and LayerScale" if change == "both" else change)
    axes[0].set_ylabel(f"held-out loss, κ = {last}")
    drawing.band_legend(axes[0])
    return found.result("variant", figure)


def judge_norms(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare sensitivities with and without each norm, for the largest κ.

    The paper's figures show sensitivities, and its text on LayerScale is about "performance": both are compared.
    """
    largest = max(int(row["variant"].rpartition(" = ")[2]) for row in data)
    data = [{**row, "best": [min(losses) for losses in zip(*row["losses"], strict=True)]} for row in data]

    def effect(activation: str, norm: str, measure: str = "sensitivity") -> intervals.Difference:
        (without,), (both,) = (
            select(data, measure, variant=f"{activation}, {change}, κ = {largest}") for change in (f"no {norm}", "both")
        )
        return intervals.welch(without, both)

    findings = []
    for activation in ("softmax", "sigmoid"):
        qk_norm = effect(activation, "QK-norm")
        claim = f"QK-norm lowers {activation}'s sensitivity."
        evidence = f"with - without {qk_norm} nats, tolerance {TOLERANCE:g}"
        findings.append(Finding(claim, (-qk_norm).verdict_positive(TOLERANCE), evidence))
    for measure, words in (("sensitivity", "sensitivity"), ("best", "loss at its best learning rate")):
        softmax, sigmoid = (effect(activation, "LayerScale", measure) for activation in ("softmax", "sigmoid"))
        claim = f"LayerScale hardly changes sigmoid's {words} in language."
        evidence = f"with - without {sigmoid} nats, tolerance {TOLERANCE:g}"
        findings.append(Finding(claim, sigmoid.verdict_equal(TOLERANCE), evidence))
        claim = f"LayerScale lowers softmax's {words} slightly in language."
        findings.append(Finding(claim, (-softmax).verdict_positive(), f"with - without {softmax} nats"))
    return findings


def compare_constant_biases(setting: Setting) -> Result:
    """Compare constant biases of sigmoid attention."""
    recipe = base(setting, setting.scaled(1, 1, 4))
    biases = setting.scaled((-10.0, -1.0), BIASES, BIASES)
    found = measure_sensitivities(setting, {f"b = {b:g}": recipe.with_transformer(attention_bias=b) for b in biases})
    figure, (axis,) = drawing.axes_grid(1, width=6.0, height=4.0)
    for name, colour in zip(found.losses, drawing.sigmoid_shades(len(found.losses)), strict=True):
        found.plot(axis, name, name, colour)
    axis.set_ylabel("held-out loss")
    drawing.band_legend(axis)
    return found.result("bias", figure)


def judge_constant_biases(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the losses averaged over the learning rates, and the sensitivities.

    The mean over the rates of min(loss, initial loss) is the sensitivity plus the best rate's loss.
    """
    sensitivities = {row["variant"]: row["sensitivity"] for row in data}
    means = {
        row["variant"]: [
            s + min(losses) for s, losses in zip(row["sensitivity"], zip(*row["losses"], strict=True), strict=True)
        ]
        for row in data
    }
    listed = ", ".join(f"{name}: {statistics.mean(values):.3g}" for name, values in means.items())
    loss, stability = (intervals.welch(v["b = -1"], v["b = -10"]) for v in (means, sensitivities))
    findings = [
        Finding(
            "A bias of -10 has a lower loss than one of -1, averaged over the learning rates.",
            (-loss).verdict_positive(TOLERANCE),
            f"b = -10 less b = -1: {loss} nats, tolerance {TOLERANCE:g}; means {listed}",
        ),
        Finding(
            "A bias of -10 is less sensitive to the learning rate than one of -1.",
            (-stability).verdict_positive(TOLERANCE),
            f"sensitivity, b = -10 less b = -1: {stability} nats, tolerance {TOLERANCE:g}",
        ),
    ]
    if "b = -15" in means:
        higher = intervals.welch(means["b = -10"], means["b = -15"])
        claim = "A bias of -15 regularises too much: its mean loss is higher than that of -10."
        evidence = f"b = -15 less b = -10: {higher} nats, tolerance {TOLERANCE:g}"
        findings.append(Finding(claim, higher.verdict_positive(TOLERANCE), evidence))
    return findings


_DIFFERS = "κ = 1 only, 64 bytes instead of 512 tokens, batch 8, 600 steps instead of 16,384"
EXPERIMENTS = (
    Experiment(
        "lr-sensitivity",
        "Learning rates with and without QK-norm and LayerScale",
        'Figs. 8 and 9, Sect. "Ablations"',
        compare_norms,
        judge_norms,
        {"smoke": 0.3, "small": 9.0, "paper": None},
        "1 GPU",
        _DIFFERS,
        takes=LANGUAGE,
        unequal_seeds=True,
        count_seeds=count_seeds,
    ),
    Experiment(
        "constant-bias",
        "Constant biases from -15 to -1",
        'App. "Attention Bias Ablation"',
        compare_constant_biases,
        judge_constant_biases,
        {"smoke": 0.2, "small": 8.0, "paper": None},
        "1 GPU",
        _DIFFERS,
        takes=LANGUAGE,
        unequal_seeds=True,
        count_seeds=count_seeds,
    ),
)
