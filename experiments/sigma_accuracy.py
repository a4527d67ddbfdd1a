"""Beyond the paper: effect of the accuracy of σ on training, over the length.

    python -m experiments sigma-accuracy --scale small

The paper's kernel computes σ(x) as ½ + ½ tanh(x/2) with the GPU's approximate tanh, whose error is absolute, while
b = -log n makes weights of 1/n. The relevant quantity is therefore (error of a weight) · n. Here the tanh is rounded to
a grid of 2^-bits in an otherwise exact kernel, forward and backward. By published measurements of such kernels (a few
per cent at 16k tokens, tens of per cent at 64k) the GPU's tanh near -1 has about 17 bits; training at n tokens with
fewer bits therefore emulates training at n · 2^(17 - bits) tokens with the GPU's tanh. Differences are paired by seed:
runs of one seed have the same initial weights and batches.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments import drawing, intervals, sweep
from experiments.experiment import LANGUAGE, Experiment, Finding, Result, Row, Scale, Setting
from experiments.instrumentation import replace_attention
from sigattn.models.language import LanguageModelConfig
from sigattn.nn import functional
from sigattn.ops import reference
from sigattn.recipes import find_recipe
from sigattn.tasks.language import LanguageModelling

HARDWARE_BITS = 17
BITS = (17, 13, 11, 10, 9, 8)
CONTEXT = 256


def coarse_sigmoid(logits: Tensor, bits: int) -> Tensor:
    """Return P = ½ + ½ tanh(x/2), the tanh rounded to a grid of 2^-bits; its derivative is P (1 - P), as in kernels."""
    exact = torch.tanh(logits.detach() / 2)
    p = 0.5 + 0.5 * torch.round(exact * 2.0**bits) * 2.0**-bits
    return p + (p * (1 - p)) * (logits - logits.detach())


def attend(bits: int, _: str, query: Tensor, key: Tensor, value: Tensor, pattern: functional.MaskSpec) -> Tensor:
    """Return the output of ``functional.attend`` with the coarse σ; materialises all weights."""
    problem = functional.make_problem(query, key, value, pattern)
    logits, visible = reference.masked_logits(problem)
    weights = coarse_sigmoid(logits, bits).masked_fill(~visible, 0)
    return reference.combine(problem, weights).to(query.dtype)


@dataclass(frozen=True, kw_only=True)
class CoarseLanguageModelling(LanguageModelling):
    """Language modelling task whose model computes σ by ``coarse_sigmoid``.

    Attributes:
        bits: number of bits of the tanh.
    """

    bits: int

    def build(self, model: LanguageModelConfig) -> nn.Module:
        """Build the language model and replace the attention of its layers."""
        module = super().build(model)
        replace_attention(module, functools.partial(attend, self.bits))
        return module


def relative_errors(n: int, bits: int, generator: torch.Generator) -> dict[str, float]:
    """Return the errors of output and dQ with a coarse σ, and with exact weights rounded to bfloat16.

    The inputs are 64 random queries and n random keys, b = -log n; errors are relative in the Euclidean norm.
    """
    q, g = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64).unbind()
    k, v = torch.randn(2, n, 64, generator=generator, dtype=torch.float64).unbind()
    logits = q @ k.mT / 8 - math.log(n)

    def both(p: Tensor) -> tuple[Tensor, Tensor]:
        return p @ v, (p * (1 - p) * (g @ v.mT)) @ k / 8

    exact = both(logits.sigmoid())
    variants = {"coarse": coarse_sigmoid(logits, bits), "bfloat16": logits.sigmoid().bfloat16().double()}
    found = {}
    for name, p in variants.items():
        for tensor, a, b in zip(("output", "dQ"), both(p), exact, strict=True):
            found[f"{name} {tensor}"] = ((a - b).norm() / b.norm()).item()
    return found


def measure_effect_on_training(setting: Setting) -> Result:
    """Train with decreasing numbers of bits; compute the error of a single call over n."""
    bits = setting.scaled((17, 8), BITS, BITS)
    context = setting.scaled(32, CONTEXT, CONTEXT)
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=context)
    recipe = sweep.shortened(recipe, setting.steps(2, 200, 600), setting.scaled(2, 8, 16))
    coarse = {f"{b} bits": replace(recipe, task=CoarseLanguageModelling(bits=b)) for b in bits}
    outcomes = sweep.train_variants(setting, {"exact": recipe, **coarse})
    final = {name: [o.final["bits"] for o in found] for name, found in outcomes.items()}
    generator = torch.Generator().manual_seed(0)
    lengths = [4**i for i in setting.scaled(range(4, 6), range(4, 10), range(4, 10))]
    errors = [{"n": n, **relative_errors(n, HARDWARE_BITS, generator)} for n in lengths]
    emulated = {b: context * 2 ** (HARDWARE_BITS - b) for b in bits}
    worse = {b: intervals.paired(final["exact"], final[f"{b} bits"]) for b in bits}
    rows = [("accurate", "–", intervals.mean_std(final["exact"]), "")] + [
        (f"{b} bits", f"{emulated[b]:,}", intervals.mean_std(final[f"{b} bits"]), str(worse[b])) for b in bits
    ]
    data: list[dict[str, Any]] = [{"sigma": name, "bits_per_byte": values} for name, values in final.items()]
    columns = ("σ", "emulated n", "held-out bits per byte", "less those of accurate σ")
    return Result(columns, rows, [*data, *errors], _figure(errors, emulated, final))


def judge_effect_on_training(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the bits per byte of each precision with those of an accurate σ, and the errors of one call."""
    final = {row["sigma"]: row["bits_per_byte"] for row in data if "sigma" in row}
    errors = [row for row in data if "n" in row]
    worse = {int(n.split()[0]): intervals.paired(final["exact"], v) for n, v in final.items() if n != "exact"}
    checked = 13 if 13 in worse else max(worse)
    # with fewer bits than ``first`` all must be worse: of six comparisons one may be so by chance
    found = itertools.takewhile(lambda b: worse[b].delta > worse[b].margin, sorted(worse))
    first = max(found, default=None)
    exceeding = next((e["n"] for e in errors if e["coarse dQ"] > e["bfloat16 dQ"]), None)
    return [
        Finding(
            "At the paper's lengths (4,096 and below) the kernel's error has no measurable effect on training.",
            worse[checked].verdict_equal(0.05),
            f"{checked} bits: held-out bits per byte less those of an accurate σ {worse[checked]}, tolerance 0.05",
        ),
        Finding(
            "At some length it has.",
            "not shown" if first is None else "agrees",
            "no number of bits made a difference"
            if first is None
            else f"from {first} bits on: {worse[first]} bits per byte",
        ),
        Finding(
            "The error of one call exceeds that of bfloat16 weights from some length on.",
            "not shown" if exceeding is None else "agrees",
            "at no length measured" if exceeding is None else f"in dQ from n = {exceeding:,} on",
        ),
    ]


