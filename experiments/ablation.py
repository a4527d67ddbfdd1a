"""Comparison of variants of one recipe, the form of many tables of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments import drawing, intervals, sweep
from experiments.experiment import TRAINING, Experiment, Finding, Option, Result, Row, Scale, Setting
from experiments.run_file import Trainings, write_run_file
from sigattn.recipes.recipe import Recipe
from sigattn.train import metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPIKES = "gradient_spikes"
MEASUREMENTS = {"attention_norm": "‖P V‖", "gradient_norm": "gradient norm"}


@dataclass(frozen=True)
class Claim:
    """Statement of the paper that compares two variants.

    Attributes:
        text: the statement in our words. name, baseline: names of the two variants.
        relation: the metric of ``name`` is the "same" as, "higher" or "lower" than that of ``baseline``.
        tolerance: for "same", the largest difference that does not matter; for the others, the smallest that would
            (``Difference``); None for that of the ablation. metric: ``SPIKES``, or "" for the metric of the ablation.
    """

    text: str
    name: str
    relation: Literal["same", "higher", "lower"]
    baseline: str
    tolerance: float | None = None
    metric: str = ""


@dataclass(frozen=True)
class Ablation:
    """Experiment that trains variants of one recipe; calling it runs the experiment.

    Attributes:
        base: returns the recipe at a scale. variants: changed fields of the blocks, by name of the variant.
        metric: metric of the task, at the end of training. label: the metric in words.
        claims: statements to check; one whose variants were not trained is skipped.
        tolerance: tolerance of the claims. relative: tolerances, except those of ``SPIKES``, are parts of the
            baseline's mean.
        smoke: the variants of the smallest scale; None for all.
        curves: plot losses and this measurement over the steps; "" to plot the metric of each seed.
        learned: True for a mean of the metric that only a variant that has learned the task has. A claim about another
            is not shown: its metric says that these settings or steps are not enough for it, and not how good it is.
        paper: for experiments that cannot run at the paper's scale, the recipe of all variants (or the trainings), the
            name of the data and the command that evaluates a run; a run file is written instead (``write_run_file``).
    """

    base: Callable[[Setting], Recipe]
    variants: dict[str, dict[str, Any]]
    metric: str
    label: str
    claims: Sequence[Claim]
    tolerance: float = 0.0
    relative: bool = False
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
            _, data_name, then = self.paper
            raise write_run_file(setting, self.trainings, data_name, then)
        recipe = self.base(setting)
        names = self.smoke if setting.scale == "smoke" and self.smoke else tuple(self.variants)
        recipes = {name: recipe.with_transformer(**self.variants[name]) for name in names}
        outcomes = sweep.train_variants(setting, recipes)
        data = self.measure(setting, recipe, outcomes)
        if not self.curves:
            figure: Figure | None = self.plot(data)
        else:  # stored seeds have no curves
            figure = None if setting.stored.rows else plot_training(outcomes, self.curves)
        columns, rows = self.table(data)
        return Result(columns, rows, data, figure)

    @property
    def trainings(self) -> Trainings:
        """Trainings at the paper's scale, empty if the experiment itself runs there."""
        trainings = self.paper[0] if self.paper else {}
        return {name: (trainings, c) for name, c in self.variants.items()} if isinstance(trainings, str) else trainings

    def measure(self, setting: Setting, _: Recipe, outcomes: dict[str, list[sweep.Outcome]]) -> list[Row]:
        """Return the rows of data, one for each variant, with the numbers of all seeds."""
        rows: list[Row] = []
        for name, of_variant in outcomes.items():
            new = {
                self.metric: [o.final[self.metric] for o in of_variant],
                SPIKES: [count_spikes(o) for o in of_variant],
            }
            stored: Row = next((row for row in setting.stored.rows if row["variant"] == name), {})
            rows.append({"variant": name, **{key: [*stored.get(key, ()), *numbers] for key, numbers in new.items()}})
        return rows

    def values(self, data: Sequence[Row], metric: str) -> dict[str, list[float]]:
        """Return the values of a metric by variant."""
        return {row["variant"]: row[metric or self.metric] for row in data if (metric or self.metric) in row}

    def table(self, data: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the columns and rows of the table."""
        return ("variant", self.label), [(n, intervals.mean_std(v)) for n, v in self.values(data, "").items()]

    def plot(self, data: Sequence[Row]) -> Figure:
        """Plot the metric of each seed."""
        values = self.values(data, "")
        figure, (axis,) = drawing.axes_grid(1, width=7.0, height=1.0 + 0.25 * len(values))
        drawing.plot_seeds(axis, values)
        axis.set_xlabel(f"{self.label}: each seed, and the mean")
        return figure

    def count_seeds(self, rows: Sequence[Row]) -> dict[str, int]:
        """Return the number of seeds by variant."""
        return {name: len(values) for name, values in self.values(rows, SPIKES).items()}

    def judge(self, data: Sequence[Row], _: Scale) -> list[Finding]:
        """Return the findings of the claims whose variants were trained."""
        judged = ((claim, self.values(data, claim.metric)) for claim in self.claims)
        return [self._judge(claim, values) for claim, values in judged if {claim.name, claim.baseline} <= values.keys()]

    def _judge(self, claim: Claim, values: dict[str, list[float]]) -> Finding:
        difference = intervals.welch(values[claim.baseline], values[claim.name])
        tolerance = self.tolerance if claim.tolerance is None else claim.tolerance
        if self.relative and claim.metric != SPIKES:
            tolerance *= statistics.mean(values[claim.baseline])
        if claim.relation == "same":
            verdict = difference.verdict_equal(tolerance)
        else:
            verdict = (difference if claim.relation == "higher" else -difference).verdict_positive(tolerance)
        evidence = f"({claim.name}) less ({claim.baseline}): {difference}"
        evidence += f", tolerance {tolerance:.3g}" if tolerance else ""
        both = (claim.name, claim.baseline) if claim.metric != SPIKES else ()
        if failed := [name for name in both if not self.learned(statistics.mean(values[name]))]:
            verdict, evidence = "not shown", f"{evidence}; not learned: {', '.join(failed)}"
        return Finding(claim.text, verdict, evidence)

    def experiment(
        self,
        name: str,
        title: str,
        source: str,
        small_minutes: float,
        hardware: str,
        differs: str,
        takes: tuple[Option, ...] = TRAINING,
    ) -> Experiment:
        """Return the ablation as an ``Experiment``."""
        minutes: dict[Scale, float | None] = {"smoke": 0.2, "small": small_minutes, "paper": None}
        return Experiment(
            name,
            title,
            source,
            self,
            self.judge,
            minutes,
            hardware,
            differs,
            takes,
            unequal_seeds=True,
            count_seeds=self.count_seeds,
        )


def count_spikes(outcome: sweep.Outcome) -> float:
    """Return the number of spikes of a run's gradient norm."""
    return float(metrics.count_spikes([row["gradient_norm"] for row in outcome.rows], 3.0))


def plot_training(outcomes: dict[str, list[sweep.Outcome]], measurement: str) -> Figure:
    """Plot losses and a measurement over the steps."""
    figure, axes = drawing.axes_grid(2, width=5.4, height=4.0)
    for name, style in drawing.variant_styles(outcomes).items():
        runs = [o.rows for o in outcomes[name]]
        drawing.plot_metric(axes[0], runs, "loss", name, **style, window=10)
        drawing.plot_metric(axes[1], runs, measurement, name, **style)
    axes[0].set(xlabel="step", ylabel="training loss, nats")
    axes[1].set(xlabel="step", ylabel=MEASUREMENTS[measurement], yscale="log")
    drawing.band_legend(figure, handles=axes[0].get_lines(), loc="outside lower center", ncols=2)
    return figure
