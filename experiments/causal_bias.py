"""Beyond the paper: softmax replaced by sigmoid attention in one line, over three architectures.

    python -m experiments causal-bias --data tinyshakespeare.txt
    python -m experiments causal-bias-larger --data tinyshakespeare.txt

Byte-level language models are trained with softmax, with sigmoid attention and with sigmoid attention whose weights
sum to one (``normalize``), in three architectures: GPT-2 (learned positions, LayerNorm, GELU: also nanoGPT's) and Llama
(RoPE, RMSNorm, SwiGLU), both from transformers, and this library's language model with ALiBi and QK-norm.

``sigmoid_attention(bias=None, is_causal=True)`` has b = -log M for every query, although query i has i + 1 keys; that
rule is compared with -log of the visible keys and with b = 0. With ``normalize``, the lower b is, the nearer the
weights are to those of softmax, so b = -log M less 0, 3, 6 and 10 are compared.

A default must also suit calls of other lengths, so each model is evaluated at half the training length as well, where
the rule "-log M" changes the bias and a number does not.

The second experiment repeats the comparison with softmax for larger GPT-2s of twice the length, and for five times as
many steps.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import cache, drawing, intervals, sweep
from experiments.conversion_models import TransformersModel, llama
from experiments.experiment import TRAINING, Experiment, Finding, Result, Row, Scale, Setting, select
from sigattn.data.text import TextData, load_text
from sigattn.distributed.process_mesh import init_process_mesh
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.optional import require
from sigattn.tasks.language import LanguageModelling
from sigattn.train.config import TrainConfig
from sigattn.train.loop import Trainer
from sigattn.train.metrics import MetricsLog, read_metrics

SOFTMAX, LENGTH, VISIBLE, ZERO = "softmax", "-log n", "-log visible", "b = 0"
OFFSETS = {f"normalized, -log n{f' - {offset}' if offset else ''}": offset for offset in (0, 3, 6, 10)}
RULES = (SOFTMAX, LENGTH, *OFFSETS, VISIBLE, ZERO)
OF_LARGER = (SOFTMAX, LENGTH, *OFFSETS)
HALF = "-log n, b of the training length"  # an evaluation of models trained with LENGTH
MARGIN = 0.02
Bias = float | str | None  # None: softmax


def _gpt2(bias: Bias, normalize: bool, sizes: LanguageModelConfig) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {"embed_dim": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "max_seq_len": "n_positions"}
    config = {theirs: getattr(sizes, ours) for ours, theirs in names.items()}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **config, **dropout))
    return _with_attention(TransformersModel(model), bias, normalize)


def _llama(bias: Bias, normalize: bool, sizes: LanguageModelConfig) -> nn.Module:
    return _with_attention(llama(sizes, intermediate_size=256), bias, normalize)


def _with_attention(model: TransformersModel, bias: Bias, normalize: bool) -> nn.Module:
    from sigattn.integrations.transformers import register

    register()
    model.model.config.sigmoid_bias = bias
    model.model.config.sigmoid_normalize = normalize
    model.model.set_attn_implementation("sdpa" if bias is None else "sigmoid")
    return model


def _alibi(bias: Bias, normalize: bool, sizes: LanguageModelConfig) -> nn.Module:
    sigmoid = {"attention_bias": bias, "normalize": normalize}
    attention: dict[str, Any] = {"activation": "softmax"} if bias is None else sigmoid
    return LanguageModel(replace(sizes, position="alibi", **attention))


ARCHITECTURES = {"GPT-2": _gpt2, "Llama": _llama, "ALiBi": _alibi}


@dataclass(frozen=True)
class Column:
    """Models that differ in the attention only: an architecture, its sizes and the length of its training.

    Attributes:
        architecture: a name of ``ARCHITECTURES``. num_layers, embed_dim, context, steps: at the small scale.
        rules: the attentions, of ``RULES``.
    """

    architecture: str
    num_layers: int = 3
    embed_dim: int = 96
    context: int = 128
    steps: int = 2000
    rules: tuple[str, ...] = RULES

    def sizes(self, setting: Setting) -> LanguageModelConfig:
        """Return the sizes of the models at a scale."""
        return LanguageModelConfig(
            embed_dim=self.embed_dim,
            num_layers=self.num_layers,
            num_heads=4,
            max_seq_len=setting.scaled(16, self.context, 8 * self.context),
        )

    def training(self, setting: Setting) -> TrainConfig:
        """Return the training at a scale, with seed 0."""
        steps = setting.steps(2, self.steps, 10 * self.steps)
        return TrainConfig(
            max_steps=steps,
            batch_size=16,
            learning_rate=1e-3,
            warmup_steps=max(1, steps // 20),
            validate_every=max(1, steps // 8),
            eval_batch_size=16,
            checkpoint_every=steps,
            log_attention_every=0,
        )


COLUMNS = {name: Column(name) for name in ARCHITECTURES}
LARGER = {
    "GPT-2, 4 × 128": Column("GPT-2", 4, 128, 256, 1000, OF_LARGER),
    "GPT-2, 4 × 256": Column("GPT-2", 4, 256, 256, 1000, OF_LARGER),
    "GPT-2, 10,000 steps": Column("GPT-2", steps=10_000, rules=OF_LARGER),
}


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
        rules: dict[str, Bias] = {SOFTMAX: None, LENGTH: -math.log(length), VISIBLE: "log_visible", ZERO: 0.0}
        rules |= {rule: -math.log(length) - offset for rule, offset in OFFSETS.items()}
        return ARCHITECTURES[self.architecture](rules[self.rule], self.rule in OFFSETS, sizes)


def train(task: ByteLanguageModelling, sizes: LanguageModelConfig, training: TrainConfig, text: TextData) -> Any:
    """Train one model; return held-out bits per byte by step, and at the end by evaluation and length."""
    torch.manual_seed(training.seed)
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer(task, sizes, training, text, init_process_mesh(), Path(name))
        log = MetricsLog(Path(name))
        trainer.train(0, {}, log)
        log.close()
        rows = read_metrics(Path(name) / "metrics.jsonl")
    curve = {row["step"] + 1: row["validation_bits"] for row in rows if "validation_bits" in row}
    context, half = sizes.max_seq_len, sizes.max_seq_len // 2
    text_of_half = TextData(text.tokens, half, text.fingerprint, held_out=text.held_out)
    device = trainer.processes.device
    batches = [tuple(t.to(device) for t in batch) for batch in text_of_half.validation(training.eval_batch_size)]

    def bits_at_half(model: nn.Module) -> float:
        with torch.no_grad():
            return task.evaluate(model.eval(), batches)["bits"]

    other = task.build_for(sizes, half).to(device)
    other.load_state_dict(trainer.module.state_dict())
    final = {f"{task.rule} at {context}": curve[max(curve)], f"{task.rule} at {half}": bits_at_half(other)}
    if task.rule == LENGTH:
        final[f"{HALF} at {half}"] = bits_at_half(trainer.module)
    return {"curve": curve, "final": final}


def compare(columns: Mapping[str, Column], setting: Setting) -> Result:
    """Train the models of every column with every rule; compare held-out bits per byte.

    Raises:
        MissingPackageError: without transformers.
    """
    require("transformers", "GPT-2 and Llama", "'sigattn[transformers]'")
    jobs = plan_jobs(columns, setting)
    sweep.check_stored(setting, setting.identities)
    missing = {run: job for run, job in jobs.items() if setting.stored.seeds.get(_name(*run[:2]), 0) <= run[2]}
    labels = {run: ", ".join(map(str, run)) for run in missing}
    results = cache.run_jobs({labels[run]: job for run, job in missing.items()}, setting.workers, setting.log)
    data = list(setting.stored.rows)
    for run, label in labels.items():
        about = dict(zip(("architecture", "rule", "seed"), run, strict=True))
        data += [{**about, "rule": evaluation, "bits": bits} for evaluation, bits in results[label]["final"].items()]
    return present(data)


def present(data: Sequence[Row]) -> Result:
    """Return table and figure of the rows of data; rules that an architecture was not trained with are left out."""
    columns = list(dict.fromkeys(row["architecture"] for row in data))
    lengths = sorted({_length(row) for row in data}, reverse=True)
    evaluations = [f"{rule} at {length}" for length in lengths for rule in (*RULES, HALF)]
    bits = {e: {a: select(data, "bits", architecture=a, rule=e) for a in columns} for e in evaluations}
    rows = [
        (e, *(intervals.mean_std(v) if v else "–" for v in values.values()))
        for e, values in bits.items()
        if any(values.values())
    ]
    return Result(("attention and bytes", *columns), rows, data, _draw(data, columns))


def plan_jobs(columns: Mapping[str, Column], setting: Setting) -> dict[tuple[str, str, int], cache.Job]:
    """Return the training runs by column, rule and seed; fill in ``setting.identities``."""
    text, held_out = load_text(setting.data), setting.scaled(8, 128, 512)
    rules = RULES if setting.scale != "smoke" else (SOFTMAX, LENGTH, next(iter(OFFSETS)), VISIBLE, ZERO)
    columns = {n: c for n, c in columns.items() if setting.scale != "smoke" or n in ("GPT-2", "ALiBi", *[*LARGER][:1])}
    names = [_name(name, rule) for name, column in columns.items() for rule in column.rules if rule in rules]
    setting.check_variants(names)
    jobs = {}
    for seed in range(max(map(setting.num_seeds, names))):  # outermost: an interrupted sweep has complete seeds
        for name, column in columns.items():
            sizes, training = column.sizes(setting), replace(column.training(setting), seed=seed)
            data = TextData.from_bytes(text, sizes.max_seq_len, held_out=held_out)
            for rule in column.rules:
                if rule not in rules or seed >= setting.num_seeds(_name(name, rule)):
                    continue
                task = ByteLanguageModelling(architecture=column.architecture, rule=rule)
                identity = cache.identity_hash(task, sizes, training, data.fingerprint, held_out=held_out)
                if seed == 0:
                    setting.identities[_name(name, rule)] = identity
                file = setting.folder / "runs" / f"{_name(name, rule)}, {seed}.json".replace(" ", "_")
                call = partial(train, task, sizes, training, data)
                jobs[name, rule, seed] = cache.Job(file, {"identity": identity}, call)
    return jobs


def _name(architecture: str, rule: str) -> str:
    return f"{architecture}, {rule}"


def _length(row: Row) -> int:
    return int(row["rule"].rpartition(" ")[2])


def count_seeds(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of seeds by run of the rows of data (``Experiment.count_seeds``)."""
    context = {row["architecture"]: _context(rows, row["architecture"]) for row in rows}
    trained = [row for row in rows if _length(row) == context[row["architecture"]]]
    names = [_name(row["architecture"], row["rule"].rpartition(" at ")[0]) for row in trained]
    return {name: names.count(name) for name in names}


