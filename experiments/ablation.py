"""Comparison of variants of one recipe, the form of many tables of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments import intervals, sweep
from experiments.experiment import TRAINING, Experiment, Finding, Option, Result, Row, Scale, Setting
from experiments.run_file import Trainings, write_run_file
from sigattn.demo import drawing
from sigattn.recipes.recipe import Recipe
from sigattn.train import metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Claim:
    """Statement of the paper that compares two variants.

    Attributes:
        text: the statement in our words. name, baseline: names of the two variants.
        relation: the metric of ``name`` is the "same" as, "higher" or "lower" than that of ``baseline``.
        tolerance: for "same", the largest difference that does not matter; for the others, the smallest that would
            (``Difference``). metric: "gradient_spikes", or "" for the metric of the ablation.
        relative: the tolerance as a part of the baseline's mean, if ``tolerance`` is 0.
    """

    text: str
    name: str
    relation: Literal["same", "higher", "lower"]
    baseline: str
    tolerance: float = 0.0
    metric: str = ""
    relative: float = 0.0


@dataclass(frozen=True)
class Ablation:
    """Experiment that trains variants of one recipe; calling it runs the experiment.

    Attributes:
        base: returns the recipe at a scale. variants: changed fields of the blocks, by name of the variant.
        metric: metric of the task, at the end of training. label: the metric in words.
        claims: statements to check; one whose variants were not trained is skipped.
        smoke: the variants of the smallest scale; None for all.
        curves: plot losses and this measurement over the steps; "" to plot the metric of each seed.
        learned: True for a metric that only a model that has learned the task has (``check_claims``).
        paper: for experiments that cannot run at the paper's scale, the recipe of all variants (or the trainings), the
            name of the data and the command that evaluates a run; a run file is written instead (``write_run_file``).
    """

    base: Callable[[Setting], Recipe]
    variants: dict[str, dict[str, Any]]
    metric: str
    label: str
    claims: Sequence[Claim]
    smoke: tuple[str, ...] | None = None
    curves: str = ""
    learned: Callable[[float], bool] = lambda _: True
    paper: tuple[str | Trainings, str, str] | None = None

    def __call__(self, setting: Setting) -> Result:
        """Train all variants and compare their metrics.

        Raises:
            ExperimentError: at the paper's scale, if there is a run file for it.
        """
        if setting.scale == "paper" and self.paper is not None:
            trainings, data, then = self.paper
            if isinstance(trainings, str):
                trainings = {name: (trainings, changes) for name, changes in self.variants.items()}
            raise write_run_file(setting, trainings, data, then)
        outcomes = train_changes(setting, self.base(setting), self.variants, self.smoke)
        rows: list[Row] = []
        for name, found in outcomes.items():
            new = {self.metric: [o.final[self.metric] for o in found], "gradient_spikes": _spikes(found)}
            stored: Row = next((row for row in setting.stored.rows if row["variant"] == name), {})
            rows.append({"variant": name, **{key: [*stored.get(key, ()), *numbers] for key, numbers in new.items()}})
        values: dict[str, list[float]] = {row["variant"]: row[self.metric] for row in rows}
        if not self.curves:
            figure: Figure | None = _plot_metric_of_seeds(values, self.label)
        else:  # stored seeds have no curves
            figure = None if setting.stored.rows else plot_training(outcomes, self.curves)
        return Result(
            ("variant", self.label), [(name, intervals.mean_std(values[name])) for name in values], rows, figure
        )

    def judge(self, data: Sequence[Row], _: Scale) -> list[Finding]:
        """Return the findings of the claims whose variants were trained."""
        return [
            finding
            for claim in self.claims
            for finding in check_claims(
                [claim],
                {row["variant"]: row[claim.metric or self.metric] for row in data if claim.metric in ("", *row)},
                *(() if claim.metric else (self.learned,)),
            )
        ]


def _spikes(outcomes: Sequence[sweep.Outcome]) -> list[float]:
    """Return the number of spikes of each run's gradient norm."""
    return [float(metrics.count_spikes([row["gradient_norm"] for row in o.rows], 3.0)) for o in outcomes]


