"""Experiments without training: regularity (Fig. 7), the norm at initialisation (App. ASR), FLOPs (Table 1).

python -m experiments regularity | initial-norms | flops
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from experiments import attention_norms, cache, drawing, intervals
from experiments.experiment import Experiment, Finding, Result, Row, Scale, Setting, select
from experiments.intervals import Verdict
from sigattn.theory import regularity

WEIGHTS = {  # standard deviation of the weights of a head of size 16
    "standard deviation 0.02": 0.02,
    "as nn.Linear, variance 1/(3d)": 48**-0.5,
    "variance 1/d": 16**-0.5,
}


def random_head(
    d: int, activation: str, generator: torch.Generator, std: float | None = None, hybrid_norm: bool = False
) -> regularity.Head:
    """Return a head with (d, d) matrices of normal entries; their standard deviation defaults to d^-1/2."""
    std = d**-0.5 if std is None else std
    q, k, v = (std * torch.randn(d, d, generator=generator, dtype=torch.float64) for _ in range(3))
    return regularity.Head(q, k, v, activation, hybrid_norm=hybrid_norm)


def norms_over_length(
    lengths: tuple[int, ...] = (8, 16, 32, 64, 128, 256),
    trials: int = 10,
    std: float | None = None,
    tolerance: float = 1e-6,
) -> list[dict[str, Any]]:
    """Return the data of the figure "empirical regularity": Jacobian norms of sigmoid and softmax attention over n.

    Tokens of 16 numbers are standard normal, heads come from ``random_head``, with and without hybrid-norm, b = -log n.

    Returns:
        Rows with n, trial, activation, hybrid_norm, norm and bound (None with hybrid-norm).
    """
    rows: list[dict[str, Any]] = []
    for n in lengths:
        for trial in range(trials):
            generator = torch.Generator().manual_seed(trial)
            drawn = random_head(16, "sigmoid", generator, std)
            x = torch.randn(n, 16, generator=generator, dtype=torch.float64)  # a generator of the same seed repeats W_q
            for activation, bound in (("sigmoid", regularity.sigmoid_bound), ("softmax", regularity.softmax_bound)):
                for hybrid in (False, True):
                    head = replace(drawn, activation=activation, hybrid_norm=hybrid)
                    norm = regularity.jacobian_norm_matrix_free(head, x, tolerance)
                    row = {"n": n, "trial": trial, "activation": activation, "hybrid_norm": hybrid, "norm": norm}
                    rows.append({**row, "bound": None if hybrid else bound(head, x)})
    return rows


def measure_jacobian_norms(setting: Setting) -> Result:
    """Measure Jacobian norms over n, in ten trials each, with the weights of three initialisations."""
    lengths = setting.scaled((8, 16), (8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128, 256, 512, 1024))
    figure, axes = drawing.axes_grid(2, len(WEIGHTS), width=5.0)
    data, rows = [], []
    for i, (weights, std) in enumerate(WEIGHTS.items()):
        found = norms_over_length(lengths, setting.scaled(1, 10, 10), std, setting.scaled(1e-2, 1e-6, 1e-6))
        data += [{"weights": weights, **row} for row in found]
        plot_jacobian_norms(axes[2 * i : 2 * i + 2], found)
        axes[2 * i].set_ylabel(f"Jacobian norm, {weights.partition(',')[0]}")
        for hybrid in (False, True):
            for activation in ("softmax", "sigmoid"):
                values = [select(found, "norm", activation=activation, hybrid_norm=hybrid, n=n) for n in lengths]
                cells = (intervals.mean_std(v) for v in values)
                rows.append((weights, activation, "hybrid-norm" if hybrid else "alone", *cells))
    drawing.band_legend(axes[0])
    return Result(("weights", "", "", *(f"n = {n}" for n in lengths)), rows, data, figure)


def plot_jacobian_norms(axes: Sequence[Any], data: Sequence[dict[str, Any]]) -> None:
    """Plot rows of ``norms_over_length`` over n on two axes, without and with hybrid-norm; mean bounds are dashed."""
    lengths = sorted({row["n"] for row in data})
    for axis, hybrid in zip(axes, (False, True), strict=True):
        for activation in ("softmax", "sigmoid"):
            colour = drawing.COLOUR_OF[activation]
            curve = [row for row in data if (row["activation"], row["hybrid_norm"]) == (activation, hybrid)]
            norms, bounds = ([[r[key] for r in curve if r["n"] == n] for n in lengths] for key in ("norm", "bound"))
            width = 1.4 if activation == "sigmoid" else 4.0  # softmax stays visible below sigmoid where they are equal
            drawing.plot_band(axis, lengths, norms, activation, colour, linewidth=width)
            if not hybrid:
                means = [statistics.mean(b) for b in bounds]
                axis.plot(lengths, means, color=colour, linestyle="--", linewidth=1, label=f"{activation}, bound")
        axis.set(xscale="log", yscale="log", xlabel="tokens n")
        axis.set_title("with hybrid-norm" if hybrid else "without hybrid-norm")


def judge_jacobian_norms(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Check every trial of every initialisation; the paper does not state its own.

    Activations, and heads with and without hybrid-norm, have the same tokens and weights in a trial.
    """
    ratios, lower, reduced = {}, {}, {}
    for weights in WEIGHTS:
        rows = [row for row in data if row["weights"] == weights]
        ratios[weights] = [row["norm"] / row["bound"] for row in rows if row["bound"] is not None]
        sigmoid, softmax = (select(rows, "norm", activation=a) for a in ("sigmoid", "softmax"))
        lower[weights] = [a < b for a, b in zip(sigmoid, softmax, strict=True)]
        hybrid, alone = (select(rows, "norm", hybrid_norm=h) for h in (True, False))
        reduced[weights] = [a < b for a, b in zip(hybrid, alone, strict=True)]
    return [
        Finding(
            "Empirical norms lie well below the bounds (at most half of them).",
            _verdict_over_weights([[ratio <= 0.5 for ratio in found] for found in ratios.values()]),
            "largest ratio of norm and bound: " + "; ".join(f"{max(r):.2g} ({w})" for w, r in ratios.items()),
        ),
        Finding(
            "With b = -log n, sigmoid's norms are lower than softmax's, with and without hybrid-norm.",
            _verdict_over_weights(list(lower.values())),
            _shares(lower),
        ),
        Finding(
            "Hybrid-norm lowers the norms of both, compared with attention alone.",
            _verdict_over_weights(list(reduced.values())),
            _shares(reduced),
        ),
    ]


