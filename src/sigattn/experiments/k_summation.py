"""Sum of k marked numbers, computed by an MLP or by one layer of softmax or sigmoid attention (App. G.6).

    sigattn reproduce k-summation --scale small             (--scale paper: a GPU, or some hours on a CPU)
    sigattn reproduce attention-evolution --scale small

Expected: the loss grows with k, equally for both mechanisms. At the end of training, the weights of sigmoid attention
are less sparse than those of softmax.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sigattn.data import synthetic
from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting
from sigattn.models import saving
from sigattn.models.sequence import SequenceModel
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.k_summation import KSummation
from sigattn.train.run_cache import load_result


def base(setting: Setting, k: int, **model: Any) -> Recipe:
    """Return the recipe, with fewer steps below the paper's scale."""
    recipe = find_recipe("k-summation")
    recipe = replace(recipe.with_transformer(**model), task=KSummation(k=k))
    steps = setting.scaled(6, 400, recipe.training.max_steps)
    return replace(
        recipe,
        training=replace(
            recipe.training,
            max_steps=steps,
            batch_size=setting.scaled(8, 64, 256),
            validate_every=steps,
            checkpoint_every=steps,
        ),
    )


def run(setting: Setting) -> Result:
    """Compare three architectures over k."""
    ks = setting.scaled((1, 2), (1, 4, 16), (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20))
    wanted = {}
    for k in ks:
        wanted[f"sigmoid, {k}"] = base(setting, k)
        wanted[f"softmax, {k}"] = base(setting, k).softmax()
        wanted[f"mlp, {k}"] = base(setting, k, kind="mlp")
    found = sweep.train_all(setting, sweep.make_jobs(wanted, setting))
    losses = {n: [[o.final["loss"] for o in found[f"{n}, {k}"]] for k in ks] for n in ("softmax", "sigmoid", "mlp")}
    picture, axes = drawing.axes_grid(1, width=6.0, height=4.0)
    for name, values in losses.items():
        drawing.plot_band(axes[0], ks, values, name, drawing.COLOUR_OF[name])
    axes[0].set(yscale="log", xlabel="k of n = 40", ylabel="held-out squared error")
    axes[0].legend(frameon=False)
    rows = [(str(k), *(intervals.mean_std(losses[n][i]) for n in losses)) for i, k in enumerate(ks)]
    apart = [intervals.welch([math.log(x) for x in losses["softmax"][i]], [math.log(x) for x in losses["sigmoid"][i]])
             for i in range(len(ks))]  # fmt: skip
    same = sum(abs(delta) <= margin for delta, margin in apart)
    grow, margin = intervals.welch(losses["sigmoid"][0], losses["sigmoid"][-1])
    # a model that always predicts 0 has an error of k
    idle = [k for i, k in enumerate(ks) if statistics.mean(losses["sigmoid"][i] + losses["softmax"][i]) > k / 2]
    but = f"; neither has learned k = {', '.join(map(str, idle))} (error above k / 2)" if idle else ""
    findings = [
        Finding(
            "The loss grows with k.",
            "not shown" if idle else intervals.verdict_positive(grow, margin),
            f"sigmoid, k = {ks[-1]} less k = {ks[0]}: {intervals.interval(grow, margin)}{but}",
        ),
        Finding(
            "Sigmoid scales with k as softmax does.",
            "not shown" if idle else intervals.verdict_all([intervals.verdict_equal(*a, 0.5) for a in apart]),
            f"within the 95 % interval of log loss at {same} of {len(ks)} values of k; log(sigmoid / softmax) "
            + ", ".join(intervals.interval(*a) for a in apart)
            + but,
        ),
    ]
    data = [{"model": n, "k": k, "losses": losses[n][i]} for n in losses for i, k in enumerate(ks)]
    return Result(("k", "softmax", "sigmoid", "MLP"), rows, findings, data, picture)


