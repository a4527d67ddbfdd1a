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

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import cache, drawing, intervals
from experiments.conversion_models import TransformersModel, llama
from experiments.experiment import TRAINING, Experiment, Finding, Result, Row, Scale, Setting, select
from sigattn.data.text import TextData, load_text
from sigattn.distributed.process_mesh import init_process_mesh
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.optional import require
from sigattn.tasks.language import LanguageModelling
from sigattn.train.config import TrainConfig
from sigattn.train.interrupt import StopRequest
from sigattn.train.metrics import MetricsLog, read_metrics
from sigattn.train.trainer import Trainer

SOFTMAX, LENGTH, VISIBLE, ZERO = "softmax", "-log n", "-log visible", "b = 0"
RULES = (SOFTMAX, LENGTH, VISIBLE, ZERO)
HALF = "-log n, b of the training length"  # an evaluation of models trained with LENGTH
MARGIN = 0.02
Bias = float | str | None  # None: softmax


def _gpt2(bias: Bias, sizes: LanguageModelConfig) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {"embed_dim": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "max_seq_len": "n_positions"}
    config = {theirs: getattr(sizes, ours) for ours, theirs in names.items()}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **config, **dropout))
    return _with_attention(TransformersModel(model), bias)


def _llama(bias: Bias, sizes: LanguageModelConfig) -> nn.Module:
    return _with_attention(llama(sizes, intermediate_size=256), bias)


def _with_attention(model: TransformersModel, bias: Bias) -> nn.Module:
    from sigattn.integrations.transformers import register

    register()
    model.model.config.sigmoid_bias = bias
    model.model.set_attn_implementation("sdpa" if bias is None else "sigmoid")
    return model


def _alibi(bias: Bias, sizes: LanguageModelConfig) -> nn.Module:
    attention: dict[str, Any] = {"activation": "softmax"} if bias is None else {"attention_bias": bias}
    return LanguageModel(replace(sizes, position="alibi", **attention))


ARCHITECTURES = {"GPT-2": _gpt2, "Llama": _llama, "ALiBi": _alibi}


@dataclass(frozen=True, kw_only=True)
class ByteLanguageModelling(LanguageModelling):
    """Language modelling with a model of one of ``ARCHITECTURES``, whose bias follows one of ``RULES``."""

    architecture: str
    rule: str

    def build(self, model: LanguageModelConfig) -> nn.Module:
        """Return the model with the sizes of a configuration, and the bias for its length."""
        return self.build_for(model, model.max_seq_len)

    def build_for(self, sizes: LanguageModelConfig, length: int) -> nn.Module:
        """Return the model with the bias for calls of a length."""
        bias: Bias = {SOFTMAX: None, LENGTH: -math.log(length), VISIBLE: "log_visible", ZERO: 0.0}[self.rule]
        return ARCHITECTURES[self.architecture](bias, sizes)


def train(task: ByteLanguageModelling, sizes: LanguageModelConfig, training: TrainConfig, text: TextData) -> Any:
    """Train one model; return held-out bits per byte by step, and at the end by evaluation and length."""
    torch.manual_seed(training.seed)
    with tempfile.TemporaryDirectory() as name, StopRequest() as request:
        trainer = Trainer.build(task, sizes, training, text, init_process_mesh(), Path(name))
        log = MetricsLog(Path(name))
        trainer.train(0, {}, request, log, lambda _: None)
        log.close()
        rows = read_metrics(Path(name) / "metrics.jsonl")
    curve = {row["step"] + 1: row["validation_bits"] for row in rows if "validation_bits" in row}
    context, half = sizes.max_seq_len, sizes.max_seq_len // 2
    batches = TextData(text.tokens, half, text.fingerprint, held_out=text.held_out).validation(training.eval_batch_size)

    def bits_at_half(model: nn.Module) -> float:
        with torch.no_grad():
            return task.evaluate(model.eval(), batches)["bits"]

    other = task.build_for(sizes, half)
    other.load_state_dict(trainer.module.state_dict())
    final = {f"{task.rule} at {context}": curve[max(curve)], f"{task.rule} at {half}": bits_at_half(other)}
    if task.rule == LENGTH:
        final[f"{HALF} at {half}"] = bits_at_half(trainer.module)
    return {"curve": curve, "final": final}


def compare_causal_biases(setting: Setting) -> Result:
    """Train every architecture with every rule; compare held-out bits per byte.

    Raises:
        MissingPackageError: without transformers.
    """
    require("transformers", "GPT-2 and Llama", "'sigattn[transformers]'")
    context, steps = setting.scaled(16, 128, 1024), setting.steps(2, 2000, 20000)
    sizes = LanguageModelConfig(embed_dim=96, num_layers=3, num_heads=4, max_seq_len=context)
    text = TextData.from_bytes(load_text(setting.data), context, held_out=setting.scaled(8, 128, 512))
    names = tuple(ARCHITECTURES) if setting.scale != "smoke" else ("GPT-2", "ALiBi")
    training = TrainConfig(
        max_steps=steps,
        batch_size=16,
        learning_rate=1e-3,
        warmup_steps=max(1, steps // 20),
        validate_every=max(1, steps // 8),
        eval_batch_size=16,
        checkpoint_every=steps,
        log_attention_every=0,
    )
    jobs, runs = {}, {}
    for seed in range(setting.seeds):  # outermost, so that an interrupted sweep has complete seeds
        of_seed = replace(training, seed=seed)
        for architecture in names:
            for rule in RULES:
                task = ByteLanguageModelling(architecture=architecture, rule=rule)
                settings = {
                    "identity": cache.identity_hash(task, sizes, of_seed, text.fingerprint, held_out=text.held_out)
                }
                file = setting.folder / "runs" / f"{architecture}_{RULES.index(rule)}_{seed}.json"
                runs[architecture, rule, seed] = label = f"{architecture}, {rule}, seed {seed}"
                jobs[label] = cache.Job(file, settings, partial(train, task, sizes, of_seed, text))
    results = cache.run_jobs(jobs, setting.workers, setting.log)
    return _report(setting, names, {run: results[label] for run, label in runs.items()}, context)


def _report(setting: Setting, names: tuple[str, ...], by_run: dict[Any, dict[str, Any]], context: int) -> Result:
    seeds, half = range(setting.seeds), context // 2
    columns = [*(f"{r} at {context}" for r in RULES), *(f"{r} at {half}" for r in (*RULES, HALF))]

    def values(architecture: str, column: str) -> list[float]:
        rule = LENGTH if column.startswith(HALF) else column.rpartition(" at ")[0]
        return [by_run[architecture, rule, s]["final"][column] for s in seeds]

    data = [
        {"architecture": a, "rule": c, "seed": s, "bits": v}
        for a in names
        for c in columns
        for s, v in zip(seeds, values(a, c), strict=True)
    ]
    figure, axes = drawing.axes_grid(len(names), width=3.6)
    for axis, architecture in zip(axes, names, strict=True):
        for rule, colour in drawing.variant_colours(RULES).items():
            curves = [by_run[architecture, rule, s]["curve"] for s in seeds]
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
