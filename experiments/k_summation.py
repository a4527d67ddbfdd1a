"""Sum of k marked numbers, computed by an MLP or by one layer of softmax or sigmoid attention (App. G.5).

    python -m experiments k-summation --scale small             (--scale paper: a GPU, or some hours on a CPU)
    python -m experiments attention-evolution --scale small
    python -m experiments attention-maps --scale small

Expected: the loss grows with k, equally for both activations. Over training, the weights show a 2 × 2 structure of
blocks, because the two halves of the input differ in meaning. At the end, the weights of sigmoid attention are less
sparse than those of softmax, also in the upper left block, where numbers attend to numbers.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments import drawing, intervals, sweep, synthetic
from experiments.experiment import Experiment, Finding, Result, Row, Scale, Setting, count_seeds_by, select
from experiments.instrumentation import replaced_attention
from experiments.sequence_model import SequenceModel
from sigattn.models import saving
from sigattn.nn import functional
from sigattn.ops import reference
from sigattn.recipes.recipe import Recipe

ACTIVATIONS = ("softmax", "sigmoid")
MAP_COLOURS = {"softmax": "Oranges", "sigmoid": "Blues"}
QUANTILES = (0.5, 0.9, 0.99, 1.0)  # of the weights, of which the last is the largest
MAP_SAMPLES = 8
POINTS = 8  # of a training at which its weights are looked at
TOLERANCE = 0.5  # of log loss: losses vary over orders of magnitude
EVALUATIONS = 20  # of a training, of which the lowest loss counts


def base(setting: Setting, k: int, small_steps: int = 1600, **model: Any) -> Recipe:
    """Return the recipe; below the paper's scale with shorter sequences, which are learned in fewer steps.

    Args:
        small_steps: steps at scale "small". model: settings of the model.
    """
    recipe = synthetic.k_summation(k).with_transformer(**model)
    if setting.scale != "paper":
        recipe = recipe.with_transformer(seq_len=16)
    if setting.scale == "smoke":
        recipe = recipe.with_transformer(embed_dim=32)
        recipe = recipe.with_training(eval_batch_size=2048)  # one batch
    steps = setting.steps(POINTS, small_steps, recipe.training.max_steps)
    return sweep.shortened(recipe, steps, setting.scaled(8, 64, 256), warmup_steps=0)


def measure_loss_over_k(setting: Setting) -> Result:
    """Compare the losses of three architectures over k, each the lowest held-out one of a training.

    At Adam's constant learning rate a loss that has converged may jump within a few steps to that of an untrained
    model, with either activation, and takes thousands of steps to return. The last step's loss is then a matter of
    chance. The lowest is chosen on the samples that it is measured on, for all architectures alike.
    """
    # half of the n inputs are numbers: k = n / 2 would mark all of them, which is a simpler problem
    ks = setting.scaled((1, 2), (1, 2, 4), (1, 2, 4, 6, 8, 10, 12, 14, 16, 18))
    variants = {}
    for k in ks:
        variants[f"sigmoid, {k}"] = _often_evaluated(base(setting, k))
        variants[f"softmax, {k}"] = variants[f"sigmoid, {k}"].softmax()
        variants[f"mlp, {k}"] = _often_evaluated(base(setting, k, kind="mlp"))
    outcomes = sweep.train_variants(setting, variants)
    names = (*ACTIVATIONS, "mlp")
    losses = {name: [[lowest_loss(run) for run in outcomes[f"{name}, {k}"]] for k in ks] for name in names}
    last = {name: [[run.final["loss"] for run in outcomes[f"{name}, {k}"]] for k in ks] for name in names}
    figure, (axis,) = drawing.axes_grid(1, width=6.0, height=4.0)
    for name, values in losses.items():
        drawing.plot_band(axis, ks, values, name, drawing.COLOUR_OF[name])
    axis.set(yscale="log", xlabel="k, the number of terms", ylabel="lowest held-out squared error")
    axis.xaxis.get_major_locator().set_params(integer=True)
    drawing.band_legend(axis)
    rows = [(str(k), *(intervals.mean_std(losses[n][i]) for n in losses)) for i, k in enumerate(ks)]
    data = [{"model": n, "k": k, "losses": losses[n][i], "last": last[n][i]} for n in names for i, k in enumerate(ks)]
    return Result(("lowest held-out error, k", "softmax", "sigmoid", "MLP"), rows, data, figure)


def _often_evaluated(recipe: Recipe) -> Recipe:
    return recipe.with_training(validate_every=max(1, recipe.training.max_steps // EVALUATIONS))


def lowest_loss(run: sweep.Outcome) -> float:
    """Return the lowest held-out loss of a training."""
    return float(min(row["validation_loss"] for row in run.rows if "validation_loss" in row))


def judge_loss_over_k(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the losses at the smallest and largest k, and both activations at each k."""
    ks = list(dict.fromkeys(row["k"] for row in data))
    losses = {a: [select(data, "losses", model=a, k=k)[0] for k in ks] for a in ACTIVATIONS}
    logs = {a: [[math.log(x) for x in at_k] for at_k in losses[a]] for a in ACTIVATIONS}
    ratios = [intervals.welch(soft, sigm) for soft, sigm in zip(logs["softmax"], logs["sigmoid"], strict=True)]
    growth = intervals.welch(logs["sigmoid"][0], logs["sigmoid"][-1])
    # a model that always predicts 0 has an error of k
    untrained = [k for i, k in enumerate(ks) if statistics.mean(losses["sigmoid"][i] + losses["softmax"][i]) > k / 2]
    note = f"; neither has learned k = {', '.join(map(str, untrained))} (error above k / 2)" if untrained else ""
    return [
        Finding(
            "The loss grows with k.",
            "not shown" if untrained else growth.verdict_positive(TOLERANCE),
            f"log of sigmoid's loss, k = {ks[-1]} less k = {ks[0]}: {growth}, tolerance {TOLERANCE:g}{note}",
        ),
        Finding(
            "Sigmoid scales with k as softmax does.",
            "not shown" if untrained else intervals.verdict_all([r.verdict_equal(TOLERANCE) for r in ratios]),
            f"log(sigmoid's loss / softmax's) {', '.join(map(str, ratios))}, tolerance {TOLERANCE:g}{note}",
        ),
    ]


