"""Speed of attention alone, followed by a norm, and in a vision transformer, on this machine (App. FlashSigmoid).

    python -m experiments attention-times | norm-crossing | vit-times       (--scale paper: 1 GPU of 80 GB)

Expected on an H100, sigmoid compared with FlashAttention-2's softmax: 17 % less time forward, 7 % forward and backward;
with a LayerNorm it is faster from T* = 1,024 (causal) to 10,000 tokens on; a ViT gains 4 to 8 % in inference and 3 to
4 % in training, as the kernels' gain and their share of the total predict. The baseline here is PyTorch's own softmax
attention, whose kernel on a GPU is FlashAttention-2 or cuDNN's; ``python -m benchmarks kernels`` has more baselines.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import sigattn
from benchmarks import reference
from benchmarks.hybridnorm import crossing_length
from benchmarks.inputs import Inputs, Options
from benchmarks.timing import time_calls
from experiments import cache, drawing
from experiments.experiment import Experiment, ExperimentError, Finding, Result, Row, Scale, Setting, select
from experiments.intervals import Verdict, significant
from sigattn.models.vision import ViT, ViTConfig

HEADS, HEAD_DIM = 12, 64  # the paper's
Activation = Literal["softmax", "sigmoid"]
ACTIVATIONS: tuple[Activation, ...] = ("softmax", "sigmoid")
PASSES = ("forward", "forward and backward")
PAPER = dict(zip(itertools.product((False, True), PASSES), (17, 7, 19, 9), strict=True))  # Fig. 1, per cent saved
MODES = ("inference", "training")
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


def attend(activation: Activation, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the attention output; all tensors are (B, H, n, D)."""
    if activation == "softmax":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return sigattn.sigmoid_attention(q, k, v, is_causal=causal, bias=-math.log(k.shape[2]))


