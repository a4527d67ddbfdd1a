"""Positional encodings with sigmoid attention: SinCos, RoPE, ALiBi, and RoPE with a bias (Figs. 4-7, "Ablations").

    sigattn reproduce position-ablation --scale small       (--scale paper: 1 GPU of 80 GB, data: C4's realnews)

One block is trained as a language model, with sigmoid without a bias and with softmax. Expected: with SinCos and RoPE
the output of sigmoid attention is initially far larger than that of softmax and the loss higher; with ALiBi or a bias
it is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting
from sigattn.recipes.recipe import Recipe
from sigattn.recipes.registry import find_recipe

POSITIONS: dict[str, dict[str, Any]] = {
    "SinCos": {"position": "sincos", "attention_bias": 0.0},
    "RoPE": {"position": "rope", "attention_bias": 0.0},
    "ALiBi": {"position": "alibi", "attention_bias": 0.0},
    "RoPE, b": {"position": "rope"},
}


def recipes(setting: Setting) -> dict[str, Recipe]:
    """Return recipes of sigmoid with each position and bias, and of softmax with each position."""
    base = find_recipe("lm-realnews")
    if setting.scale != "paper":
        context, steps = setting.scaled((32, 6), (256, 300), None)
        training = replace(
            base.training, max_steps=steps, batch_size=8, precision="float32", learning_rate=2e-3,
            warmup_steps=steps // 10, final_learning_rate=0.05, validate_every=steps, checkpoint_every=steps,
        )  # fmt: skip
        small = base.with_transformer(vocab_size=256, max_seq_len=context, embed_dim=128, num_heads=4, mlp_dim=512)
        base = replace(small, training=training)
    made = {}
    for name, settings in POSITIONS.items():
        # the paper's b = -10 is somewhat below -log n = -8.3 of its 4096 tokens; scaled here to the shorter contexts
        bias = settings.get("attention_bias", -10.0 if setting.scale == "paper" else setting.scaled(-4.0, -7.0, -10.0))
        made[f"sigmoid, {name}"] = base.with_transformer(**{**settings, "attention_bias": bias})
        if name != "RoPE, b":
            made[f"softmax, {name}"] = base.with_transformer(position=settings["position"]).softmax()
    return made


def run(setting: Setting) -> Result:
    """Train all recipes and compare their losses and attention norms."""
    found = sweep.train_all(setting, sweep.make_jobs(recipes(setting), setting))
    picture, axes = drawing.axes_grid(len(POSITIONS), 2)
    rows, findings, data = [], [], []
    for i, name in enumerate(POSITIONS):
        pair = {"softmax": found[f"softmax, {name.partition(',')[0]}"], "sigmoid": found[f"sigmoid, {name}"]}
        for mechanism, outcomes in pair.items():
            drawing.plot_curves(
                axes[i], [[r["loss"] for r in o.rows] for o in outcomes], mechanism, drawing.COLOUR_OF[mechanism]
            )
            norms = [[r["attention_norm"] for r in o.rows] for o in outcomes]
            drawing.plot_curves(axes[len(POSITIONS) + i], norms, mechanism, drawing.COLOUR_OF[mechanism], window=1)
            first, last = ([n[at] for n in norms] for at in (0, -1))
            finals = [o.mean_of_last() for o in outcomes]
            rows.append((name, mechanism, *(intervals.mean_std(v) for v in (finals, first, last))))
            data += [
                {"position": name, "mechanism": mechanism, "seed": s, "loss": loss, "first_norm": a, "last_norm": b}
                for s, (loss, a, b) in enumerate(zip(finals, first, last, strict=True))
            ]
        bias = recipes(setting)[f"sigmoid, {name}"].transformer.attention_bias
        axes[i].set_title(f"{name.partition(',')[0]}, b = {bias:g}")
        axes[len(POSITIONS) + i].set_yscale("log")
        axes[len(POSITIONS) + i].set_xlabel("step")
        findings.append(_finding(name, pair))
    axes[0].set_ylabel("training loss, nats")
    axes[len(POSITIONS)].set_ylabel("‖σ(QKᵀ/√d + b) V‖")
    axes[0].legend(frameon=False)
    return Result(("position", "", "final training loss", "norm, first", "norm, last"), rows, findings, data, picture)


def _finding(name: str, pair: dict[str, list[sweep.Outcome]]) -> Finding:
    soft, sigm = ([o.mean_of_last() for o in pair[m]] for m in ("softmax", "sigmoid"))
    delta, margin = intervals.welch(soft, sigm)
    seen = f"sigmoid - softmax {intervals.interval(delta, margin)} nats"
    if name in ("SinCos", "RoPE"):
        claim = f"With {name} and no bias, sigmoid falls behind softmax."
        return Finding(claim, intervals.verdict_positive(delta, margin), seen)
    claim = f"With {name if name == 'ALiBi' else 'RoPE and a negative bias'}, sigmoid equals softmax."
    return Finding(claim, intervals.verdict_equal(delta, margin, 0.15), seen)


EXPERIMENT = Experiment(
    "position-ablation",
    "Positions and the bias in a one-block language model",
    'Figs. 4-7, Sect. "Ablations"',
    run,
    {"smoke": 0.2, "small": 4.0, "paper": None},
    "1 GPU of 80 GB",
    "width 128 instead of 3072, 256 bytes instead of 4096 tokens, 300 steps instead of 65,536, b = -7 instead of -10",
)
