"""Beyond the paper: conversion of trained softmax models to sigmoid attention (``sigattn.convert``).

    python -m experiments conversion --data tinyshakespeare.txt

Models are trained with softmax: a language model of bytes with RoPE and QK-norm; a Llama of transformers, by its
Trainer; a ViT on handwritten digits; a speech model on spoken digits. Each is then trained further, by up to 30 % of
its steps, with a warm-up and a decay for each number of steps: with softmax, and from two starts with sigmoid
attention: the paper's with b = -log n, and the one of ``convert``, whose bias is fitted and whose weights sum to one.

Expected: with b = -log n the converted model starts with a ruined loss; with the fit it is softmax's.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import cache, drawing, intervals, sweep
from experiments import conversion_models as models
from experiments.experiment import TRAINING, Experiment, Finding, Result, Row, Scale, Setting, select
from experiments.instrumentation import replaced_attention
from sigattn.conversion import ConversionReport, convert
from sigattn.data.dataset import Data
from sigattn.nn import functional
from sigattn.nn.attention import Attention
from sigattn.ops import reference
from sigattn.optional import require
from sigattn.recipes import datasets
from sigattn.recipes.recipe import Recipe

SOFTMAX, LENGTH, FITTED = "softmax", "sigmoid, -log n", "sigmoid, fitted and normalized"
STARTS = (SOFTMAX, LENGTH, FITTED)
FRACTIONS = (0.0, 0.01, 0.03, 0.1, 0.3)  # of the steps of the softmax model
BATCHES = 8  # of a conversion
MAP = 48  # positions in the maps of the attention


def train_and_convert(recipe: Recipe, data_path: Path | None) -> dict[str, Any]:
    """Train a softmax model; return the held-out losses of every start by step, and measurements of the conversion."""
    data = datasets.load_dataset(recipe, data_path)
    torch.manual_seed(recipe.training.seed)
    model = models.build(recipe)
    steps, rate = recipe.training.max_steps, recipe.training.learning_rate
    _train(model, recipe, data, range(steps), functools.partial(_one_cycle, rate, steps))
    starts = {SOFTMAX: model, LENGTH: models.with_log_n(model), FITTED: copy.deepcopy(model)}
    batches = [_batch(recipe, data, -1 - i) for i in range(BATCHES)]
    report = convert(starts[FITTED], batches, loss=recipe.task.loss)
    maps = [_attention_map(starts[kind], batches[0]) for kind in (SOFTMAX, FITTED)]
    losses: dict[str, list[tuple[int, float]]] = {}
    for name, start in starts.items():
        losses[name] = [(0, _evaluate(start, recipe, data))]
        for fraction in FRACTIONS[1:]:
            count = max(1, round(fraction * steps))
            further = copy.deepcopy(start)
            rate_of = functools.partial(_one_cycle, rate / 4, count, first=steps)
            _train(further, recipe, data, range(steps, steps + count), rate_of)
            losses[name].append((count, _evaluate(further, recipe, data)))
    return {"losses": losses, "layers": _layers(report), "maps": maps}


def _train(model: nn.Module, recipe: Recipe, data: Data, steps: range, rate_of: Callable[[int], float]) -> None:
    """Train a model by AdamW, the Llama by Trainer."""
    training = recipe.training
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas)

    def loss_of(batch: Any) -> Tensor:
        return recipe.task.loss(model, batch)

    model.train()
    batches = (_batch(recipe, data, step) for step in steps)
    engine = models.train_by_trainer if isinstance(model, models.TransformersModel) else _loop
    engine(model, loss_of, batches, optimizer, [rate_of(step) for step in steps])
    model.eval()


def _loop(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    rates: list[float],
) -> None:
    """Train a model with clipped gradients; arguments as of ``train_by_trainer``."""
    for batch, rate in zip(batches, rates, strict=True):
        optimizer.zero_grad()
        loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def _one_cycle(rate: float, steps: int, step: int, first: int = 0) -> float:
    """Return the learning rate: a warm-up over a tenth of the steps from ``first`` on, a linear decay to a tenth."""
    warmup, step = max(1, steps // 10), step - first
    return rate * min((step + 1) / warmup, 0.1 + 0.9 * (steps - step) / max(1, steps - warmup))


def _batch(recipe: Recipe, data: Data, step: int) -> Any:
    """Return the training batch of a step; negative steps are other batches than those of the training."""
    step = step if step >= 0 else 10 * recipe.training.max_steps - step
    return data.batch(step, recipe.training.batch_size, recipe.training.seed)


def _inputs(batch: Any) -> tuple[Tensor, ...]:
    return tuple(batch[:2]) if len(batch) == 4 else tuple(batch[:1])  # speech: frames and lengths


@torch.no_grad()
def _evaluate(model: nn.Module, recipe: Recipe, data: Data) -> float:
    model.eval()
    return recipe.task.evaluate(model, data.validation(recipe.training.eval_batch_size))["loss"]


def _layers(report: ConversionReport) -> list[dict[str, Any]]:
    return [{"r2": [head.r2 for head in layer.heads], "error": layer.error} for layer in report.layers]


@torch.no_grad()
def _attention_map(model: nn.Module, batch: Any) -> list[list[float]]:
    """Return the weights of the first sample and head in this library's last layer."""
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    if not layers:  # of another library
        return []
    layer = layers[-1]
    weights: list[Tensor] = []

    def record(activation: Any, query: Tensor, key: Tensor, value: Tensor, spec: Any) -> Tensor:
        out = functional.attend(activation, query, key, value, spec)
        weights.append(reference.attention_weights(functional.make_problem(query, key, value, spec), activation))
        return out

    with replaced_attention(layer, record):
        model(*_inputs(batch))
    return [[round(float(w), 4) for w in row] for row in weights[0][0, 0, :MAP, :MAP]]


