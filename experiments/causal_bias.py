"""Beyond the paper: the default bias of causal attention, compared over three architectures.

    python -m experiments causal-bias --data tinyshakespeare.txt

``sigmoid_attention(bias=None, is_causal=True)`` has b = -log M for every query, although query i has i + 1 keys.
This experiment trains byte-level language models with that rule, with -log of the visible keys and with b = 0, next to
softmax, in three architectures: GPT-2 (learned positions, LayerNorm, GELU: also nanoGPT's) and Llama (RoPE, RMSNorm,
SwiGLU), both from transformers, and this library's language model with ALiBi and QK-norm. A default must also suit
calls of other lengths, so each model is evaluated at half the training length as well, where the rule "-log M" changes
the bias and a number does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import cache, intervals
from experiments.experiment import (
    TRAINING,
    Experiment,
    ExperimentError,
    Finding,
    Result,
    Row,
    Scale,
    Setting,
    select,
)
from sigattn.data.text import TokenText, load_text
from sigattn.demo import drawing
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.train import workers

SOFTMAX, LENGTH, VISIBLE, ZERO = "softmax", "-log n", "-log visible", "b = 0"
RULES = (SOFTMAX, LENGTH, VISIBLE, ZERO)
HALF = "-log n, b of the training length"  # an evaluation of models trained with LENGTH
BATCH, WIDTH, LAYERS, HEADS, MARGIN = 16, 96, 3, 4, 0.02
Bias = float | str | None  # None: softmax


def gpt2(bias: Bias, context: int) -> nn.Module:
    """Return a GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": context}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _transformers(
        GPT2LMHeadModel, GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes, **rates), bias
    )


def llama(bias: Bias, context: int) -> nn.Module:
    """Return a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = LlamaConfig(
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
        intermediate_size=256,
        max_position_embeddings=context,
        **sizes,
    )
    return _transformers(LlamaForCausalLM, config, bias)


def _transformers(model: Callable[..., Any], config: Any, bias: Bias) -> nn.Module:
    from sigattn.integrations import transformers

    transformers.register()
    config.sigmoid_bias = bias
    config._attn_implementation = "sdpa" if bias is None else "sigmoid"
    made: Any = model(config)
    assert made.config._attn_implementation == config._attn_implementation
    return made


def alibi(bias: Bias, context: int) -> nn.Module:
    """Return this library's language model with ALiBi."""
    rule: Any = "log_visible" if bias == "log_visible" else bias
    kind: Any = {"activation": "softmax"} if bias is None else {"attention_bias": rule}
    sizes: Any = {"embed_dim": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "max_seq_len": context}
    return LanguageModel(LanguageModelConfig(position="alibi", **sizes, **kind))


ARCHITECTURES = {"GPT-2": gpt2, "Llama": llama, "ALiBi": alibi}


