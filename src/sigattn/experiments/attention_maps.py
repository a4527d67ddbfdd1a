"""Attention weights of single samples over training: k = 1, n = 40 summation, one layer, one head (App. G.6).

    sigattn reproduce attention-maps --scale small          (--scale paper: 1 GPU)

Expected: a 2 × 2 structure of blocks for both mechanisms, because the two halves of the input differ in meaning; at the
end, sigmoid's upper left block, where numbers attend to numbers, is less sparse than softmax's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.data.synthetic import KSummation
from sigattn.experiments import drawing, intervals, k_summation
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting
from sigattn.models.sequence import SequenceModel
from sigattn.nn import functional
from sigattn.nn.attention import Attention
from sigattn.nn.functional import MaskSpec
from sigattn.ops import reference

SAMPLES = 8
COLOUR_MAPS = {"softmax": "Greys", "sigmoid": "Blues"}


def weights_of(model: SequenceModel, samples: Tensor) -> Tensor:  # (B, n, n)
    """Return the attention weights of the first head of the first layer."""
    (layer, *_) = (m for m in model.modules() if isinstance(m, Attention))
    found: list[Tensor] = []

    def attend(activation: Any, query: Tensor, key: Tensor, value: Tensor, pattern: MaskSpec) -> Tensor:
        problem = functional.problem_of(query, key, value, pattern)
        found.append(reference.attention_weights(problem, activation)[:, 0])
        return functional.attend(activation, query, key, value, pattern)

    layer.attention_fn = attend
    try:
        with torch.no_grad():
            model(samples)
    finally:
        layer.attention_fn = functional.attend
    return found[0]


def hoyer(weights: Tensor) -> float:
    """Return the Hoyer sparsity, the mean over rows p of (√n - ‖p‖₁ / ‖p‖₂) / (√n - 1)."""
    root = weights.shape[-1] ** 0.5
    ratio = weights.sum(-1) / weights.norm(dim=-1).clamp(min=1e-12)
    return ((root - ratio) / (root - 1)).mean().item()


def run(setting: Setting) -> Result:
    """Plot attention weights of eight samples at four steps; compare the sparsity of the upper left block."""
    recipe = k_summation.base(setting, 1, num_heads=1)
    steps = recipe.training.max_steps
    at = sorted({0, steps // 4, steps // 2, steps})
    samples = next(iter(KSummation(held_out=40).validation(40)))[0]
    maps: dict[tuple[str, int], Tensor] = {}
    data: list[dict[str, Any]] = []
    for name in COLOUR_MAPS:
        own = recipe if name == "sigmoid" else recipe.softmax()
        for seed in range(setting.seeds):
            for step in at:
                weights = weights_of(k_summation.model_after(setting, own, name, seed, step), samples)
                half = weights.shape[-1] // 2
                if seed == 0:
                    maps[name, step] = weights[:SAMPLES]
                blocks = {"upper_left": hoyer(weights[:, :half, :half]), "whole": hoyer(weights)}
                data.append({"mechanism": name, "seed": seed, "step": step, **blocks})
            setting.log(f"{name}, seed {seed}")
    picture, axes = drawing.axes_grid(2 * SAMPLES, len(at), width=0.9, height=1.0)
    for i, step in enumerate(at):
        for j in range(SAMPLES):
            for k, (name, colours) in enumerate(COLOUR_MAPS.items()):
                axis = axes[i * 2 * SAMPLES + 2 * j + k]
                # clip the colour scale, because a few large weights would make all others of softmax invisible
                most = float(maps[name, step].flatten().quantile(0.995))
                axis.imshow(maps[name, step][j].tolist(), cmap=colours, vmin=0, vmax=most)
                axis.set(xticks=[], yticks=[])
                axis.grid(visible=False)
        axes[i * 2 * SAMPLES].set_ylabel(f"step {step}", fontsize=7)
    last = {
        name: [r["upper_left"] for r in data if (r["mechanism"], r["step"]) == (name, steps)] for name in COLOUR_MAPS
    }
    delta, margin = intervals.welch(last["softmax"], last["sigmoid"])
    idle = (
        k_summation.error_after(setting, tuple(COLOUR_MAPS), steps) > 0.5
    )  # a model that always predicts 0 has an error of 1
    findings = [
        Finding(
            "At the end, where numbers attend to numbers, sigmoid attention is less sparse than softmax.",
            "not shown" if idle else intervals.verdict_positive(-delta, margin),
            f"Hoyer sparsity of the upper left block, sigmoid - softmax: {intervals.interval(delta, margin)}"
            + ("; the problem has not been learned" if idle else ""),
        )
    ]
    rows = [
        (
            name,
            *(
                intervals.mean_std([r["upper_left"] for r in data if (r["mechanism"], r["step"]) == (name, s)])
                for s in at
            ),
        )
        for name in COLOUR_MAPS
    ]
    return Result(("sparsity, upper left", *(f"step {s}" for s in at)), rows, findings, data, picture)


EXPERIMENT = Experiment(
    "attention-maps",
    "Attention weights of eight samples over training",
    'Fig. "attn_by_sample", App. G.6',
    run,
    {"smoke": 0.2, "small": 3.0, "paper": None},
    "1 GPU",
    "batch 64, up to 400 steps; each row of maps is a separate run that ends at that step",
)