def compare_starts(setting: Setting) -> Result:
    """Train and convert every family with every seed, and train on from every start.

    Raises:
        MissingPackageError: without transformers.
    """
    names = setting.scaled(models.LANGUAGE, models.FAMILIES, models.FAMILIES)
    require("transformers", "Llama models", "'sigattn[transformers]'")
    recordings = sweep.recordings_path(setting) if "speech" in names else None
    jobs, runs = {}, {}
    for seed in range(setting.seeds):  # outermost, so that an interrupted sweep has complete seeds
        for family in names:
            recipe = models.recipe_of(family, setting).with_training(seed=seed)
            data_path = setting.data if family in models.LANGUAGE else recordings if family == "speech" else None
            fingerprint = datasets.load_dataset(recipe, data_path).fingerprint
            setting.fingerprints[family] = fingerprint
            settings = {"recipe": repr(recipe), "data": fingerprint, "fractions": FRACTIONS, "batches": BATCHES}
            if family == models.LLAMA:
                settings["engine"] = "Trainer"
            label = f"{family}, seed {seed}"
            runs[family, seed] = label
            train = functools.partial(train_and_convert, recipe, data_path)
            jobs[label] = cache.Job(setting.folder / "runs" / f"{family}_{seed}.json", settings, train)
    results = cache.run_jobs(jobs, setting.workers, setting.log)
    by_run = {run: results[label] for run, label in runs.items()}
    data = [
        {"family": family, "seed": seed, "start": start, "fraction": fraction, "steps": step, "loss": loss}
        for family in names
        for seed in range(setting.seeds)
        for start, losses in by_run[family, seed]["losses"].items()
        for fraction, (step, loss) in zip(FRACTIONS, losses, strict=True)
    ]
    for row in data:  # the fit of each layer
        if row["start"] == FITTED and not row["fraction"]:
            row["layers"] = by_run[row["family"], row["seed"]]["layers"]
    return Result(("model", "start", *(f"after {f:.0%}" for f in FRACTIONS)), _rows(data), data, _figure(data, by_run))


def _rows(data: Sequence[Row]) -> list[tuple[str, ...]]:
    families = dict.fromkeys(row["family"] for row in data)
    return [
        (f, s, *(intervals.mean_std(select(data, "loss", family=f, start=s, fraction=x)) for x in FRACTIONS))
        for f in families
        for s in STARTS
        if select(data, "loss", family=f, start=s)
    ]


