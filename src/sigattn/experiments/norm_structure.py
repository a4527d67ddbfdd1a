"""Where norms stand in language models, with and without a bias (Table "lm_norm_ablations", App. G.3).

    sigattn reproduce norm-structure --scale small          (--scale paper: 64 GPUs of 80 GB, RedPajama)

Expected at 2,048 tokens: pre-norm with ALiBi and a bias equals softmax; without a bias, RoPE falls behind (46.0 on
average, against 50.6); hybrid-norm stands in for the bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sigattn.experiments import drawing, sweep
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Setting
from sigattn.recipes import intervals
from sigattn.recipes.registry import find
from sigattn.recipes.report import COLOURS

CHANGES: dict[str, dict[str, Any]] = {
    "softmax, pre, ALiBi": {"activation": "softmax"},
    "sigmoid, pre, ALiBi, b = -log n": {},
    "sigmoid, pre, RoPE, b = -log n": {"position": "rope"},
    "sigmoid, pre, RoPE, b = 0": {"position": "rope", "bias": 0.0},
    "softmax, hybrid, ALiBi": {"activation": "softmax", "structure": "hybrid"},
    "sigmoid, hybrid, ALiBi, b = 0": {"structure": "hybrid", "bias": 0.0},
}
SOFTMAX, PRE, ROPE, BARE, SOFT_HYBRID, HYBRID = CHANGES


def run(setting: Setting) -> Result:
    """All variants on CPython's documentation."""
    if setting.scale == "paper":
        raise ExperimentError(
            "norm-structure at the paper's scale trains six models of 1B parameters: run sigattn train lm-1b-2k --data "
            "REDPAJAMA with --model.structure, --model.position and --model.bias, then sigattn lm-eval"
        )
    recipe = find("lm-1b-2k-tiny")
    steps = setting.of(4, 300, None)
    training = replace(
        recipe.training, steps=steps, batch=setting.of(2, 16, None), warmup_steps=steps // 10, validate_every=steps,
        checkpoint_every=steps,
    )  # fmt: skip
    recipe = replace(recipe.with_transformer(context=setting.of(32, 256, None)), training=training)
    wanted = {name: recipe.with_transformer(**changes) for name, changes in CHANGES.items()}
    found = sweep.train_all(setting, sweep.jobs(wanted, setting))
    bits = {name: [o.final["bits"] for o in found[name]] for name in CHANGES}
    picture, axes = drawing.figure(2, width=5.4, height=4.0)
    for name, colour in zip(CHANGES, (*COLOURS, "#56b4e9", "#e69f00"), strict=True):
        drawing.curves(axes[0], [[r["loss"] for r in o.rows] for o in found[name]], name, colour)
        drawing.curves(axes[1], [[r["attention_norm"] for r in o.rows] for o in found[name]], name, colour, window=1)
    axes[0].set(xlabel="step", ylabel="training loss, nats")
    axes[1].set(xlabel="step", ylabel="‖P V‖", yscale="log")
    axes[0].legend(frameon=False, fontsize=8)
    rows = [(name, intervals.spread(bits[name])) for name in CHANGES]
    findings = [
        _compare(
            bits, SOFTMAX, PRE, "Pre-norm sigmoid with ALiBi and -log n equals softmax at 2,048 tokens.", worse=False
        ),
        _compare(bits, ROPE, BARE, "With RoPE and pre-norm, leaving out the bias makes sigmoid worse.", worse=True),
        _compare(bits, SOFTMAX, HYBRID, "Hybrid-norm in place of a bias reaches softmax.", worse=False),
        _compare(bits, PRE, HYBRID, "Hybrid-norm without a bias equals pre-norm with one.", worse=False),
    ]
    data = [{"variant": n, "bits": bits[n]} for n in CHANGES]
    return Result(("variant", "held-out bits a byte"), rows, findings, data, picture)


def _compare(bits: dict[str, list[float]], beside: str, name: str, claim: str, *, worse: bool) -> Finding:
    delta, margin = intervals.welch(bits[beside], bits[name])
    seen = f"bits, ({name}) less ({beside}): {intervals.interval(delta, margin)}"
    if worse:
        return Finding(claim, "agrees" if delta > margin else "differs" if -delta > margin else "not shown", seen)
    return Finding(claim, intervals.equal(delta, margin, 0.1), seen)


EXPERIMENT = Experiment(
    "norm-structure",
    "Pre-norm and hybrid-norm in language models",
    'Table "lm_norm_ablations", App. G.3',
    run,
    {"smoke": 0.2, "small": 6.0, "paper": None},
    "64 GPUs of 80 GB",
    "2 layers of 64 instead of 1B parameters, 256 bytes, 300 steps; held-out bits instead of nine evaluations",
)
