"""Comparison of variants of one recipe, the form of many tables of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import matplotlib.figure

from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Finding, Result, Setting
from sigattn.recipes.recipe import Recipe

SOFTMAX_COLOURS = ("#d55e00", "#e69f00", "#999999")
COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#f0e442")


@dataclass(frozen=True)
class Claim:
    """Statement of the paper that compares two variants.

    Attributes:
        text: the statement in our words. name, baseline: names of the two variants.
        relation: the metric of ``name`` is the "same" as, "higher" or "lower" than that of ``baseline``.
        within: largest half width of the 95 % interval of the difference for which "same" can be confirmed.
    """

    text: str
    name: str
    relation: Literal["same", "higher", "lower"]
    baseline: str
    within: float = 0.0


@dataclass(frozen=True)
class Ablation:
    """Experiment that trains variants of one recipe; calling it runs the experiment.

    Attributes:
        base: returns the recipe at a scale. variants: changed fields of the blocks, by name of the variant.
        metric: metric of the task, at the end of training. label: the metric in words.
        claims: statements to check; one whose variants were not trained is skipped.
        smoke: the variants of the smallest scale; None for all.
        curves: if True, plot losses and attention norms over the steps, instead of the metric of each seed.
    """

    base: Callable[[Setting], Recipe]
    variants: dict[str, dict[str, Any]]
    metric: str
    label: str
    claims: Sequence[Claim]
    smoke: tuple[str, ...] | None = None
    curves: bool = False

    def __call__(self, setting: Setting) -> Result:
        """Train all variants and compare their metrics."""
        names = self.smoke if setting.scale == "smoke" and self.smoke else tuple(self.variants)
        recipe = self.base(setting)
        wanted = {name: recipe.with_transformer(**self.variants[name]) for name in names}
        found = sweep.train_all(setting, sweep.make_jobs(wanted, setting))
        values = {name: [o.final[self.metric] for o in found[name]] for name in names}
        findings = [
            evaluate_claim(claim, values) for claim in self.claims if {claim.name, claim.baseline} <= set(names)
        ]
        picture = plot_training(found) if self.curves else plot_seeds(values, self.label)
        rows = [(name, intervals.mean_std(values[name])) for name in names]
        data = [{"variant": name, self.metric: values[name]} for name in names]
        return Result(("variant", self.label), rows, findings, data, picture)


def evaluate_claim(claim: Claim, values: dict[str, list[float]]) -> Finding:
    """Return the finding for a claim, given the metrics of each variant's seeds."""
    delta, margin = intervals.welch(values[claim.baseline], values[claim.name])
    seen = f"({claim.name}) less ({claim.baseline}): {intervals.interval(delta, margin)}"
    if claim.relation == "same":
        return Finding(claim.text, intervals.verdict_equal(delta, margin, claim.within), seen)
    if claim.relation == "lower":
        delta = -delta
    return Finding(claim.text, intervals.verdict_positive(delta, margin), seen)


def variant_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each variant; those of softmax are shades of orange and grey."""
    softmax, other = iter(SOFTMAX_COLOURS), iter(COLOURS)
    return {name: next(softmax if "softmax" in name else other) for name in names}


def plot_seeds(values: dict[str, list[float]], label: str) -> matplotlib.figure.Figure:
    """Plot the value of each seed as a dot, and their mean as a bar."""
    picture, (axis,) = drawing.axes_grid(1, width=7.0, height=1.0 + 0.25 * len(values))
    for i, (name, found) in enumerate(values.items()):
        kind = next((k for k in ("softmax", "sigmoid") if k in name), "mlp")
        axis.plot(found, [i] * len(found), "o", ms=4, color=drawing.COLOUR_OF[kind], alpha=0.6)
        axis.plot([statistics.mean(found)], [i], "|", ms=14, color=drawing.COLOUR_OF[kind])
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_xlabel(f"{label}: each seed, and the mean")
    return picture


def plot_training(found: dict[str, list[sweep.Outcome]]) -> matplotlib.figure.Figure:
    """Plot losses and attention norms over the steps."""
    picture, axes = drawing.axes_grid(2, width=5.4, height=4.0)
    for name, colour in variant_colours(found).items():
        drawing.plot_curves(axes[0], [[r["loss"] for r in o.rows] for o in found[name]], name, colour)
        norms = [[r["attention_norm"] for r in o.rows] for o in found[name]]
        drawing.plot_curves(axes[1], norms, name, colour, window=1)
    axes[0].set(xlabel="step", ylabel="training loss, nats")
    axes[1].set(xlabel="step", ylabel="‖P V‖", yscale="log")
    axes[0].legend(frameon=False, fontsize=8)
    return picture


def shortened(recipe: Recipe, steps: int, batch: int) -> Recipe:
    """Return the recipe with ``steps`` updates, validated at the last one."""
    training = replace(
        recipe.training, max_steps=steps, batch_size=batch, warmup_steps=steps // 10, validate_every=steps,
        checkpoint_every=steps,
    )  # fmt: skip
    return replace(recipe, training=training)