def measure_weights_over_training(setting: Setting) -> Result:
    """Measure quantiles, norm and Hoyer sparsity of one head's weights over training, on 40 samples, k = 1."""
    data = list(setting.stored.rows)
    for labels, model, error in _models_over_training(setting, range(POINTS + 1)):
        samples = _samples(model)
        report = model.attention_report(samples)[0]
        weights = attention_weights(model, samples)
        norm = torch.linalg.matrix_norm(weights)
        values = {"sparsity": report.hoyer_sparsity, "weights_norm": norm, "row_mass": report.row_mass_mean}
        measured = {name: value.mean().item() for name, value in values.items()}
        measured |= {f"quantile {q}": weights.flatten().quantile(q).item() for q in QUANTILES}
        data.append({**labels, **measured, **error})
    data.sort(key=lambda row: (ACTIVATIONS.index(row["activation"]), row["seed"], row["step"]))
    at = sorted({row["step"] for row in data})
    figure, axes = drawing.axes_grid(3, 2, height=3.0)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}  # curves are everywhere in the axes
    for axis, activation in zip(axes, ACTIVATIONS, strict=False):
        for q, shade in zip(QUANTILES, (0.3, 0.5, 0.7, 1.0), strict=True):
            over_steps = [select(data, f"quantile {q}", activation=activation, step=s) for s in at]
            label = "largest" if q == 1 else f"{q:.0%} quantile"
            drawing.plot_band(axis, at, over_steps, label, (drawing.COLOUR_OF[activation], shade))
        axis.set(xlabel="step", title=f"weights, {activation}", yscale="log")
        drawing.band_legend(axis, ncols=2, **below)
    axes = axes[len(ACTIVATIONS) :]
    titles = {"weights_norm": "‖P‖", "sparsity": "Hoyer sparsity", "row_mass": "Σ of a row"}
    for axis, (key, title) in zip(axes, titles.items(), strict=False):
        for activation in ACTIVATIONS:
            over_steps = [select(data, key, activation=activation, step=s) for s in at]
            drawing.plot_band(axis, at, over_steps, activation, drawing.COLOUR_OF[activation])
        axis.set(xlabel="step", title=title)
    drawing.band_legend(axes[0], ncols=2, **below)
    axes[-1].set_axis_off()
    sparsity = {a: [select(data, "sparsity", activation=a, step=s) for s in (0, at[-1])] for a in ACTIVATIONS}
    rows = [(a, *(intervals.mean_std(values) for values in sparsity[a])) for a in ACTIVATIONS]
    return Result(("", "sparsity, first", "sparsity, last"), rows, data, figure)


