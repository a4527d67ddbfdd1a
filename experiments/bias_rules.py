"""Beyond the paper: a bias fixed at the training length, or of the visible keys, in causal models with ALiBi.

    python -m experiments bias-rules --scale small

Under a causal mask query i has i + 1 visible keys, but the paper's b is -log n for all queries. One alternative is -log
of the number of visible keys, which makes the mass of every row about 1 without ALiBi. Beyond the training length, the
first rule keeps the bias of training, and the second continues to decrease. With ALiBi distant keys hardly count: the
third rule is -log of the sum of ALiBi's weights, which makes the mass of every row about 1, and has a limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from experiments import drawing, intervals, sweep
from experiments.experiment import (
    TRAINING,
    Experiment,
    Finding,
    Result,
    Row,
    Scale,
    Setting,
    count_seeds_by,
    select,
)
from sigattn.data.text import TextData, load_text
from sigattn.models import saving
from sigattn.models.language import LanguageModel
from sigattn.recipes import find_recipe
from sigattn.tasks.language import LanguageModelling

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"activation": "softmax"},
    "sigmoid, b = -log of the training length": {},
    "sigmoid, b = -log of the visible keys": {"attention_bias": "log_visible"},
    "sigmoid, b = -log of the sum of ALiBi's weights": {"attention_bias": "log_alibi"},
}
SOFTMAX, FIXED, VISIBLE, ALIBI = VARIANTS


def compare_bias_rules(setting: Setting) -> Result:
    """Train all variants with ALiBi and evaluate them at other lengths."""
    context = setting.scaled(32, 128, 2048)
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=context)
    recipe = sweep.shortened(recipe, setting.steps(2, 1200, 3000), setting.scaled(2, 16, 16))
    variants = {name: recipe.with_transformer(**changes) for name, changes in VARIANTS.items()}
    outcomes = sweep.train_variants(setting, variants)
    lengths = [context, 2 * context]
    if setting.scale != "smoke":
        lengths = [context // 4, *lengths, 4 * context, 8 * context]
    data = []
    for name, runs in outcomes.items():
        data += [row for row in setting.stored.rows if row["variant"] == name]
        for run in runs:
            model = run.load_model()
            for length in lengths:
                bits = bits_at_length(model, setting, context, length)
                data.append({"variant": name, "seed": run.seed, "length": length, "bits": bits})
                setting.log(f"{name}, seed {run.seed}, {length} tokens: {bits:.3f}")
    values = {(name, n): select(data, "bits", variant=name, length=n) for name in VARIANTS for n in lengths}
    figure, (axis,) = drawing.axes_grid(1, width=6.4, height=4.0)
    for name, colour in drawing.variant_colours(VARIANTS).items():
        drawing.plot_band(axis, lengths, [values[name, n] for n in lengths], name, colour)
    axis.axvline(context, color="#999999", linestyle=":", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set(xlabel=f"tokens (trained on {context})", ylabel="held-out bits per byte")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.minorticks_off()
    drawing.band_legend(axis)
    rows = [(name, *(intervals.mean_std(values[name, n]) for n in lengths)) for name in VARIANTS]
    return Result(("variant", *(f"n = {n}" for n in lengths)), rows, data, figure)


def judge_bias_rules(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the rules at the training length and at the longest."""
    lengths = sorted({row["length"] for row in data})
    context, longest = lengths[len(lengths) // 4], lengths[-1]  # the smallest scale has no length below the context
    values = {(name, n): select(data, "bits", variant=name, length=n) for name in VARIANTS for n in lengths}
    at_training, at_longest = (intervals.welch(values[FIXED, n], values[VISIBLE, n]) for n in (context, longest))
    both = {name: (values[name, context], values[name, longest]) for name in VARIANTS}  # of the same models
    growth = {name: [b - a for a, b in zip(*bits, strict=True)] for name, bits in both.items()}
    more = intervals.welch(growth[SOFTMAX], growth[FIXED])
    more_alibi = intervals.welch(growth[SOFTMAX], growth[ALIBI])
    gain = intervals.welch(values[ALIBI, context], values[FIXED, context])
    return [
        Finding(
            "At the training length -log of the visible keys is as good as the fixed bias.",
            at_training.verdict_equal(0.05),
            f"bits, visible keys less fixed: {at_training}, tolerance 0.05",
        ),
        Finding(
            f"At {longest // context} times the training length the fixed bias is as good as -log of the visible keys.",
            at_longest.verdict_equal(0.05),
            f"bits, visible keys less fixed: {at_longest}, tolerance 0.05",
        ),
        Finding(
            "With ALiBi and a fixed bias, sigmoid extrapolates to longer texts as softmax does.",
            more.verdict_equal(0.1),
            f"bits more from {context} to {longest} tokens, sigmoid less softmax: {more}, tolerance 0.1 ("
            + ", ".join(f"{name}: {intervals.paired(*bits)}" for name, bits in both.items())
            + ")",
        ),
        Finding(
            "With -log of the sum of ALiBi's weights, sigmoid extrapolates to longer texts as softmax does.",
            more_alibi.verdict_equal(0.1),
            f"bits more from {context} to {longest} tokens, sigmoid less softmax: {more_alibi}, tolerance 0.1",
        ),
        Finding(
            "At the training length -log of the sum of ALiBi's weights is better than the fixed bias.",
            gain.verdict_positive(0.02),
            f"bits less: {gain}, tolerance 0.02",
        ),
    ]


def bits_at_length(model: LanguageModel, setting: Setting, context: int, length: int) -> float:
    """Return held-out bits per byte over windows of a length, with the bias that the model was trained with."""
    config = model.config
    if config.activation == "sigmoid" and config.attention_bias is None:
        config = replace(config, attention_bias=-math.log(context))
    longer = saving.build(replace(config, max_seq_len=length))
    longer.load_state_dict(model.state_dict())
    text = TextData.from_bytes(load_text(setting.data), length, held_out=setting.scaled(2, 16, 64))
    with torch.no_grad():
        return LanguageModelling().evaluate(longer.eval(), text.validation(4))["bits"]


EXPERIMENTS = (
    Experiment(
        "bias-rules",
        "Beyond the paper: a fixed bias, or one that follows the visible keys",
        "Sect. 2 and App. E choose b = -log n",
        compare_bias_rules,
        judge_bias_rules,
        {"smoke": 0.2, "small": 6.5, "paper": None},
        "1 GPU",
        "2 layers of 64, trained on 128 bytes, 1,200 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
        count_seeds=count_seeds_by("variant"),
    ),
)