def _figure(errors: list[dict[str, Any]], emulated: dict[int, int], final: dict[str, list[float]]) -> Any:
    figure, (error_axis, training_axis) = drawing.axes_grid(2, width=5.2, height=3.8)
    lengths = [e["n"] for e in errors]
    for tensor, style in (("output", "-"), ("dQ", "--")):
        for variant, colour in (("coarse", drawing.COLOUR_OF["sigmoid"]), ("bfloat16", "#999999")):
            label = f"{tensor}, {'tanh of 17 bits' if variant == 'coarse' else 'weights in bfloat16'}"
            error_axis.plot(lengths, [e[f"{variant} {tensor}"] for e in errors], style, color=colour, label=label)
    error_axis.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="relative error of one call")
    error_axis.legend(frameon=False, fontsize=8)
    values = [final[f"{b} bits"] for b in emulated]
    drawing.plot_band(training_axis, list(emulated.values()), values, "coarse σ", drawing.COLOUR_OF["sigmoid"])
    training_axis.axhline(statistics.mean(final["exact"]), color="#999999", linestyle=":", label="accurate σ")
    training_axis.set(xscale="log", xlabel="emulated length, tokens", ylabel="held-out bits per byte")
    drawing.band_legend(training_axis)
    return figure


EXPERIMENTS = (
    Experiment(
        "sigma-accuracy",
        "Beyond the paper: an accurate σ, or tanh's, in training",
        "App. FlashSigmoid computes σ by an approximate tanh",
        measure_effect_on_training,
        judge_effect_on_training,
        {"smoke": 0.2, "small": 6.0, "paper": None},
        "2 CPU cores",
        "an emulation: a grid of 2^-bits replaces the GPU's tanh.approx, whose own error python -m benchmarks accuracy "
        "measures on a GPU",
        takes=LANGUAGE,
        kind="beyond",
    ),
)
