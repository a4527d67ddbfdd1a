"""Beyond the paper: error of sigmoid attention when keys are dropped, which has a bound because its sum is additive.

    sigattn reproduce dropped-keys --scale small

A key's contribution to a query's output is p ‖v‖, which for a sigmoid depends on that key and query only: dropping a
set of keys changes the output by at most the sum of their contributions, whatever the other keys are. The weights of a
softmax have a common denominator: dropping a key rescales all others, and a bound requires all keys. Here each query
keeps the given share of its visible keys, those with the largest contributions; softmax with the same budget is
evaluated both rescaled (a softmax over the kept keys) and not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.data.text import TextData, TokenText, load_text
from sigattn.experiments import drawing, intervals, sweep
from sigattn.experiments.ablation import shortened
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting
from sigattn.experiments.intervals import Verdict
from sigattn.models import saving
from sigattn.nn import functional
from sigattn.nn.attention import Attention
from sigattn.nn.functional import MaskSpec
from sigattn.ops import reference
from sigattn.recipes.registry import find_recipe
from sigattn.tasks.language import LanguageModelling

WAYS = ("softmax, not rescaled", "softmax, rescaled", "sigmoid")
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)


@dataclass
class Dropped:
    """Errors of dropping keys, over all calls.

    Attributes:
        error, output: sums of squares. beyond: largest excess of an error over its bound, relative to the largest
            output of the call; values of the order of 1e-7 are rounding.
    """

    error: float = 0.0
    output: float = 0.0
    beyond: float = 0.0


def keep_mask(contribution: Tensor, visible: Tensor, share: float) -> Tensor:
    """Return the mask of kept keys: for each query, the share of visible keys (at least one) that contribute most."""
    budget = (visible.sum(-1, keepdim=True) * share).ceil().clamp(min=1)  # (…, N, 1)
    order = contribution.masked_fill(~visible, -1).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    return (rank < budget) & visible


def attend(
    share: float, rescaled: bool, seen: Dropped, activation: str, query: Tensor, key: Tensor, value: Tensor, p: MaskSpec
) -> Tensor:
    """Return the output of ``mechanism.attend`` without the smallest contributions, and add its errors to ``seen``."""
    problem = functional.problem_of(query, key, value, p)
    weights = reference.attention_weights(problem, activation)  # (B, H, N, M)
    visible = reference.masked_logits(problem, activation)[1]
    norms = value.norm(dim=-1).repeat_interleave(query.shape[1] // value.shape[1], 1)  # (B, H, M)
    contribution = weights * norms.unsqueeze(-2)
    keep = keep_mask(contribution, visible, share)
    whole = reference.combine(problem, weights)
    some = weights.masked_fill(~keep, 0)
    bound = contribution.masked_fill(keep, 0).sum(-1)
    if rescaled:
        some = some / some.sum(-1, keepdim=True)
    out = reference.combine(problem, some)
    difference = (out - whole).norm(dim=-1)  # (B, H, N)
    seen.error += difference.square().sum().item()
    seen.output += whole.square().sum().item()
    beyond = ((difference - bound).max() / whole.norm(dim=-1).max()).item()
    seen.beyond = max(seen.beyond, beyond)
    return out.to(query.dtype)


@contextmanager
def dropping(model: nn.Module, share: float, *, rescaled: bool) -> Iterator[Dropped]:
    """Make every attention layer of a model drop keys in the context; yields the accumulated errors."""
    seen = Dropped()
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    for layer in layers:
        layer.attention_fn = functools.partial(attend, share, rescaled, seen)
    try:
        yield seen
    finally:
        for layer in layers:
            layer.attention_fn = functional.attend


def run(setting: Setting) -> Result:
    """Train both models, and measure errors and bits per byte with dropped keys."""
    context = setting.scaled(32, 256, 2048)
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=context)
    recipe = shortened(recipe, setting.scaled(4, 400, 3000), setting.scaled(2, 16, 16))
    wanted = sweep.make_jobs({"sigmoid": recipe, "softmax": recipe.softmax()}, setting)
    sweep.train_all(setting, wanted)
    text = TextData(TokenText.split(load_text(setting.data), context), context, held_out=setting.scaled(2, 16, 32))
    data: list[dict[str, Any]] = []
    for job in wanted:
        model = saving.load(sweep.model_folder(setting, job)).eval()
        for way in (w for w in WAYS if w.startswith(job.name)):
            for share in setting.scaled((1.0, 0.1), SHARES, SHARES):
                with dropping(model, share, rescaled=way.endswith(", rescaled")) as seen, torch.no_grad():
                    bits = LanguageModelling().evaluate(model, text.validation(8))["bits"]
                data.append(
                    {"way": way, "seed": job.seed, "share": share, "bits": bits,
                     "error": (seen.error / seen.output) ** 0.5, "beyond_bound": seen.beyond}
                )  # fmt: skip
            setting.log(f"{way}, seed {job.seed}")
    return _result(setting, data)


def _result(setting: Setting, data: list[dict[str, Any]]) -> Result:
    shares = sorted({r["share"] for r in data}, reverse=True)

    def of(way: str, share: float, key: str) -> list[float]:
        return [r[key] for r in data if (r["way"], r["share"]) == (way, share)]

    picture, axes = drawing.axes_grid(2, width=5.0, height=3.8)
    colours = dict(zip(WAYS, ("#e69f00", drawing.COLOUR_OF["softmax"], drawing.COLOUR_OF["sigmoid"]), strict=True))
    for axis, key in zip(axes, ("error", "bits"), strict=True):
        for way in WAYS:
            drawing.plot_band(axis, shares, [of(way, s, key) for s in shares], way, colours[way])
        axis.set(xscale="log", xlabel="share of the visible keys that is kept")
    axes[0].set_ylabel("relative error of the outputs")
    axes[1].set_ylabel("held-out bits per byte")
    axes[0].legend(frameon=False)
    tenth = 0.1
    cost = {way: [b - a for a, b in zip(of(way, 1.0, "bits"), of(way, tenth, "bits"), strict=True)] for way in WAYS}
    rescaled = intervals.welch(cost["softmax, rescaled"], cost["sigmoid"])
    plain = intervals.welch(cost["softmax, not rescaled"], cost["sigmoid"])
    no_more: Verdict = "agrees" if rescaled[0] <= rescaled[1] else "differs"
    worst = max(r["beyond_bound"] for r in data if r["way"] == "sigmoid")
    findings = [
        Finding(
            "Sigmoid's error never exceeds the sum of the dropped keys' own contributions.",
            "agrees" if worst < 1e-5 else "differs",
            f"over all queries, layers and budgets, the excess is at most {worst:.1g} of the largest output: rounding",
        ),
        Finding(
            "With a tenth of the keys, sigmoid loses no more than a softmax over the kept keys.",
            no_more if setting.scale != "smoke" else "not shown",
            f"bits lost, sigmoid less softmax, rescaled: {intervals.interval(*rescaled)}; less softmax, not rescaled: "
            f"{intervals.interval(*plain)}",
        ),
    ]
    rows = [
        (way, key, *(intervals.mean_std(of(way, s, k)) for s in shares))
        for way in WAYS
        for key, k in (("error", "error"), ("bits", "bits"))
    ]
    return Result(("", "", *(f"{s:.0%}" for s in shares)), rows, findings, data, picture)


EXPERIMENT = Experiment(
    "dropped-keys",
    "Beyond the paper: leaving out the keys that contribute least",
    "Sect. 4: partial results over disjoint keys add",
    run,
    {"smoke": 0.2, "small": 5.0, "paper": None},
    "1 GPU",
    "2 layers of 64, 256 bytes, 400 steps",
)
