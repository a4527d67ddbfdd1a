"""Experiments without training: regularity (Fig. 8), the norm at initialisation (App. ASR), FLOPs (Table 1).

sigattn reproduce regularity | initial-norms | flops
"""

from __future__ import annotations

from sigattn.experiments import attention_norms, drawing, intervals
from sigattn.experiments.experiment import Experiment, Finding, Result, Setting, select
from sigattn.experiments.theory_report import plot_jacobian_norms
from sigattn.theory import flops, regularity


def measure_jacobian_norms(setting: Setting) -> Result:
    """Measure Jacobian norms over n, in ten trials each."""
    lengths = setting.scaled((8, 16), (8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128, 256, 512, 1024))
    data = regularity.norms_over_length(lengths, setting.scaled(2, 10, 10), std=0.02)
    figure, axes = drawing.axes_grid(2)
    plot_jacobian_norms(axes, data)
    axes[0].set_ylabel("spectral norm of the Jacobian")
    axes[0].legend(frameon=False, loc="lower right")
    rows = []
    for hybrid in (False, True):
        for activation in ("softmax", "sigmoid"):
            values = [select(data, "norm", activation=activation, hybrid_norm=hybrid, n=n) for n in lengths]
            cells = (intervals.mean_std(v) for v in values)
            rows.append((activation, "hybrid-norm" if hybrid else "alone", *cells))
    below = all(row["norm"] <= row["bound"] for row in data if row["bound"] is not None)
    # compared trial by trial, because both activations have the same tokens and weights in a trial
    pairs = list(zip(*(select(data, "norm", activation=a) for a in ("sigmoid", "softmax")), strict=True))
    lower = sum(sigmoid < softmax for sigmoid, softmax in pairs)
    findings = [
        Finding(
            "Empirical norms lie well below the bounds.",
            "agrees" if below else "differs",
            "in every trial" if below else "not in every trial",
        ),
        Finding(
            "With b = -log n, sigmoid's norms are lower than softmax's, with and without hybrid-norm.",
            "agrees" if lower == len(pairs) else "differs",
            f"in {lower} of {len(pairs)} trials (weights of standard deviation 0.02; with variance 1/d the order is "
            "reversed without hybrid-norm, docs/paper-notes.md)",
        ),
    ]
    return Result(("", "", *(f"n = {n}" for n in lengths)), rows, findings, data, figure)


def measure_initial_norms(setting: Setting) -> Result:
    """Measure the attention norms that App. ASR, "Results and Ablations", gives in its text."""
    num_layers, embed_dim, seconds = setting.scaled((1, 64, 1.0), (36, 768, 15.0), (36, 768, 15.0))
    config = attention_norms.AttentionNormsConfig(num_layers=num_layers, embed_dim=embed_dim, seconds=seconds)
    norms = attention_norms.measure_attention_norms(config, lambda p, k, norm: setting.log(f"{p}, {k}: {norm:,.0f}"))
    positions, kinds = attention_norms.POSITIONS, attention_norms.KINDS
    rows = [(p, *(f"{norms[p, kind]:,.0f}" for kind in kinds)) for p in positions]
    softmax, no_bias, log_bias = ([norms[p, kind] for p in positions] for kind in kinds)
    findings = [
        Finding(
            "Without a bias, CAPE > RoPE > ALiBi (80k, 40k, 20k), and softmax is far below (200).",
            "agrees" if no_bias[0] > no_bias[1] > no_bias[2] > 10 * max(softmax) else "differs",
            f"{' > '.join(f'{x:,.0f}' for x in no_bias)}; softmax at most {max(softmax):,.0f}",
        ),
        Finding(
            "b = -log n brings all of them near softmax.",
            "agrees" if max(log_bias) < 3 * max(softmax) else "differs",
            ", ".join(f"{x:,.0f}" for x in log_bias),
        ),
    ]
    data = [{"position": p, "kind": k, "norm": v} for (p, k), v in norms.items()]
    return Result(("position", *kinds), rows, findings, data)


def count_operations(_: Setting) -> Result:
    """Compute Table 1 at the paper's sizes."""
    rows, data = [], []
    for n, d in ((2048, 64), (4096, 64), (4096, 128)):
        for causal in (False, True):
            counts = {
                "L = Q Kᵀ": flops.logits(n, d, causal),
                "softmax(L)": flops.softmax(n, causal),
                "σ(L + b)": flops.sigmoid(n, causal),
                "P V": flops.values(n, d, causal),
            }
            rows.append((f"{n:,}", str(d), "causal" if causal else "full", *(f"{v:,.0f}" for v in counts.values())))
            data.append({"n": n, "d": d, "causal": causal, **counts})
    same = all(row["softmax(L)"] == row["σ(L + b)"] for row in data)
    most = max(row["σ(L + b)"] / (row["L = Q Kᵀ"] + row["P V"]) for row in data)
    finding = Finding(
        "Softmax and sigmoid take the same number of operations per token and head, few compared with the products.",
        "agrees" if same else "differs",
        f"equal; at most {most:.1%} of the two products' (Table 1 leaves out P V)",
    )
    return Result(("n", "d", "", "L = Q Kᵀ", "softmax(L)", "σ(L + b)", "P V"), rows, [finding], data)


EXPERIMENTS = (
    Experiment(
        "flops",
        "Operations per token and head",
        "Table 1",
        count_operations,
        {"smoke": 0.0, "small": 0.0, "paper": 0.0},
    ),
    Experiment(
        "regularity",
        "Jacobian norms of attention over the length",
        "Fig. 8",
        measure_jacobian_norms,
        {"smoke": 0.1, "small": 0.5, "paper": 10.0},
        differs="up to n = 256",
    ),
    Experiment(
        "initial-norms",
        "Attention norms of the speech transformer before training",
        "App. ASR, Results and Ablations",
        measure_initial_norms,
        {"smoke": 0.1, "small": 1.0, "paper": 1.0},
        differs="noise that is as smooth as speech instead of recordings; nothing else",
    ),
)