def run_evolution(setting: Setting) -> Result:
    """Measure norm and Hoyer sparsity of one head's weights over training, on 40 samples, k = 1."""
    recipe = base(setting, 1, num_heads=1)
    steps = recipe.training.max_steps
    every = max(1, steps // setting.scaled(2, 5, 10))
    samples = next(iter(synthetic.KSummation(held_out=40).validation(40)))[0]
    data: list[dict[str, Any]] = []
    for mechanism in ("softmax", "sigmoid"):
        own = recipe if mechanism == "sigmoid" else recipe.softmax()
        for seed in range(setting.seeds):
            for step in range(0, steps + 1, every):
                model = model_after(setting, own, mechanism, seed, step)
                report = model.attention_report(samples)[0]
                data.append(
                    {
                        "mechanism": mechanism,
                        "seed": seed,
                        "step": step,
                        "sparsity": report.hoyer_sparsity.mean().item(),
                        "norm": report.output_norm.mean().item(),
                        "row_mass": report.row_mass_mean.mean().item(),
                    }
                )
            setting.log(f"{mechanism}, seed {seed}")
    picture, axes = drawing.axes_grid(3)
    for axis, key in zip(axes, ("norm", "sparsity", "row_mass"), strict=True):
        for mechanism in ("softmax", "sigmoid"):
            at = sorted({r["step"] for r in data})
            values = [[r[key] for r in data if (r["mechanism"], r["step"]) == (mechanism, s)] for s in at]
            drawing.plot_band(axis, at, values, mechanism, drawing.COLOUR_OF[mechanism])
        axis.set(xlabel="step", title={"norm": "‖P V‖", "sparsity": "Hoyer sparsity", "row_mass": "Σ of a row"}[key])
    axes[0].legend(frameon=False)
    last = max(r["step"] for r in data)
    ends = {
        m: [r["sparsity"] for r in data if (r["mechanism"], r["step"]) == (m, last)] for m in ("softmax", "sigmoid")
    }
    delta, margin = intervals.welch(ends["softmax"], ends["sigmoid"])
    error = error_after(setting, tuple(ends), last)
    idle = error > 0.5  # a model that always predicts 0 has an error of 1
    findings = [
        Finding(
            "At the end of training sigmoid attention is less sparse than softmax.",
            "not shown" if idle else intervals.verdict_positive(-delta, margin),
            f"Hoyer sparsity, sigmoid - softmax: {intervals.interval(delta, margin)}; squared error "
            f"{error:.2g}" + (", so the problem has not been learned" if idle else ""),
        )
    ]
    rows = [(m, intervals.mean_std([r["sparsity"] for r in data if (r["mechanism"], r["step"]) == (m, 0)]),
             intervals.mean_std(ends[m])) for m in ends]  # fmt: skip
    return Result(("", "sparsity, first", "sparsity, last"), rows, findings, data, picture)


def _evolution_folder(setting: Setting, mechanism: str, seed: int, steps: int) -> Path:
    return setting.folder / "runs" / f"{mechanism}-{seed}-{steps}"


def error_after(setting: Setting, mechanisms: Sequence[str], steps: int) -> float:
    """Return the mean squared error of the runs that end after ``steps`` steps."""
    folders = (_evolution_folder(setting, m, s, steps) for m in mechanisms for s in range(setting.seeds))
    return statistics.mean(json.loads((f / sweep.DONE).read_text())["final"]["loss"] for f in folders)


def model_after(setting: Setting, recipe: Recipe, mechanism: str, seed: int, steps: int) -> SequenceModel:
    """Return the model after ``steps`` steps, from a separate run that equals the beginning of a longer one."""
    if not steps:
        torch.manual_seed(seed)
        model = saving.build(recipe.model)
        assert isinstance(model, SequenceModel)
        return model.eval()
    part = replace(recipe, training=replace(recipe.training, max_steps=steps))
    folder = _evolution_folder(setting, mechanism, seed, steps)
    job = sweep.Job(mechanism, part, seed)
    own = sweep.run_identity(setting, job, {})
    if load_result(folder / sweep.DONE, own) is None:
        sweep.train_one(folder, job, own)
    model = saving.load(folder / "model")
    assert isinstance(model, SequenceModel)
    return model


EXPERIMENT = Experiment(
    "k-summation",
    "k-summation with an MLP, softmax and sigmoid attention",
    'Fig. "final_loss_k_summation", App. G.6',
    run,
    {"smoke": 0.2, "small": 4.0, "paper": None},
    "1 GPU",
    "three values of k, batch 64, 400 steps: no training converges",
)
EVOLUTION = Experiment(
    "attention-evolution",
    "How attention weights change over training",
    'Figs. "attn_evolve", "attn_metric_evolve", App. G.6',
    run_evolution,
    {"smoke": 0.2, "small": 3.0, "paper": None},
    "1 GPU",
    "batch 64, up to 400 steps; each point is a separate run that ends at that step (the learning rate is constant)",
)