def _context(data: Sequence[Row], architecture: str) -> int:
    """Return the training length of the models of a column."""
    return max(_length(row) for row in data if row["architecture"] == architecture)


def _bits(data: Sequence[Row], architecture: str, rule: str, half: bool) -> list[float]:
    """Return the bits of all seeds at the training length of a column, or at half of it."""
    length = _context(data, architecture) // (2 if half else 1)
    return select(data, "bits", architecture=architecture, rule=f"{rule} at {length}")


def _draw(data: Sequence[Row], architectures: Sequence[str]) -> Any:
    """Draw the bits at the training length less those of softmax with the same seed."""
    figure, axes = drawing.axes_grid(len(architectures))
    rules = [rule for rule in RULES[1:] if any(_bits(data, a, rule, False) for a in architectures)]
    for axis, architecture in zip(axes, architectures, strict=True):
        softmax = _bits(data, architecture, SOFTMAX, False)
        gaps = {}
        for rule in rules:
            bits = _bits(data, architecture, rule, False) or [math.nan] * len(softmax)
            name = rule if rule in OFFSETS else f"sigmoid, {rule}"
            gaps[name] = [b - a for a, b in zip(softmax, bits, strict=True)]
        drawing.plot_seeds(axis, gaps)
        axis.axvline(0, color=drawing.COLOUR_OF["softmax"])
        axis.set(title=architecture, xlabel="bits per byte above softmax")
        axis.tick_params(labelleft=axis is axes[0])
        axis.locator_params(axis="x", nbins=4)
    return figure