def judge_weights_over_training(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare both activations' weights at the end of training, and sigmoid's with those at half of it."""
    steps = sorted({row["step"] for row in data})
    half = min(steps, key=lambda step: abs(step - steps[-1] / 2))
    softmax, sigmoid = (select(data, "sparsity", activation=a, step=steps[-1]) for a in ACTIVATIONS)

    def over_second_half(key: str) -> intervals.Difference:
        return intervals.paired(*(select(data, key, activation="sigmoid", step=step) for step in (half, steps[-1])))

    # One large weight in each row of 16 keys is 6 % of them: the 99 % quantile is 1 for both and compares nothing.
    large = (select(data, "quantile 0.9", activation=a, step=steps[-1]) for a in ACTIVATIONS)
    return [
        _lower_finding(
            "At the end of training sigmoid attention has fewer weights of high magnitude.",
            "90% quantile of the weights, sigmoid - softmax",
            intervals.welch(*large),
            data,
        ),
        _lower_finding(
            "At the end of training sigmoid attention is less sparse than softmax.",
            "Hoyer sparsity, sigmoid - softmax",
            intervals.welch(softmax, sigmoid),
            data,
        ),
        _lower_finding(
            "In the second half of training sigmoid attention becomes less sparse.",
            f"Hoyer sparsity, step {steps[-1]} - step {half}",
            over_second_half("sparsity"),
            data,
        ),
        _lower_finding(
            "In the second half of training the norm of sigmoid's weights falls.",
            f"‖P‖, step {steps[-1]} - step {half}",
            over_second_half("weights_norm"),
            data,
        ),
    ]


def plot_weights_of_samples(setting: Setting) -> Result:
    """Plot attention weights of eight samples at four steps; compare the sparsity of the upper left block."""
    maps: dict[tuple[str, int], Tensor] = {}
    data, samples = [], setting.scaled(2, MAP_SAMPLES, MAP_SAMPLES)
    for labels, model, error in _models_over_training(setting, (0, POINTS // 4, POINTS // 2, POINTS)):
        weights = attention_weights(model, _samples(model))
        half = weights.shape[-1] // 2
        if labels["seed"] == 0:
            maps[labels["activation"], labels["step"]] = weights[:samples]
        blocks = {"upper_left": hoyer_sparsity(weights[:, :half, :half]), "whole": hoyer_sparsity(weights)}
        data.append({**labels, **blocks, **error})
    at = sorted({row["step"] for row in data})
    figure, axes = drawing.axes_grid(samples, 2 * len(at), width=1.1, height=1.05)
    for i, (step, (activation, colours)) in enumerate(itertools.product(at, MAP_COLOURS.items())):
        # clip the colour scale, because a few large weights would make all others of softmax invisible
        most = float(maps[activation, step].flatten().quantile(0.995))
        row = axes[i * samples : (i + 1) * samples]
        for axis, weights in zip(row, maps[activation, step], strict=True):
            axis.imshow(weights.tolist(), cmap=colours, vmin=0, vmax=most)
            axis.set(xticks=[], yticks=[])
            axis.grid(visible=False)
        row[0].set_ylabel(f"{activation}\nstep {step:,}\n0 to {most:.2g}", fontsize=9)
    figure.suptitle(
        f"Attention weights of {samples} samples, one a column: rows are queries, columns are keys.\nWhite is 0, and "
        "the darkest colour is the number at the left and more (the 99.5 % quantile of the row)",
        fontsize=10,
    )
    sparsity = {a: [select(data, "upper_left", activation=a, step=s) for s in at] for a in ACTIVATIONS}
    rows = [(a, *(intervals.mean_std(values) for values in sparsity[a])) for a in ACTIVATIONS]
    return Result(("sparsity, upper left", *(f"step {s}" for s in at)), rows, data, figure)


def judge_weights_of_samples(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the sparsity of the upper left blocks at the end of training."""
    last = max(row["step"] for row in data)
    values = (select(data, "upper_left", activation=a, step=last) for a in ACTIVATIONS)
    claim = "At the end, where numbers attend to numbers, sigmoid attention is less sparse than softmax."
    return [
        _lower_finding(
            claim, "Hoyer sparsity of the upper left block, sigmoid - softmax", intervals.welch(*values), data
        )
    ]


def attention_weights(model: SequenceModel, samples: Tensor) -> Tensor:  # (B, n, n)
    """Return the attention weights of the first head of the first layer."""
    found: list[Tensor] = []

    def attend(activation: Any, query: Tensor, key: Tensor, value: Tensor, pattern: functional.MaskSpec) -> Tensor:
        problem = functional.make_problem(query, key, value, pattern)
        found.append(reference.attention_weights(problem, activation)[:, 0])
        return functional.attend(activation, query, key, value, pattern)

    with replaced_attention(model, attend), torch.no_grad():
        model(samples)
    return found[0]


def hoyer_sparsity(weights: Tensor) -> float:
    """Return the Hoyer sparsity, the mean over rows p of (√n - ‖p‖₁ / ‖p‖₂) / (√n - 1)."""
    root = weights.shape[-1] ** 0.5
    ratio = weights.sum(-1) / weights.norm(dim=-1).clamp(min=1e-12)
    return ((root - ratio) / (root - 1)).mean().item()


def _samples(model: SequenceModel) -> Tensor:
    """Return 40 held-out samples of the model's length."""
    samples: Tensor = next(iter(synthetic.KSummationData(model.config.seq_len, held_out=40).validation(40)))[0]
    return samples


def _models_over_training(
    setting: Setting, points: Iterable[int]
) -> Iterator[tuple[dict[str, Any], SequenceModel, dict[str, float]]]:
    """Train models with one head, and yield each at some checkpoints, of which there are ``POINTS`` in a training.

    Args:
        points: numbers of checkpoints; 0 is the model before training.

    Yields:
        The row's activation, seed and step; the model; and {"error": squared error} if it has been trained.
    """
    recipe = base(setting, 1, 6400, num_heads=1)
    every = recipe.training.max_steps // POINTS
    recipe = recipe.with_training(
        max_steps=POINTS * every, checkpoint_every=every, keep_checkpoints=POINTS, validate_every=every
    )
    recipes = {"softmax": recipe.softmax(), "sigmoid": recipe}
    outcomes = sweep.train_variants(setting, recipes)
    found = [(activation, outcome) for activation in ACTIVATIONS for outcome in outcomes[activation]]
    for (activation, outcome), point in itertools.product(found, points):
        step = point * every
        labels = {"activation": activation, "seed": outcome.seed, "step": step}
        if step:
            yield labels, outcome.load_model(step), {"error": outcome.rows[step - 1]["validation_loss"]}
        else:
            torch.manual_seed(outcome.seed)
            model = saving.build(recipes[activation].model).eval()
            assert isinstance(model, SequenceModel)
            yield labels, model, {}


def _lower_finding(claim: str, quantity: str, difference: intervals.Difference, data: Sequence[Row]) -> Finding:
    """Return the finding that a difference is negative, undecided if the last models have not learned the problem."""
    last = max(row["step"] for row in data)
    errors = [row["error"] for row in data if row["step"] == last and "error" in row]  # older data does not have it
    learned = bool(errors) and statistics.mean(errors) <= 0.5  # a model that always predicts 0 has an error of 1
    error = f"{statistics.mean(errors):.2g}" if errors else "not stored"
    return Finding(
        claim,
        (-difference).verdict_positive() if learned else "not shown",
        f"{quantity}: {difference}; squared error {error}" + ("" if learned else ": the problem has not been learned"),
    )


_ONE_HEAD = "n = 16 instead of 40, batch 64, 6,400 steps"
EXPERIMENTS = (
    Experiment(
        "k-summation",
        "k-summation with an MLP, softmax and sigmoid attention",
        'Fig. "final_loss_k_summation", App. G.5',
        measure_loss_over_k,
        judge_loss_over_k,
        {"smoke": 0.2, "small": 6.0, "paper": None},
        "1 GPU",
        "n = 16 instead of 40, three values of k, batch 64, 1,600 steps",
    ),
    Experiment(
        "attention-evolution",
        "How attention weights change over training",
        'Figs. "attn_evolve", "attn_metric_evolve", App. G.5',
        measure_weights_over_training,
        judge_weights_over_training,
        {"smoke": 0.2, "small": 11.0, "paper": None},
        "1 GPU",
        _ONE_HEAD,
        count_seeds=count_seeds_by("activation"),
    ),
    Experiment(
        "attention-maps",
        "Attention weights of eight samples over training",
        'Fig. "attn_by_sample", App. G.5',
        plot_weights_of_samples,
        judge_weights_of_samples,
        {"smoke": 0.2, "small": 11.0, "paper": None},
        "1 GPU",
        _ONE_HEAD,
    ),
)