def make_experiment(
    name: str,
    title: str,
    source: str,
    study: Ablation,
    minutes: dict[Scale, float | None],
    hardware: str,
    differs: str,
    takes: tuple[Option, ...] = TRAINING,
) -> Experiment:
    """Return the experiment that runs an ablation and judges its claims (``Experiment``)."""
    return Experiment(
        name,
        title,
        source,
        study,
        study.judge,
        minutes,
        hardware,
        differs,
        takes,
        unequal_seeds=True,
        count_seeds=_count_seeds,
    )


def _count_seeds(rows: Sequence[Row]) -> dict[str, int]:
    return {row["variant"]: len(row["gradient_spikes"]) for row in rows}


def train_changes(
    setting: Setting, recipe: Recipe, variants: dict[str, dict[str, Any]], smoke: Sequence[str] | None
) -> dict[str, list[sweep.Outcome]]:
    """Train a recipe with changed fields of its blocks; at scale "smoke", the variants named in ``smoke`` only."""
    names = smoke if setting.scale == "smoke" and smoke else tuple(variants)
    return sweep.train_variants(setting, {name: recipe.with_transformer(**variants[name]) for name in names})


def check_claims(
    claims: Sequence[Claim], values: dict[str, list[float]], learned: Callable[[float], bool] = lambda _: True
) -> list[Finding]:
    """Return the findings for the claims about variants in ``values``, the metrics of each variant's seeds.

    A claim about a variant that has not learned the task is not shown: its metric says that these settings or steps are
    not enough for it, and not how good it is.

    Args:
        learned: True for a mean that only a variant that has learned the task has.
    """
    findings = []
    for claim in claims:
        if not {claim.name, claim.baseline} <= set(values):
            continue
        difference = intervals.welch(values[claim.baseline], values[claim.name])
        tolerance = claim.tolerance or claim.relative * statistics.mean(values[claim.baseline])
        if claim.relation == "same":
            verdict = difference.verdict_equal(tolerance)
        else:
            verdict = (difference if claim.relation == "higher" else -difference).verdict_positive(tolerance)
        evidence = f"({claim.name}) less ({claim.baseline}): {difference}"
        evidence += f", tolerance {tolerance:.3g}" if tolerance else ""
        if failed := [n for n in (claim.name, claim.baseline) if not learned(statistics.mean(values[n]))]:
            verdict, evidence = "not shown", f"{evidence}; not learned: {', '.join(failed)}"
        findings.append(Finding(claim.text, verdict, evidence))
    return findings


def _plot_metric_of_seeds(values: dict[str, list[float]], label: str) -> Figure:
    figure, (axis,) = drawing.axes_grid(1, width=7.0, height=1.0 + 0.25 * len(values))
    drawing.plot_seeds(axis, values)
    axis.set_xlabel(f"{label}: each seed, and the mean")
    return figure


MEASUREMENTS = {"attention_norm": "‖P V‖", "gradient_norm": "gradient norm"}


def plot_training(outcomes: dict[str, list[sweep.Outcome]], measurement: str) -> Figure:
    """Plot losses and a measurement over the steps."""
    figure, axes = drawing.axes_grid(2, width=5.4, height=4.0)
    for name, style in drawing.variant_styles(outcomes).items():
        runs = [o.rows for o in outcomes[name]]
        drawing.plot_metric(axes[0], runs, "loss", name, **style, window=10)
        drawing.plot_metric(axes[1], runs, measurement, name, **style)
    axes[0].set(xlabel="step", ylabel="training loss, nats")
    axes[1].set(xlabel="step", ylabel=MEASUREMENTS[measurement], yscale="log")
    drawing.band_legend(axes[0])
    return figure
