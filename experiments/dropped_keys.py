"""Beyond the paper: error of sigmoid attention when keys are dropped, which has a bound because its sum is additive.

    python -m experiments dropped-keys --scale small

A key's contribution to a query's output is p ‖v‖, which for a sigmoid depends on that key and query only: dropping a
set of keys changes the output by at most the sum of their contributions, whatever the other keys are. The weights of a
softmax have a common denominator: dropping a key rescales all others, and a bound requires all keys. Here each query
keeps the given share of its visible keys, those with the largest contributions; softmax with the same budget is
evaluated both rescaled (a softmax over the kept keys) and not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments import drawing, intervals, sweep
from experiments.experiment import TRAINING, Experiment, Finding, Result, Row, Scale, Setting, select
from experiments.instrumentation import replaced_attention
from sigattn.data.text import TextData, load_text
from sigattn.nn import functional
from sigattn.ops import reference
from sigattn.recipes import find_recipe
from sigattn.tasks.language import LanguageModelling

WAYS = ("softmax, not rescaled", "softmax, rescaled", "sigmoid")
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)


@dataclass
class DropErrors:
    """Errors of dropping keys, over all calls.

    Attributes:
        error, output: sums of squares. beyond_bound: largest excess of an error over its bound, relative to the largest
            output of the call; values of the order of 1e-7 are rounding.
    """

    error: float = 0.0
    output: float = 0.0
    beyond_bound: float = 0.0


def keep_mask(contribution: Tensor, visible: Tensor, share: float) -> Tensor:
    """Return the mask of kept keys: for each query, the share of visible keys (at least one) that contribute most."""
    budget = (visible.sum(-1, keepdim=True) * share).ceil().clamp(min=1)  # (…, N, 1)
    order = contribution.masked_fill(~visible, -1).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    return (rank < budget) & visible


def attend(
    share: float,
    rescaled: bool,
    errors: DropErrors,
    activation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: functional.MaskSpec,
) -> Tensor:
    """Return the output of ``functional.attend`` without the smallest contributions; add its errors to ``errors``."""
    problem = functional.make_problem(query, key, value, pattern)
    weights = reference.attention_weights(problem, activation)  # (B, H, N, M)
    visible = reference.masked_logits(problem, activation)[1]
    norms = value.norm(dim=-1).repeat_interleave(query.shape[1] // value.shape[1], 1)  # (B, H, M)
    contribution = weights * norms.unsqueeze(-2)
    keep = keep_mask(contribution, visible, share)
    exact = reference.combine(problem, weights)
    kept_weights = weights.masked_fill(~keep, 0)
    bound = contribution.masked_fill(keep, 0).sum(-1)
    if rescaled:
        kept_weights = kept_weights / kept_weights.sum(-1, keepdim=True)
    out = reference.combine(problem, kept_weights)
    difference = (out - exact).norm(dim=-1)  # (B, H, N)
    errors.error += difference.square().sum().item()
    errors.output += exact.square().sum().item()
    beyond_bound = ((difference - bound).max() / exact.norm(dim=-1).max()).item()
    errors.beyond_bound = max(errors.beyond_bound, beyond_bound)
    return out.to(query.dtype)


def measure_dropped_keys(setting: Setting) -> Result:
    """Train both models, and measure errors and bits per byte with dropped keys."""
    context = setting.scaled(32, 256, 2048)
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=context)
    recipe = sweep.shortened(recipe, setting.steps(2, 400, 3000), setting.scaled(2, 16, 16))
    outcomes = sweep.train_variants(setting, {"sigmoid": recipe, "softmax": recipe.softmax()})
    text = TextData.from_bytes(load_text(setting.data), context, held_out=setting.scaled(2, 16, 32))
    data: list[dict[str, Any]] = []
    for name, runs in outcomes.items():
        for run in runs:
            model = run.load_model()
            for way in (w for w in WAYS if w.startswith(name)):
                for share in setting.scaled((1.0, 0.1), SHARES, SHARES):
                    errors = DropErrors()
                    dropping = functools.partial(attend, share, way.endswith(", rescaled"), errors)
                    with replaced_attention(model, dropping), torch.no_grad():
                        bits = LanguageModelling().evaluate(model, text.validation(8))["bits"]
                    error = (errors.error / errors.output) ** 0.5
                    row = {"way": way, "seed": run.seed, "share": share, "bits": bits, "error": error}
                    data.append({**row, "beyond_bound": errors.beyond_bound})
                setting.log(f"{way}, seed {run.seed}")
    return _result(data)


def _result(data: list[Row]) -> Result:
    shares = sorted({row["share"] for row in data}, reverse=True)
    figure, axes = drawing.axes_grid(2, width=5.0, height=3.8)
    colours = dict(zip(WAYS, ("#e69f00", drawing.COLOUR_OF["softmax"], drawing.COLOUR_OF["sigmoid"]), strict=True))
    for axis, key in zip(axes, ("error", "bits"), strict=True):
        for way in WAYS:
            values = [select(data, key, way=way, share=s) for s in shares]
            drawing.plot_band(axis, shares, values, way, colours[way])
        axis.set(xscale="log", xlabel="share of the visible keys that is kept")
    axes[0].set_ylabel("relative error of the outputs")
    axes[1].set_ylabel("held-out bits per byte")
    drawing.band_legend(axes[0])
    rows = [
        (way, key, *(intervals.mean_std(select(data, key, way=way, share=s)) for s in shares))
        for way in WAYS
        for key in ("error", "bits")
    ]
    return Result(("", "", *(f"{s:.0%}" for s in shares)), rows, data, figure)


def judge_dropped_keys(data: Sequence[Row], scale: Scale) -> list[Finding]:
    """Check the bound, and compare the bits lost with a tenth of the keys."""
    cost = {}  # bits lost with a tenth of the keys
    for way in WAYS:
        whole, tenth = (select(data, "bits", way=way, share=s) for s in (1.0, 0.1))
        cost[way] = [b - a for a, b in zip(whole, tenth, strict=True)]
    not_rescaled, rescaled = (intervals.welch(cost[way], cost["sigmoid"]) for way in WAYS[:2])
    excess = max(select(data, "beyond_bound", way="sigmoid"))
    return [
        Finding(
            "Sigmoid's error never exceeds the sum of the dropped keys' own contributions.",
            "agrees" if excess < 1e-5 else "differs",
            f"over all queries, layers and budgets, the excess is at most {excess:.1g} of the largest output: rounding",
        ),
        Finding(
            "With a tenth of the keys, sigmoid loses no more than a softmax over the kept keys.",
            "not shown" if scale == "smoke" else rescaled.verdict_not_above(0.05),
            f"bits lost, sigmoid less softmax, rescaled: {rescaled}, tolerance 0.05; not rescaled: {not_rescaled}",
        ),
    ]


EXPERIMENTS = (
    Experiment(
        "dropped-keys",
        "Beyond the paper: leaving out the keys that contribute least",
        "Sect. 4: partial results over disjoint keys add",
        measure_dropped_keys,
        judge_dropped_keys,
        {"smoke": 0.2, "small": 5.0, "paper": None},
        "1 GPU",
        "2 layers of 64, 256 bytes, 400 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
    ),
)