def bias_of(rule: str, length: int) -> Bias:
    """Return the bias of a rule in calls with this many keys."""
    return {SOFTMAX: None, LENGTH: -math.log(length), VISIBLE: "log_visible", ZERO: 0.0}[rule]


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (B, N, 256) of either library's model."""
    out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def train(
    architecture: str, rule: str, seed: int, text: bytes, context: int, steps: int, windows: int
) -> dict[str, Any]:
    """Train one model; return held-out bits per byte by step, and at the end by evaluation and length."""
    torch.manual_seed(seed)
    data = TokenText.split(text, context)
    model = ARCHITECTURES[architecture](bias_of(rule, context), context)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        done = min(1.0, max(0.0, (step - warmup) / max(1, steps - warmup)))
        return min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    curve = {}
    for step in range(steps):
        tokens, targets = data.batch(step, BATCH, context, seed)
        loss = F.cross_entropy(logits(model, tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // 8) == 0:
            curve[step + 1] = bits(model, data, context, windows)
    final = {f"{rule} at {context}": curve[max(curve)]}
    half = context // 2
    final[f"{rule} at {half}"] = bits(
        _with_bias(model, architecture, bias_of(rule, half), context), data, half, windows
    )
    if rule == LENGTH:
        final[f"{HALF} at {half}"] = bits(model, data, half, windows)
    return {"curve": curve, "final": final}


def _with_bias(model: nn.Module, architecture: str, bias: Bias, context: int) -> nn.Module:
    other = ARCHITECTURES[architecture](bias, context)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def bits(model: nn.Module, data: TokenText, length: int, windows: int) -> float:
    """Return held-out bits per byte over windows of a length."""
    model.eval()
    tokens, targets = data.validation_batch(windows, length)
    losses = [
        F.cross_entropy(logits(model, t).flatten(0, 1), u.flatten())
        for t, u in zip(tokens.split(16), targets.split(16), strict=True)
    ]
    model.train()
    return torch.stack(losses).mean().item() / math.log(2)


def _train_job(path: Any, settings: dict[str, Any], text: bytes) -> dict[str, Any]:
    names = ("architecture", "rule", "seed", "context", "steps", "windows")
    job = {name: settings[name] for name in names}
    found: dict[str, Any] = cache.memoize(path, settings, lambda: train(**job, text=text))
    return found


def _train_alone(*call: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    return _train_job(*call)


def compare_causal_biases(setting: Setting) -> Result:
    """Train every architecture with every rule; compare held-out bits per byte."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ExperimentError("causal-bias needs transformers: pip install 'sigattn[transformers]'") from error
    context, steps = setting.scaled(16, 128, 1024), setting.steps(2, 2000, 20000)
    text = load_text(setting.data)
    sha256 = TokenText.split(text, context).sha256
    names = tuple(ARCHITECTURES) if setting.scale != "smoke" else ("GPT-2", "ALiBi")
    common = {"context": context, "steps": steps, "windows": setting.scaled(8, 128, 512), "sha256": sha256}
    common |= {"batch": BATCH, "width": WIDTH, "layers": LAYERS, "heads": HEADS}
    calls = {}
    for seed in range(setting.seeds):  # outermost, so that an interrupted sweep has complete seeds
        for architecture in names:
            for rule in RULES:
                settings = {"architecture": architecture, "rule": rule, "seed": seed, **common}
                path = setting.folder / "runs" / f"{architecture}_{RULES.index(rule)}_{seed}.json"
                calls[architecture, rule, seed] = (path, settings, text)
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    if setting.scale == "smoke":  # importing transformers in two further processes takes longer than the training
        found = {job: _train_job(*call) for job, call in calls.items()}
    else:
        alone = {job: functools.partial(_train_alone, *call) for job, call in calls.items()}
        for job, found[job] in workers.run_in_workers(alone, setting.workers):
            last = next(iter(found[job]["final"].values()))
            setting.log(f"{job[0]}, {job[1]}, seed {job[2]}: {last:.3f} bits per byte")
    return _report(setting, names, found, context)


def _report(setting: Setting, names: tuple[str, ...], found: dict[Any, dict[str, Any]], context: int) -> Result:
    seeds, half = range(setting.seeds), context // 2
    columns = [*(f"{r} at {context}" for r in RULES), *(f"{r} at {half}" for r in (*RULES, HALF))]

    def values(architecture: str, column: str) -> list[float]:
        rule = LENGTH if column.startswith(HALF) else column.rpartition(" at ")[0]
        return [found[architecture, rule, s]["final"][column] for s in seeds]

    data = [
        {"architecture": a, "rule": c, "seed": s, "bits": v}
        for a in names
        for c in columns
        for s, v in zip(seeds, values(a, c), strict=True)
    ]
    figure, axes = drawing.axes_grid(len(names), width=3.6)
    for axis, architecture in zip(axes, names, strict=True):
        for rule, colour in drawing.variant_colours(RULES).items():
            curves = [found[architecture, rule, s]["curve"] for s in seeds]
            steps = sorted(curves[0], key=int)
            drawing.plot_band(axis, [int(s) for s in steps], [[c[s] for c in curves] for s in steps], rule, colour)
        axis.set(title=architecture, xlabel="step", ylabel="held-out bits per byte")
    drawing.band_legend(axes[0])
    rows = [(a, *(intervals.mean_std(values(a, c)) for c in columns)) for a in names]
    return Result(("architecture", *columns), rows, data, figure)


def judge_causal_biases(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare every rule with the default at the training length and at half of it, in every architecture."""
    names = list(dict.fromkeys(row["architecture"] for row in data))
    half, context = sorted({int(row["rule"].rpartition(" ")[2]) for row in data})
    findings = []
    for rule, length in ((VISIBLE, context), (ZERO, context), (VISIBLE, half), (HALF, half)):
        differences = {
            a: intervals.welch(*(select(data, "bits", architecture=a, rule=f"{r} at {length}") for r in (rule, LENGTH)))
            for a in names
        }
        findings.append(
            Finding(
                f"At {length} bytes, trained at {context}: {rule} is not better than the default, -log n.",
                intervals.verdict_all([d.verdict_not_above(MARGIN) for d in differences.values()]),
                "bits of -log n less those of the other: "
                + ", ".join(f"{a} {d}" for a, d in differences.items())
                + f"; tolerance {MARGIN:g}",
            )
        )
    return findings


EXPERIMENTS = (
    Experiment(
        "causal-bias",
        "Beyond the paper: the default bias of causal attention, over three architectures",
        "Sect. 2 and App. E choose b = -log n",
        compare_causal_biases,
        judge_causal_biases,
        {"smoke": 0.2, "small": 65.0, "paper": None},
        "1 GPU",
        "3 layers of 96, 128 bytes, 2,000 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
    ),
)
