"""The training loop of a language model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sigattn.data.text import ByteText
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.train import checkpoint
from sigattn.train.interrupt import CtrlC
from sigattn.train.metrics import MetricsLog
from sigattn.train.optimizer import adamw
from sigattn.train.schedule import cosine_with_warmup

NATS_PER_BIT = math.log(2)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained.

    Attributes:
        steps: number of updates. batch: sequences in each.
        learning_rate: the peak; warmup_steps to reach it; final_learning_rate, as a part of the peak, at the end.
        betas, weight_decay: AdamW's. clip: the largest norm of the whole gradient.
        validate_every: steps between validations, each on validation_batch sequences; the last step always validates.
        checkpoint_every: steps between checkpoints.
        seed: of the initial weights and of the order of the data.
    """

    steps: int = 300
    batch: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 30
    final_learning_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    validate_every: int = 50
    validation_batch: int = 64
    checkpoint_every: int = 50
    seed: int = 0


Row = dict[str, Any]


class Interrupted(Exception):  # noqa: N818  (nothing went wrong)
    """Training was stopped by the user; its state is in the checkpoint."""


def train(
    model_config: LanguageModelConfig,
    config: TrainConfig,
    text: ByteText,
    folder: Path,
    *,
    resume: bool = False,
    on_row: Callable[[Row], None] = lambda _: None,
) -> LanguageModel:
    """Train a model, or finish training it, and leave metrics and a checkpoint in a folder.

    Args:
        folder: made if missing. It gets metrics.jsonl, tensorboard's events and checkpoint.safetensors.
        resume: go on from the folder's checkpoint, if it has one, to the numbers of a run that was never stopped.
        on_row: called with each step's measurements.

    Raises:
        Interrupted: on Ctrl-C, once the step at hand is finished and the checkpoint written. (A second Ctrl-C does not
            wait for that; the last regular checkpoint is then what there is.)
        CheckpointError: if the checkpoint does not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    model = LanguageModel(model_config)
    optimizer = adamw(model, learning_rate=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
    path = folder / "checkpoint.safetensors"
    about = {**asdict(model_config), **asdict(config), "betas": list(config.betas), "text": text.sha256}
    done = checkpoint.load(path, model, optimizer, about) if resume and path.exists() else 0
    log = MetricsLog(folder, first_step=done)
    try:
        with CtrlC() as ctrl_c:
            for step in range(done, config.steps):
                row = _step(model, optimizer, config, text, step)
                done = step + 1
                if done % config.validate_every == 0 or done == config.steps:
                    row["validation_bits_per_byte"] = validate(model, text, config.validation_batch)
                log.write(row)
                on_row(row)
                if done % config.checkpoint_every == 0 or done == config.steps or ctrl_c.pressed:
                    checkpoint.save(path, model, optimizer, done, about)
                if ctrl_c.pressed:
                    raise Interrupted(f"stopped after {done} of {config.steps} steps; the checkpoint is {path}")
    finally:
        log.close()
    return model


def _step(
    model: LanguageModel, optimizer: torch.optim.Optimizer, config: TrainConfig, text: ByteText, step: int
) -> Row:
    """One update and what was measured on the way."""
    start = time.perf_counter()
    context = model.config.context
    factor = cosine_with_warmup(
        step, steps=config.steps, warmup_steps=config.warmup_steps, final=config.final_learning_rate
    )
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * factor
    tokens, targets = text.batch(step, config.batch, context, config.seed)
    with model.watching() as layers:
        loss = model.loss(tokens, targets)
        norms = [layer.attention_norm for layer in layers if layer.attention_norm is not None]
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    seconds = time.perf_counter() - start
    return {
        "step": step,
        "loss": loss.item(),
        "bits_per_byte": loss.item() / NATS_PER_BIT,
        "learning_rate": config.learning_rate * factor,
        "attention_norm": torch.stack(norms).mean().item(),
        "gradient_norm": gradient_norm.item(),
        "tokens_per_second": tokens.numel() / seconds,
    }


@torch.no_grad()
def validate(model: LanguageModel, text: ByteText, sequences: int, at_once: int = 16) -> float:
    """Bits per byte on the held-out text."""
    tokens, targets = text.validation_batch(sequences, model.config.context)
    total = 0.0
    for t, target in zip(tokens.split(at_once), targets.split(at_once), strict=True):
        total += model.loss(t, target).item() * len(t)
    return total / len(tokens) / NATS_PER_BIT