def judge(data: Sequence[Row], _: Scale) -> list[Finding]:
    """Compare sigmoid attention with softmax, and the rules of its bias, in every column that has both."""
    names = list(dict.fromkeys(row["architecture"] for row in data))
    findings = []
    for rule, half in [(rule, half) for half in (False, True) for rule in (LENGTH, *OFFSETS)]:
        trained = [a for a in names if _bits(data, a, rule, half)]
        gaps = {a: intervals.paired(_bits(data, a, SOFTMAX, half), _bits(data, a, rule, half)) for a in trained}
        if not gaps:
            continue
        findings.append(
            Finding(
                f"{_AT[half]}: {'' if rule in OFFSETS else 'plain sigmoid, '}{rule} is as good as softmax.",
                intervals.verdict_all([gap.verdict_equal(MARGIN) for gap in gaps.values()]),
                "bits above softmax with the same seed: "
                + ", ".join(f"{a} {gap}" for a, gap in gaps.items())
                + f"; tolerance ± {MARGIN:g}",
            )
        )
    for rule, half in ((VISIBLE, False), (ZERO, False), (VISIBLE, True), (HALF, True)):
        trained = [a for a in names if _bits(data, a, rule, half)]
        differences = {a: intervals.welch(_bits(data, a, rule, half), _bits(data, a, LENGTH, half)) for a in trained}
        if not differences:
            continue
        findings.append(
            Finding(
                f"{_AT[half]}: {rule} is not better than the default of plain sigmoid, -log n.",
                intervals.verdict_all([d.verdict_not_above(MARGIN) for d in differences.values()]),
                "bits of -log n less those of the other: "
                + ", ".join(f"{a} {d}" for a, d in differences.items())
                + f"; tolerance {MARGIN:g}",
            )
        )
    return findings


_AT = {False: "At the training length", True: "At half the training length"}

EXPERIMENTS = (
    Experiment(
        "causal-bias",
        "Beyond the paper: softmax, sigmoid and normalized sigmoid attention, over three architectures",
        "Sect. 2 and App. E choose b = -log n",
        partial(compare, COLUMNS),
        judge,
        {"smoke": 0.4, "small": 250.0, "paper": None},
        "1 GPU",
        "3 layers of 96, 128 bytes, 2,000 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
        count_seeds=count_seeds,
    ),
    Experiment(
        "causal-bias-larger",
        "Beyond the paper: normalized sigmoid attention in larger GPT-2s, and trained for longer",
        "Sect. 2 and App. E choose b = -log n",
        partial(compare, LARGER),
        judge,
        {"smoke": 0.4, "small": 1200.0, "paper": None},
        "1 GPU",
        "4 layers of 128 and 256, 256 bytes, 1,000 steps; 3 layers of 96, 128 bytes, 10,000 steps",
        takes=(*TRAINING, "data"),
        kind="beyond",
        unequal_seeds=True,
        count_seeds=count_seeds,
    ),
)
