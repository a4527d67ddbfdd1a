"""Speed of attention alone, followed by a norm, and in a vision transformer, on this machine (App. FlashSigmoid).

    sigattn reproduce attention-times | norm-crossing | vit-times       (--scale paper: 1 GPU of 80 GB)

Expected on an H100, sigmoid compared with FlashAttention-2's softmax: 17 % less time forward, 7 % forward and backward;
with a LayerNorm it is faster from T* = 1,024 (causal) to 10,000 tokens on; a ViT gains 4 to 8 % in inference and 3 to
4 % in training, as the kernels' gain and their share of the total predict. The baseline here is PyTorch's own softmax
attention, whose kernel on a GPU is FlashAttention-2 or cuDNN's; ``sigattn bench kernels`` has more baselines.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import sigattn
from sigattn.bench import reference
from sigattn.bench.hybridnorm import crossing_length
from sigattn.bench.inputs import Inputs, Options
from sigattn.bench.timing import time_calls
from sigattn.experiments import cache, drawing
from sigattn.experiments.experiment import Experiment, ExperimentError, Finding, Result, Setting
from sigattn.experiments.intervals import Verdict
from sigattn.models.vision import ViT, ViTConfig

HEADS, HEAD_DIM = 12, 64  # the paper's
Activation = Literal["softmax", "sigmoid"]
ACTIVATIONS: tuple[Activation, ...] = ("softmax", "sigmoid")
PASSES = ("forward", "forward and backward")
TOKENS = {4096: 64, 8100: 90, 10_000: 100}  # side of the images, in patches of one pixel


def device_and_dtype(setting: Setting) -> tuple[torch.device, torch.dtype]:
    """Return a GPU and bfloat16, or without a GPU the CPU and float32.

    Raises:
        ExperimentError: at the paper's scale, without a GPU.
    """
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    if setting.scale == "paper":
        raise ExperimentError("speed at the paper's scale is measured on a GPU, and this machine has none")
    return torch.device("cpu"), torch.float32


def attend(mechanism: Activation, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the attention output; all tensors are (B, H, n, D)."""
    if mechanism == "softmax":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return sigattn.sigmoid_attention(q, k, v, is_causal=causal, bias=-math.log(k.shape[2]))


