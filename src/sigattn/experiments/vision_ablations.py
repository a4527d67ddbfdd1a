"""What sigmoid attention needs in supervised vision: QK-norm, LayerScale, n^(-α), one key head, activations (Fig. 11).

    sigattn reproduce vision-ablations --scale small        (--scale paper: 8 GPUs of 80 GB, ImageNet-1k)

Expected: QK-norm hardly matters with LayerScale; without LayerScale accuracy falls; one key head is enough; activations
are alike with both, but for tanh.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from sigattn.experiments import drawing, sweep
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Setting
from sigattn.recipes import intervals
from sigattn.recipes.registry import find

CHANGES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid, no QK-norm": {"qk_norm": "none"},
    "sigmoid, no LayerScale": {"layer_scale": None},
    "sigmoid, neither": {"qk_norm": "none", "layer_scale": None},
    "sigmoid, n^-1, no LayerScale": {"length_power": 1.0, "layer_scale": None},
    "sigmoid, one key head": {"kv_heads": 1},
    "softmax": {"activation": "softmax"},
    "softmax, no LayerScale": {"activation": "softmax", "layer_scale": None},
    "softmax, one key head": {"activation": "softmax", "kv_heads": 1},
    "relu": {"activation": "relu"},
    "relu²": {"activation": "relu2"},
    "relu², neither": {"activation": "relu2", "qk_norm": "none", "layer_scale": None},
    "gelu": {"activation": "gelu"},
    "tanh": {"activation": "tanh"},
}


def run(setting: Setting) -> Result:
    """All variants on one data set."""
    if setting.scale == "paper":
        raise ExperimentError(
            "vision-ablations at the paper's scale trains 14 ViT-B on ImageNet-1k: run sigattn train vit-supervised "
            "--data IMAGENET with --model.qk-norm, --model.layer-scale, --model.kv-heads and --model.activation"
        )
    recipe = find("vit-supervised-tiny")
    steps = setting.of(4, 400, None)
    training = replace(
        recipe.training, steps=steps, batch=setting.of(8, 128, None), warmup_steps=steps // 10, validate_every=steps,
        checkpoint_every=steps,
    )  # fmt: skip
    recipe = replace(recipe, training=training)
    names = setting.of(("sigmoid", "softmax", "sigmoid, neither"), tuple(CHANGES), None)
    found = sweep.train_all(
        setting, sweep.jobs({name: recipe.with_transformer(**CHANGES[name]) for name in names}, setting)
    )
    top1 = {name: [o.final["top1"] for o in found[name]] for name in names}
    picture, (axis,) = drawing.figure(1, width=7.0, height=4.2)
    for i, name in enumerate(names):
        colour = drawing.STYLE["softmax" if name.startswith("softmax") else "sigmoid" if "sigm" in name else "mlp"]
        axis.plot(top1[name], [i] * len(top1[name]), "o", ms=4, color=colour, alpha=0.6)
        axis.plot([statistics.mean(top1[name])], [i], "|", ms=14, color=colour)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("held-out top-1: each seed, and the mean")
    rows = [(name, intervals.spread(top1[name])) for name in names]
    findings = []
    if setting.scale != "smoke":
        findings = [
            _same(top1, "sigmoid, no QK-norm", "sigmoid", "With LayerScale, sigmoid does without QK-norm."),
            _lower(top1, "sigmoid, no LayerScale", "sigmoid", "Without LayerScale, sigmoid's accuracy falls (by 1 %)."),
            _same(top1, "sigmoid, one key head", "sigmoid", "One key head is as good as all, for sigmoid."),
            _same(top1, "softmax, one key head", "softmax", "One key head is as good as all, for softmax."),
            _same(top1, "relu", "sigmoid", "ReLU with QK-norm and LayerScale is as good as sigmoid."),
            _same(top1, "gelu", "sigmoid", "GELU with both is as good as sigmoid."),
            _lower(top1, "tanh", "sigmoid", "Tanh is worse."),
            _lower(top1, "relu², neither", "relu²", "ReLU² needs QK-norm and LayerScale."),
        ]
    findings.append(_same(top1, "sigmoid", "softmax", "Sigmoid matches softmax."))
    return Result(("variant", "top-1"), rows, findings, [{"variant": n, "top1": top1[n]} for n in names], picture)


def _seen(top1: dict[str, list[float]], name: str, beside: str) -> tuple[float, float, str]:
    delta, margin = intervals.welch(top1[beside], top1[name])
    return delta, margin, f"top-1, {name} less {beside}: {intervals.interval(delta, margin)}"


def _same(top1: dict[str, list[float]], name: str, beside: str, claim: str) -> Finding:
    delta, margin, seen = _seen(top1, name, beside)
    return Finding(claim, intervals.equal(delta, margin, 0.03), seen)


def _lower(top1: dict[str, list[float]], name: str, beside: str, claim: str) -> Finding:
    delta, margin, seen = _seen(top1, name, beside)
    return Finding(claim, "agrees" if -delta > margin else "differs" if delta > margin else "not shown", seen)


EXPERIMENT = Experiment(
    "vision-ablations",
    "Supervised vision: QK-norm, LayerScale, key heads, activations",
    'Fig. 11, Sect. "Ablations"',
    run,
    {"smoke": 0.2, "small": 7.0, "paper": None},
    "8 GPUs of 80 GB",
    "handwritten digits of 8 × 8 pixels instead of ImageNet, 2 layers of 64, 400 steps, LayerScale from 0.01",
)