def _shares(found: dict[str, list[bool]]) -> str:
    return "trials: " + "; ".join(f"{sum(held)} of {len(held)} ({weights})" for weights, held in found.items())


def _verdict_over_weights(found: Sequence[Sequence[bool]]) -> Verdict:
    """Return the verdict on a claim from whether it holds in each trial of each initialisation."""
    whole = [all(held) for held in found]
    return "agrees" if all(whole) else "depends" if any(whole) else "differs"


def measure_initial_norms(setting: Setting) -> Result:
    """Measure the attention norms that App. ASR, "Results and Ablations", gives in its text."""
    num_layers, embed_dim, seconds = setting.scaled((1, 64, 1.0), (36, 768, 15.0), (36, 768, 15.0))
    positions, kinds = attention_norms.POSITIONS, attention_norms.KINDS
    data = []
    for seed in range(setting.seeds):
        config = attention_norms.AttentionNormsConfig(
            num_layers=num_layers, embed_dim=embed_dim, seconds=seconds, seed=seed
        )

        def measure(config: attention_norms.AttentionNormsConfig = config) -> list[Row]:
            def show(position: str, kind: str, norm: float) -> None:
                setting.log(f"seed {config.seed}, {position}, {kind}: {norm:,.0f}")

            norms = attention_norms.measure_attention_norms(config, show)
            return [{"position": p, "kind": k, "seed": config.seed, "norm": v} for (p, k), v in norms.items()]

        data += cache.Job(setting.folder / "measured" / f"{seed}.json", asdict(config), measure).run()
    rows = [(p, *(_thousands(select(data, "norm", position=p, kind=k)) for k in kinds)) for p in positions]
    return Result(("position", *kinds), rows, data)