def problem_of(setting: Setting, n: int, causal: bool, heads: int = HEADS) -> Inputs:
    """Return random query, key, value and gradient of the output, (1, H, n, D) each."""
    device, dtype = device_and_dtype(setting)
    generator = torch.Generator().manual_seed(n)
    made = [torch.randn(1, heads, n, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(4)]
    return Inputs(made[0], made[1], made[2], made[3], Options(-math.log(n), causal, None))


def check(mechanism: Activation, problem: Inputs) -> None:
    """Compare outputs and gradients with float64, before timing.

    Raises:
        WrongResultError: if an error exceeds the tolerance of the dtype.
    """
    q, k, v = problem.leaves()
    out = attend(mechanism, q, k, v, problem.options.causal)
    gradients = torch.autograd.grad(out, (q, k, v), problem.grad_out)
    reference.check(problem, mechanism == "softmax", out.detach(), gradients)


def time_attention(setting: Setting, n: int, causal: bool, heads: int = HEADS, layers: int = 1) -> list[dict[str, Any]]:
    """Measure times of both mechanisms in ms, forward, and forward and backward."""
    problem = problem_of(setting, n, causal, heads)
    for mechanism in ACTIVATIONS:
        check(mechanism, problem)

    def forward(mechanism: Activation) -> None:
        with torch.no_grad():
            for _ in range(layers):
                attend(mechanism, problem.query, problem.key, problem.value, causal)

    def both(mechanism: Activation) -> None:
        for _ in range(layers):
            q, k, v = problem.leaves()
            torch.autograd.grad(attend(mechanism, q, k, v, causal), (q, k, v), problem.grad_out)

    found = []
    for which, call in zip(PASSES, (forward, both), strict=True):
        calls: dict[str, Callable[[], object]] = {m: functools.partial(call, m) for m in ACTIVATIONS}
        for name, seconds, ratios in time_calls(calls, setting.scaled(1, 5, 9), setting.scaled(0.0, 0.02, 0.02)):
            found.append(
                {"n": n, "causal": causal, "pass": which, "mechanism": name, "ms": seconds * 1e3,
                 "time_over_softmax": 1 / ratios["softmax"]}
            )  # fmt: skip
    return found


def measure_attention_times(setting: Setting) -> Result:
    """Measure both passes, full and causal, over the length."""
    lengths = setting.scaled((32, 64), (64, 256, 1024, 2048, 4096, 8192), (64, 256, 1024, 4096, 16_384, 32_768, 78_000))
    rows = [
        r
        for n in lengths
        for causal in (False, True)
        for r in _once(setting, f"attention-{n}-{causal}", functools.partial(time_attention, setting, n, causal))
    ]
    picture, axes = drawing.axes_grid(2, width=5.0, height=3.8)
    cells, findings = [], []
    for axis, causal in zip(axes, (False, True), strict=True):
        for which, colour in zip(PASSES, (drawing.COLOUR_OF["sigmoid"], drawing.COLOUR_OF["softmax"]), strict=True):
            gains = [100 * (1 - _ratio(rows, n, causal, which)) for n in lengths]
            axis.plot(lengths, gains, marker="o", ms=4, color=colour, label=which)
            cells.append(("causal" if causal else "full", which, *(f"{g:+.0f} %" for g in gains)))
            mean = statistics.mean(gains)
            paper = 17.0 if which == PASSES[0] else 6.0
            findings.append(
                Finding(
                    f"{'Causal' if causal else 'Full'} attention, {which}: sigmoid takes less time than softmax, "
                    f"averaged over n (about {paper:.0f} % less in the paper).",
                    "not shown" if setting.scale == "smoke" else "agrees" if mean > 0 else "differs",
                    f"{mean:.0f} % less on {_device_name(setting)}, {'causal' if causal else 'full'}; "
                    f"at the longest {gains[-1]:.0f} %",
                )
            )
        axis.axhline(0, color="#999", linewidth=0.8)
        axis.set(xscale="log", xlabel="tokens n", title="causal" if causal else "full")
    axes[0].set_ylabel("time saved compared with softmax, %")
    axes[0].legend(frameon=False)
    return Result(("", "", *(f"n = {n:,}" for n in lengths)), cells, findings, rows, picture)


def time_normed(setting: Setting, n: int, causal: bool, affine: bool) -> list[dict[str, Any]]:
    """Measure forward times of sigmoid attention followed by a LayerNorm, relative to softmax without one."""
    problem = problem_of(setting, n, causal)
    width, q = HEADS * HEAD_DIM, problem.query
    weight = torch.ones(width, device=q.device, dtype=q.dtype) if affine else None
    shift = torch.zeros(width, device=q.device, dtype=q.dtype) if affine else None

    def normed() -> None:
        out = attend("sigmoid", q, problem.key, problem.value, causal)
        F.layer_norm(out.transpose(1, 2).flatten(2), (width,), weight, shift)

    def softmax() -> None:
        attend("softmax", q, problem.key, problem.value, causal)

    with torch.no_grad():
        calls: dict[str, Callable[[], object]] = {"softmax": softmax, "normed": normed}
        timings = time_calls(calls, setting.scaled(1, 5, 9), setting.scaled(0.0, 0.02, 0.02))
    return [
        {"n": n, "causal": causal, "affine": affine, "ms": seconds * 1e3, "time_over_softmax": 1 / ratios["softmax"]}
        for name, seconds, ratios in timings
        if name == "normed"
    ]


def measure_norm_crossing(setting: Setting) -> Result:
    """Measure T*, the length from which on sigmoid followed by a norm is faster than softmax."""
    lengths = setting.scaled(
        (32, 64), (64, 256, 1024, 2048, 4096, 8192), (64, 576, 1024, 2048, 5184, 10_000, 16_384, 60_000)
    )
    rows, cells, found = [], [], {}
    for causal in (False, True):
        for affine in (True, False):
            own = [
                r
                for n in lengths
                for r in _once(
                    setting,
                    f"normed-{n}-{causal}-{affine}",
                    functools.partial(time_normed, setting, n, causal, affine),
                )
            ]
            rows += own
            start = crossing_length([(r["n"], r["time_over_softmax"]) for r in own])
            found[causal, affine] = start
            after = [100 * (1 - r["time_over_softmax"]) for r in own if start is not None and r["n"] >= start]
            names = ("causal" if causal else "full", "with" if affine else "without")
            cells.append(
                (*names, "–" if start is None else f"{start:,}", f"{statistics.mean(after):.1f} %" if after else "–")
            )
    seen = ", ".join(f"{c[0]}, {c[1]} affine: {c[2]}" for c in cells)
    everywhere: Verdict = "agrees" if all(v is not None for v in found.values()) else "differs"
    findings = [
        Finding(
            "There is a length T* from which sigmoid with a LayerNorm after it is faster than softmax.",
            "not shown" if setting.scale == "smoke" else everywhere,
            f"on {_device_name(setting)}: {seen}",
        )
    ]
    return Result(("", "affine projection", "T*", "mean gain from there on"), cells, findings, rows)


def time_vit(setting: Setting, tokens: int, side: int) -> dict[str, Any]:
    """Measure times of both mechanisms in ms: the model's inference and training step, and attention alone."""
    device, dtype = device_and_dtype(setting)
    layers, heads = setting.scaled((1, 1), (2, 3), (12, 12))
    models = {}
    for mechanism in ACTIVATIONS:
        torch.manual_seed(0)
        config = ViTConfig(
            image_size=side,
            patch_size=1,
            num_layers=layers,
            embed_dim=heads * HEAD_DIM,
            num_heads=heads,
            activation=mechanism,
        )
        models[mechanism] = ViT(config).to(device)
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    label = torch.zeros(1, dtype=torch.int64, device=device)

    def inference(mechanism: Activation) -> None:
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            models[mechanism](image)

    def training(mechanism: Activation) -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(models[mechanism](image), label)
        loss.backward()
        models[mechanism].zero_grad()

    n = models["sigmoid"].config.num_tokens
    found: dict[str, Any] = {"tokens": tokens, "n": n, "layers": layers}
    alone = time_attention(setting, n, False, heads, layers)
    for name, call, which in (("inference", inference, PASSES[0]), ("training", training, PASSES[1])):
        calls: dict[str, Callable[[], object]] = {m: functools.partial(call, m) for m in ACTIVATIONS}
        for key, seconds, ratios in time_calls(calls, setting.scaled(1, 5, 9), 0.0):
            found[f"{name}_{key}_ms"] = seconds * 1e3
            if key == "sigmoid":
                found[f"{name}_saved"] = 1 - 1 / ratios["softmax"]
        for r in (r for r in alone if r["pass"] == which):
            found[f"{name}_{r['mechanism']}_attention_ms"] = r["ms"]
    return found


def measure_vit_times(setting: Setting) -> Result:
    """Compare measured gains with those predicted from the attention's share, s = (τ_sm - τ_σ) / (τ_sm + τ)."""
    sides = setting.scaled({16: 4}, TOKENS, TOKENS)
    data = [
        _once(setting, f"vit-{tokens}", functools.partial(time_vit, setting, tokens, side))
        for tokens, side in sides.items()
    ]
    rows, wide = [], 0.0
    faster = True
    for r in data:
        for name in ("inference", "training"):
            soft, sigm = (r[f"{name}_{m}_attention_ms"] for m in ACTIVATIONS)
            whole = r[f"{name}_softmax_ms"]
            predicted = (soft - sigm) / whole
            saved = r[f"{name}_saved"]
            wide = max(wide, abs(predicted - saved))
            faster = faster and saved > 0
            kernel, wall = f"{soft:.3g} → {sigm:.3g} ({sigm / soft - 1:+.0%})", f"{whole:.3g} ({-saved:+.1%})"
            rows.append((f"{r['tokens']:,}", name, kernel, wall, f"{soft / whole:.0%}", f"{-predicted:+.1%}"))
    findings = [
        Finding(
            "A vision transformer gains from the faster kernel in inference and in training.",
            "not shown" if setting.scale == "smoke" else "agrees" if faster else "differs",
            f"on {_device_name(setting)}: " + ", ".join(f"{row[0]} tokens, {row[1]}: {row[3]}" for row in rows),
        ),
        Finding(
            "The kernels' gain and their share of the whole predict the gain of the whole.",
            "not shown" if setting.scale == "smoke" else "agrees" if wide < 0.05 else "differs",
            f"within {100 * wide:.1f} points of the measured gain",
        ),
    ]
    columns = ("tokens", "", "attention, softmax → sigmoid, ms", "whole, softmax, ms (sigmoid)", "share", "predicted")
    return Result(columns, rows, findings, data)


def _once(setting: Setting, name: str, measure: Callable[[], Any]) -> Any:
    setting.log(name)
    about = {"scale": setting.scale, "device": _device_name(setting), "torch": torch.__version__}
    return cache.memoize(setting.folder / "measured" / f"{name}.json", about, measure)


def _device_name(setting: Setting) -> str:
    device, dtype = device_and_dtype(setting)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def _ratio(rows: list[dict[str, Any]], n: int, causal: bool, which: str) -> float:
    chosen = [r for r in rows if (r["n"], r["causal"], r["pass"], r["mechanism"]) == (n, causal, which, "sigmoid")]
    (row,) = chosen
    ratio: float = row["time_over_softmax"]
    return ratio


_GPU = "1 GPU of 80 GB"
ATTENTION = Experiment(
    "attention-times",
    "Time of attention, forward and backward, over the length",
    'Figs. 3, "h100-softmax-sigmoid-fwd-bwd", App. FlashSigmoid',
    measure_attention_times,
    {"smoke": 0.1, "small": 2.0, "paper": 2.0},
    _GPU,
    "the GPU of this machine, or else its CPU, in float32, up to 8,192 tokens",
)
CROSSING = Experiment(
    "norm-crossing",
    "From which length sigmoid with a LayerNorm is faster than softmax",
    "The table of T*, App. Practitioner's Guide",
    measure_norm_crossing,
    {"smoke": 0.1, "small": 2.0, "paper": 2.0},
    _GPU,
    "the GPU of this machine, or else its CPU, in float32, up to 8,192 tokens",
)
VIT = Experiment(
    "vit-times",
    "A vision transformer at 4,096 to 10,000 tokens",
    'Fig. "ComparisonsOfFlashesOnH100", App. FlashSigmoid',
    measure_vit_times,
    {"smoke": 0.1, "small": 4.0, "paper": 3.0},
    _GPU,
    "one image on the GPU of this machine, or else its CPU, instead of epochs on 32 GPUs; on a CPU 2 layers of 192 in "
    "float32",
)
EXPERIMENTS = (ATTENTION, CROSSING, VIT)