def _figure(data: Sequence[Row], by_run: dict[tuple[str, int], dict[str, Any]]) -> Any:
    """Draw the losses over the steps of each family, then the fit of each, and maps of the first."""
    from matplotlib.ticker import LogLocator  # here: half a second, as in ``axes_grid``

    families = list(dict.fromkeys(row["family"] for row in data))
    figure, axes = drawing.axes_grid(3, math.ceil((len(families) + 5) / 3), width=3.4, height=3.0)
    colours = drawing.variant_colours(STARTS)
    for axis, family in zip(axes, families, strict=False):
        for start, colour in colours.items():
            steps = sorted({row["steps"] for row in data if row["family"] == family})
            losses = [select(data, "loss", family=family, start=start, steps=s) for s in steps]
            over = {"linestyle": "--", "zorder": 3} if start == SOFTMAX else {}  # the others may lie on it
            if any(losses):
                drawing.plot_band(axis, steps, losses, start, colour, **over)
        axis.set(title=family, xlabel="further steps", ylabel="held-out loss", yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelleft=False)
    free = axes[len(families) : -4]
    for axis in free:
        axis.set_axis_off()
    drawing.band_legend(free[0], handles=axes[0].get_legend_handles_labels()[0], loc="center")
    for position, family in enumerate(families):
        layers = [layer for run in by_run if run[0] == family for layer in by_run[run]["layers"]]
        errors = [layer["error"] for layer in layers]
        axes[-4].plot([position] * len(errors), errors, "o", ms=3, color=colours[FITTED])
        values = [r2 for layer in layers for r2 in layer["r2"] if r2 is not None and not math.isnan(r2)]
        axes[-3].plot([position] * len(values), values, "o", ms=3, color=drawing.COLOUR_OF["sigmoid"])
    axes[-4].set(title="output of each layer", ylabel="relative error", yscale="log")
    axes[-3].set(title="fit of each head", ylabel="R² of -log Σ exp")
    for axis in axes[-4:-2]:
        axis.set_xticks(range(len(families)), families, rotation=45, ha="right")
    first = families[0]
    maps = by_run[first, 0]["maps"]
    for axis, weights, title in zip(axes[-2:], maps, ("softmax", "converted"), strict=True):
        axis.imshow(torch.tensor(weights).clamp(min=1e-3).log10().tolist(), vmin=-3, vmax=0, cmap="viridis")
        axis.grid(visible=False)
        axis.set(title=f"{first}: {title}", xlabel="key of the last layer", ylabel="query")
    return figure


def judge_starts(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the starts at once and after further training, by the relative difference of held-out losses per seed."""
    families = list(dict.fromkeys(row["family"] for row in data))
    language = [f for f in families if f in models.LANGUAGE]

    def excess(family: str, start: str, fraction: float, other: str = SOFTMAX) -> intervals.Difference:
        one, two = (select(data, "loss", family=family, start=s, fraction=fraction) for s in (start, other))
        relative = [a / b - 1 for a, b in zip(one, two, strict=True)]
        return intervals.welch([0.0] * len(relative), relative)

    def noise(family: str, fraction: float) -> float:
        losses = select(data, "loss", family=family, start=SOFTMAX, fraction=fraction)
        return statistics.stdev(losses) / statistics.mean(losses) if len(losses) > 1 else 0.0

    def finding(claim: str, fraction: float, of: Sequence[str], tolerance: float | None) -> Finding:
        differences = {f: excess(f, FITTED, fraction) for f in of}
        verdicts = [
            d.verdict_not_above(noise(f, fraction) if tolerance is None else tolerance) for f, d in differences.items()
        ]
        more = "tolerance: softmax's standard deviation" if tolerance is None else f"tolerance {tolerance:g}"
        return Finding(claim, intervals.verdict_all(verdicts), _evidence(differences, verdicts, more))

    def lower(claim: str, fraction: float) -> Finding:
        differences = {f: -excess(f, FITTED, fraction, LENGTH) for f in families}
        verdicts = [d.verdict_positive() for d in differences.values()]
        return Finding(claim, intervals.verdict_all(verdicts), _evidence(differences, verdicts))

    middle, last = FRACTIONS[-2:]
    after = "After {:.0%} of the steps, the fitted model is within {} of softmax trained on equally."
    return [
        finding("A fitted language model is at most 1 % worse than softmax without any training.", 0.0, language, 0.01),
        finding(after.format(middle, "1 %"), middle, families, 0.01),
        finding(after.format(last, "the seeds' noise"), last, families, None),
        lower("The fit lowers the loss of the converted model below that of b = -log n.", 0.0),
        lower(f"After {last:.0%} of the steps it still does.", last),
    ]


def _evidence(
    differences: dict[str, intervals.Difference], verdicts: Sequence[intervals.Verdict], more: str = ""
) -> str:
    """State each model's difference, with its own verdict: that of the finding is the least favourable one."""
    told = ", ".join(f"{f} {d} ({v})" for (f, d), v in zip(differences.items(), verdicts, strict=True))
    mean = statistics.mean(d.delta for d in differences.values())
    return "; ".join(filter(None, (f"relative difference of the losses: {told}; mean {mean:+.3g}", more)))


EXPERIMENTS = (
    Experiment(
        "conversion",
        "Beyond the paper: softmax models converted to sigmoid attention, and trained further",
        "Sect. 3, softmax as a sigmoid with b = -log of the denominator",
        compare_starts,
        judge_starts,
        {"smoke": 0.2, "small": 40.0, "paper": None},
        "1 GPU",
        "language models of 3 layers of 96, 128 bytes; ViT and speech model of 2 layers of 64; 600 and 3,000 steps",
        takes=(*TRAINING, "data", "speech"),
        kind="beyond",
    ),
)