def _thousands(values: Sequence[float]) -> str:
    return ", ".join(f"{value:,.0f}" for value in values)


def judge_initial_norms(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Check the order of the norms in every seed, and their size."""
    norms = {
        kind: [select(data, "norm", position=p, kind=kind) for p in attention_norms.POSITIONS]
        for kind in attention_norms.KINDS
    }
    softmax, no_bias, log_bias = norms.values()
    ordered = [cape > rope > alibi for cape, rope, alibi in zip(*no_bias, strict=True)]
    most = max(max(values) for values in softmax)
    listed = ", ".join(f"{p} {_thousands(v)}" for p, v in zip(attention_norms.POSITIONS, no_bias, strict=True))
    return [
        Finding(
            "Without a bias, CAPE > RoPE > ALiBi (80k, 40k, 20k).",
            "not shown" if len(ordered) < 2 else "agrees" if all(ordered) else "depends" if any(ordered) else "differs",
            f"in {sum(ordered)} of {len(ordered)} seeds: {listed}; CAPE and RoPE are at the ceiling, ½ n^1.5 times the "
            "norm of the mean value, which is reached when all weights are ½",
        ),
        Finding(
            "Without a bias they are far above softmax's (200).",
            "agrees" if min(min(values) for values in no_bias) > 10 * most else "differs",
            f"at least {min(min(values) for values in no_bias):,.0f}; softmax at most {most:,.0f}",
        ),
        Finding(
            "b = -log n brings all of them near softmax.",
            "agrees" if max(max(values) for values in log_bias) < 3 * most else "differs",
            f"at most {max(max(values) for values in log_bias):,.0f}",
        ),
    ]


def count_operations(_: Setting) -> Result:
    """Compute Table 1 at the paper's sizes."""
    rows, data = [], []
    for n, d in ((2048, 64), (4096, 64), (4096, 128)):
        for causal in (False, True):
            keys = (n + 1) / 2 if causal else float(n)  # visible to a token, on average: Table 1's c · n
            counts = {
                "L = Q Kᵀ": 2 * keys * d,
                "softmax(L)": 5 * keys,  # maximum and its subtraction (2), exponentiation, summation, division
                "σ(L + b)": 5 * keys,  # bias, sign, exponentiation, addition, division
                "P V": 2 * keys * d,  # which Table 1 leaves out
            }
            rows.append((f"{n:,}", str(d), "causal" if causal else "full", *(f"{v:,.0f}" for v in counts.values())))
            data.append({"n": n, "d": d, "causal": causal, **counts})
    return Result(("n", "d", "", "L = Q Kᵀ", "softmax(L)", "σ(L + b)", "P V"), rows, data)


def judge_operations(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare the counts of both activations with each other and with the two products'."""
    same = all(row["softmax(L)"] == row["σ(L + b)"] for row in data)
    most = max(row["σ(L + b)"] / (row["L = Q Kᵀ"] + row["P V"]) for row in data)
    return [
        Finding(
            "Softmax and sigmoid take the same number of operations per token and head, few next to the products.",
            "agrees" if same else "differs",
            f"equal; at most {most:.1%} of the two products' (Table 1 leaves out P V)",
        )
    ]


EXPERIMENTS = (
    Experiment(
        "flops",
        "Operations per token and head",
        "Table 1",
        count_operations,
        judge_operations,
        {"smoke": 0.0, "small": 0.0, "paper": 0.0},
        takes=(),
    ),
    Experiment(
        "regularity",
        "Jacobian norms of attention over the length",
        "Fig. 7",
        measure_jacobian_norms,
        judge_jacobian_norms,
        {"smoke": 0.1, "small": 0.5, "paper": 10.0},
        differs="up to n = 256",
        takes=(),
    ),
    Experiment(
        "initial-norms",
        "Attention norms of the speech transformer before training",
        "App. ASR, Results and Ablations",
        measure_initial_norms,
        judge_initial_norms,
        {"smoke": 0.1, "small": 3.0, "paper": 3.0},
        differs="noise that is as smooth as speech instead of recordings; nothing else",
        takes=("seeds",),
    ),
)