def problem_of(setting: Setting, n: int, causal: bool, heads: int = HEADS) -> Inputs:
    """Return random query, key, value and gradient of the output, (1, H, n, D) each."""
    device, dtype = device_and_dtype(setting)
    generator = torch.Generator().manual_seed(n)
    made = [torch.randn(1, heads, n, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(4)]
    return Inputs(made[0], made[1], made[2], made[3], Options(-math.log(n), causal, None))


def check(activation: Activation, problem: Inputs) -> None:
    """Compare outputs and gradients with float64, before timing.

    Raises:
        WrongResultError: if an error exceeds the tolerance of the dtype.
    """
    q, k, v = problem.leaves()
    out = attend(activation, q, k, v, problem.options.causal)
    gradients = torch.autograd.grad(out, (q, k, v), problem.grad_out)
    reference.check(problem, activation == "softmax", out.detach(), gradients)


def time_attention(setting: Setting, n: int, causal: bool, heads: int = HEADS, layers: int = 1) -> list[dict[str, Any]]:
    """Measure times of both activations in ms, forward, and forward and backward."""
    problem = problem_of(setting, n, causal, heads)
    for activation in ACTIVATIONS:
        check(activation, problem)

    def forward(activation: Activation) -> None:
        with torch.no_grad():
            for _ in range(layers):
                attend(activation, problem.query, problem.key, problem.value, causal)

    def forward_and_backward(activation: Activation) -> None:
        for _ in range(layers):
            q, k, v = problem.leaves()
            torch.autograd.grad(attend(activation, q, k, v, causal), (q, k, v), problem.grad_out)

    return [
        {"n": n, "causal": causal, "pass": which, "activation": activation, **times}
        for which, call in zip(PASSES, (forward, forward_and_backward), strict=True)
        for activation, times in _time(setting, {a: functools.partial(call, a) for a in ACTIVATIONS}).items()
    ]


def measure_attention_times(setting: Setting) -> Result:
    """Measure both passes, full and causal, over the length."""
    lengths = setting.scaled((32, 64), (64, 256, 1024, 2048, 4096, 8192), (64, 256, 1024, 4096, 16_384, 32_768, 78_000))
    data = []
    for n in lengths:
        for causal in (False, True):
            measure = functools.partial(time_attention, setting, n, causal)
            data += _memoize(setting, f"attention-{n}-{causal}", measure)
    figure, axes = drawing.axes_grid(2, width=5.0, height=3.8)
    rows = []
    for axis, causal in zip(axes, (False, True), strict=True):
        mask = "causal" if causal else "full"
        for which, style in zip(PASSES, ("-", "--"), strict=True):
            gains = _gains(data, causal, which)
            axis.plot(lengths, gains, style, marker="o", ms=4, color=drawing.COLOUR_OF["sigmoid"], label=which)
            rows.append((mask, which, *(f"{gain:+.0f} %" for gain in gains)))
        axis.axhline(0, color="#999", linewidth=0.8)
        axis.set(xscale="log", xlabel="tokens n", title=mask)
    axes[0].set_ylabel("time saved compared with softmax, %")
    axes[0].legend(frameon=False)
    return Result(("mask", "time saved", *(f"n = {n:,}" for n in lengths)), rows, data, figure)


def _gains(data: Sequence[Row], causal: bool, which: str) -> list[float]:
    """Return the time that sigmoid saves at each length, in per cent of softmax's."""
    ratios = select(data, "time_over_softmax", causal=causal, **{"pass": which}, activation="sigmoid")
    return [100 * (1 - ratio) for ratio in ratios]


def judge_attention_times(data: Sequence[Row], scale: Scale) -> list[Finding]:
    """Average the gains over the lengths."""
    findings = []
    for causal, which in itertools.product((False, True), PASSES):
        gains = _gains(data, causal, which)
        mask, mean, paper = "causal" if causal else "full", statistics.mean(gains), PAPER[causal, which]
        claim = (
            f"{mask.capitalize()} attention, {which}: sigmoid takes less time than softmax, averaged over n "
            f"(about {paper} % less in the paper)."
        )
        evidence = f"{mean:.0f} % less; at the longest {gains[-1]:.0f} %"
        findings.append(Finding(claim, _verdict(scale, mean > 0), evidence))
    return findings


def time_with_norm(setting: Setting, n: int, causal: bool, affine: bool) -> dict[str, Any]:
    """Measure the forward time of sigmoid attention followed by a LayerNorm, relative to softmax without one."""
    problem = problem_of(setting, n, causal)
    width, q = HEADS * HEAD_DIM, problem.query
    weight, shift = torch.ones(2, width, device=q.device, dtype=q.dtype).unbind() if affine else (None, None)

    def sigmoid_and_norm() -> None:
        out = attend("sigmoid", q, problem.key, problem.value, causal)
        F.layer_norm(out.transpose(1, 2).flatten(2), (width,), weight, shift)

    def softmax() -> None:
        attend("softmax", q, problem.key, problem.value, causal)

    with torch.no_grad():
        times = _time(setting, {"softmax": softmax, "sigmoid": sigmoid_and_norm})
    return {"n": n, "causal": causal, "affine": affine, **times["sigmoid"]}


def measure_norm_crossing(setting: Setting) -> Result:
    """Measure T*, the length from which on sigmoid followed by a norm is faster than softmax."""
    lengths = setting.scaled(
        (32, 64), (64, 256, 1024, 2048, 4096, 8192), (64, 576, 1024, 2048, 5184, 10_000, 16_384, 60_000)
    )
    data = []
    for (causal, affine), n in itertools.product(itertools.product((False, True), (True, False)), lengths):
        measure = functools.partial(time_with_norm, setting, n, causal, affine)
        data.append(_memoize(setting, f"norm-{n}-{causal}-{affine}", measure))
    return Result(("", "affine projection", "T*", "mean gain from there on"), _crossings(data), data)


def _crossings(data: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return the mask, the kind of norm, T* and the mean gain from there on, as text."""
    rows = []
    for causal, affine in itertools.product((False, True), (True, False)):
        where = {"causal": causal, "affine": affine}
        ratios = list(zip(select(data, "n", **where), select(data, "time_over_softmax", **where), strict=True))
        start = crossing_length(ratios)
        names = ("causal" if causal else "full", "with" if affine else "without")
        if start is None:
            rows.append((*names, "–", "–"))
        else:
            gain = statistics.mean(100 * (1 - ratio) for n, ratio in ratios if n >= start)
            rows.append((*names, f"{start:,}", f"{gain:.1f} %"))
    return rows


def judge_norm_crossing(data: Sequence[Row], scale: Scale) -> list[Finding]:
    """Check that there is a crossing for both masks, with and without the affine projection."""
    rows = _crossings(data)
    return [
        Finding(
            "There is a length T* from which sigmoid with a LayerNorm after it is faster than softmax.",
            _verdict(scale, all(row[2] != "–" for row in rows)),
            ", ".join(f"{row[0]}, {row[1]} affine: {row[2]}" for row in rows),
        )
    ]


def time_vit(setting: Setting, tokens: int, side: int) -> dict[str, Any]:
    """Measure times of both activations in ms: the model's inference and training step, and attention alone."""
    device, dtype = device_and_dtype(setting)
    layers, heads = setting.scaled((1, 1), (2, 3), (12, 12))
    models = {}
    for activation in ACTIVATIONS:
        torch.manual_seed(0)
        config = ViTConfig(
            image_size=side,
            patch_size=1,
            num_layers=layers,
            embed_dim=heads * HEAD_DIM,
            num_heads=heads,
            activation=activation,
        )
        models[activation] = ViT(config).to(device)
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    label = torch.zeros(1, dtype=torch.int64, device=device)

    def inference(activation: Activation) -> None:
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            models[activation](image)

    def training(activation: Activation) -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(models[activation](image), label)
        loss.backward()
        models[activation].zero_grad()

    n = models["sigmoid"].config.num_tokens
    found: dict[str, Any] = {"tokens": tokens, "n": n, "layers": layers}
    alone = time_attention(setting, n, False, heads, layers)
    for name, call, which in (("inference", inference, PASSES[0]), ("training", training, PASSES[1])):
        times = _time(setting, {a: functools.partial(call, a) for a in ACTIVATIONS}, min_seconds=0.0)
        for activation in ACTIVATIONS:
            found[f"{name}_{activation}_ms"] = times[activation]["ms"]
            (attention,) = select(alone, "ms", activation=activation, **{"pass": which})
            found[f"{name}_{activation}_attention_ms"] = attention
        found[f"{name}_saved"] = 1 - times["sigmoid"]["time_over_softmax"]
    return found


def measure_vit_times(setting: Setting) -> Result:
    """Compare measured gains with those predicted from the attention's share, s = (τ_sm - τ_σ) / (τ_sm + τ)."""
    sides = setting.scaled({16: 4}, TOKENS, TOKENS)
    data = [
        _memoize(setting, f"vit-{tokens}", functools.partial(time_vit, setting, tokens, side))
        for tokens, side in sides.items()
    ]
    columns = ("tokens", "", "attention, softmax → sigmoid, ms", "whole, softmax, ms (sigmoid)", "share", "predicted")
    rows = []
    for row, name in itertools.product(data, MODES):
        soft, sigm = (row[f"{name}_{a}_attention_ms"] for a in ACTIVATIONS)
        total, saved = row[f"{name}_softmax_ms"], row[f"{name}_saved"]
        soft_ms, sigm_ms, total_ms = (significant(ms, 3) for ms in (soft, sigm, total))
        kernel, whole = f"{soft_ms} → {sigm_ms} ({sigm / soft - 1:+.0%})", f"{total_ms} ({-saved:+.1%})"
        rows.append(
            (f"{row['tokens']:,}", name, kernel, whole, f"{soft / total:.0%}", f"{-_predicted(row, name):+.1%}")
        )
    return Result(columns, rows, data)


def _predicted(row: Row, name: str) -> float:
    """Return the predicted share of the whole model's time that sigmoid saves."""
    soft, sigm = (row[f"{name}_{a}_attention_ms"] for a in ACTIVATIONS)
    predicted: float = (soft - sigm) / row[f"{name}_softmax_ms"]
    return predicted


def judge_vit_times(data: Sequence[Row], scale: Scale) -> list[Finding]:
    """Compare the measured gains with zero, and with the predicted ones."""
    gains = {(row["tokens"], name): row[f"{name}_saved"] for row, name in itertools.product(data, MODES)}
    error = max(abs(_predicted(row, name) - row[f"{name}_saved"]) for row, name in itertools.product(data, MODES))
    return [
        Finding(
            "A vision transformer gains from the faster kernel in inference and in training.",
            _verdict(scale, min(gains.values()) > 0),
            ", ".join(f"{tokens:,} tokens, {name}: {-gain:+.1%}" for (tokens, name), gain in gains.items()),
        ),
        Finding(
            "The kernels' gain and their share of the whole predict the gain of the whole.",
            _verdict(scale, error < 0.05),
            f"within {100 * error:.1f} points of the measured gain",
        ),
    ]


def _time(
    setting: Setting, calls: Mapping[str, Callable[[], object]], min_seconds: float = 0.02
) -> dict[str, dict[str, float]]:
    """Return the time of each call in ms and relative to that of "softmax"."""
    timings = time_calls(calls, setting.scaled(1, 5, 9), setting.scaled(0.0, min_seconds, min_seconds))
    return {name: {"ms": t * 1e3, "time_over_softmax": 1 / ratios["softmax"]} for name, t, ratios in timings}


def _memoize(setting: Setting, name: str, measure: Callable[[], Any]) -> Any:
    setting.log(name)
    settings = {"scale": setting.scale, "device": _device_name(setting), "torch": torch.__version__}
    settings["sigattn"] = sigattn.__version__
    return cache.Job(setting.folder / "measured" / f"{name}.json", settings, measure).run()


def _verdict(scale: Scale, agrees: bool) -> Verdict:
    return "not shown" if scale == "smoke" else "agrees" if agrees else "differs"


def _device_name(setting: Setting) -> str:
    device, dtype = device_and_dtype(setting)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


_GPU = "1 GPU of 80 GB"
ATTENTION = Experiment(
    "attention-times",
    "Time of attention, forward and backward, over the length",
    'Figs. 1 and "h100-softmax-sigmoid-fwd-bwd", App. FlashSigmoid',
    measure_attention_times,
    judge_attention_times,
    {"smoke": 0.1, "small": 2.0, "paper": 2.0},
    _GPU,
    "the GPU of this machine, or else its CPU, in float32, up to 8,192 tokens",
    takes=(),
    kind="timing",
)
CROSSING = Experiment(
    "norm-crossing",
    "From which length sigmoid with a LayerNorm is faster than softmax",
    "The table of T*, App. Practitioner's Guide",
    measure_norm_crossing,
    judge_norm_crossing,
    {"smoke": 0.1, "small": 2.0, "paper": 2.0},
    _GPU,
    "the GPU of this machine, or else its CPU, in float32, up to 8,192 tokens",
    takes=(),
    kind="timing",
)
VIT = Experiment(
    "vit-times",
    "A vision transformer at 4,096 to 10,000 tokens",
    'Fig. "ComparisonsOfFlashesOnH100", App. FlashSigmoid',
    measure_vit_times,
    judge_vit_times,
    {"smoke": 0.1, "small": 4.0, "paper": 3.0},
    _GPU,
    "one image on the GPU of this machine, or else its CPU, instead of epochs on 32 GPUs; on a CPU 2 layers of 192 in "
    "float32",
    takes=(),
    kind="timing",
)
EXPERIMENTS = (ATTENTION, CROSSING, VIT)
