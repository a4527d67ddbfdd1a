"""The training loop, of any task and model, on one process or many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sigattn.data.dataset import Batch, Data
from sigattn.distributed import sharding
from sigattn.distributed.context_parallel import Share, shared
from sigattn.distributed.placement import Placement
from sigattn.distributed.sharding import Processes
from sigattn.models import saving
from sigattn.models.language import LanguageModelConfig
from sigattn.models.transformer import Transformer, watching
from sigattn.nn.attention import Attention
from sigattn.train import checkpoint
from sigattn.train.config import TrainConfig
from sigattn.train.interrupt import CtrlC
from sigattn.train.metrics import MetricsLog
from sigattn.train.optimizer import make_optimizer, set_learning_rate
from sigattn.train.schedule import factor
from sigattn.validation import SettingsError

Row = dict[str, Any]

# settings that may change when a run is resumed
FREE = {
    "parallel",
    "tensor_parallel",
    "context_parallel",
    "context_strategy",
    "accumulate",
    "compile",
    "checkpoint_activations",
}
FREE |= {"wandb", "keep", "validate_every", "validation_batch", "checkpoint_every", "watch_every", "statistics_every"}


@runtime_checkable
class Objective(Protocol):
    """What the loop asks of a task, a dataclass (``sigattn.tasks.task``, which it does not know)."""

    def build(self, model: Any) -> nn.Module:
        """What is trained."""

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch."""

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over held-out batches."""

    def backbone(self, module: nn.Module) -> nn.Module:
        """The model within what is trained."""

    def after_step(self, module: nn.Module, samples: int) -> None:
        """Called after each update."""


class Interrupted(Exception):  # noqa: N818  (nothing went wrong)
    """Training was stopped by the user; its state is in the checkpoint."""


class NonFiniteLossError(Exception):
    """The loss or its gradient is infinite or not a number; the message names the last good checkpoint."""


def train(
    task: Objective,
    model: Any,
    config: TrainConfig,
    data: Data,
    folder: Path,
    *,
    resume: bool = False,
    on_row: Callable[[Row], None] = lambda _: None,
) -> nn.Module:
    """Train a model, or finish training it, and leave metrics, checkpoints and the model in a folder.

    Args:
        task: the objective. model: a configuration of ``sigattn.models``. data: what to train on.
        folder: made if missing. It gets metrics.jsonl, tensorboard's events, checkpoints/ and, at the end, model/
            (``sigattn.models.saving``).
        resume: go on from the folder's last checkpoint, if it has one, to the numbers of a run that was never stopped.
        on_row: called with each step's measurements (by the first process).

    Returns:
        The trained model, on this process's device; with ``ema``, its average.

    Raises:
        Interrupted: on Ctrl-C, once the step at hand is finished and the checkpoint written. (A second Ctrl-C does not
            wait for that; the last regular checkpoint is then what there is.)
        NonFiniteLossError: if the loss or its gradient is not finite; nothing was changed by that step.
        CheckpointError: if the checkpoint does not fit.
        SettingsError: a ValueError, for settings that do not fit together.
        MissingPackageError: with ``wandb`` in the settings, where it is not installed.
    """
    processes = sharding.processes()
    torch.manual_seed(config.seed)
    run = _Run.start(task, model, config, data, processes)
    checkpoints = folder / "checkpoints"
    about = run.about(model)
    done = 0
    if resume and (found := checkpoint.complete(checkpoints)):
        done = checkpoint.load(found[-1], run.module, run.optimizer, about, average=run.average)
    if processes.first:
        folder.mkdir(parents=True, exist_ok=True)
    log = MetricsLog(folder, done, wandb=config.wandb, settings=about) if processes.first else None
    try:
        with CtrlC() as ctrl_c:
            batches = data.batches(done, config.batch, config.seed, run.processes.shard)
            for step in range(done, config.steps):
                row = run.step(step, next(batches), checkpoints)
                done = step + 1
                if done % config.validate_every == 0 or done == config.steps:
                    row |= {f"validation_{name}": value for name, value in run.validate().items()}
                if log is not None:
                    log.write(row)
                    on_row(row)
                stop = processes.any(ctrl_c.pressed)
                if done % config.checkpoint_every == 0 or done == config.steps or stop:
                    path = checkpoint.save(
                        checkpoints, run.module, run.optimizer, done, about, average=run.average, keep=config.keep
                    )
                if stop:
                    raise Interrupted(f"stopped after {done} of {config.steps} steps; the checkpoint is {path}")
    finally:
        if log is not None:
            log.close()
    return run.finish(folder)


def evaluate(task: Objective, model: Any, config: TrainConfig, data: Data, folder: Path) -> dict[str, float]:
    """Metrics of a run's last checkpoint on the held-out data; arguments as in ``train``.

    Raises:
        CheckpointError: if there is no checkpoint, or it does not fit.
    """
    found = checkpoint.complete(folder / "checkpoints")
    if not found:
        raise checkpoint.CheckpointError(f"{folder} has no checkpoint to evaluate")
    run = _Run.start(task, model, replace(config, compile=False), data, sharding.processes())
    about = {k: v for k, v in run.about(model).items() if k != "data"}  # other data may be asked for
    checkpoint.load(found[-1], run.module, run.optimizer, about, average=run.average)
    return run.validate()


def _check_context(model: Any, config: TrainConfig) -> None:
    """Only what looks along the sequence by sigmoid attention alone can be shared out along it."""
    if config.context_parallel == 1:
        return
    if not isinstance(model, LanguageModelConfig) or model.activation != "sigmoid":
        raise SettingsError(f"context_parallel is for language models with sigmoid attention, got {model}")
    if config.compile:
        raise SettingsError("context_parallel with compile has not been made to work: say --training.no-compile")


@dataclass
class _Run:
    """What a run is made of."""

    task: Objective
    config: TrainConfig
    data: Data
    processes: Processes
    module: nn.Module
    optimizer: Optimizer
    average: AveragedModel | None

    @classmethod
    def start(cls, task: Objective, model: Any, config: TrainConfig, data: Data, processes: Processes) -> _Run:
        module = task.build(model)
        for part in module.modules():
            if isinstance(part, Transformer):
                part.checkpoint_activations = config.checkpoint_activations
        if config.compile:
            module.compile()
        width = getattr(model, "width", None) or model.encoder.width
        processes = processes.arranged(config.tensor_parallel, config.context_parallel)
        _check_context(model, config)
        if config.parallel != "fsdp" or processes.replicas == 1 or config.tensor_parallel > 1:
            module = module.to(processes.device)  # else a device only ever holds its part and one whole block
        module = sharding.distribute(module, processes, config.parallel, config.precision)
        average = None
        if config.ema is not None:
            if processes.count > 1 and config.parallel == "fsdp":
                raise SettingsError('an average of weights (ema) needs whole weights on each process: parallel="ddp"')
            average = AveragedModel(
                sharding.unwrap(module), multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True
            )
        return cls(task, config, data, processes, module, make_optimizer(module, config, width), average)

    def about(self, model: Any) -> dict[str, Any]:
        """What must be the same when the run is resumed: not how many processes share it, nor how often it reports."""
        training = {name: value for name, value in asdict(self.config).items() if name not in FREE}
        settings: Any = self.task
        task = {f"task.{name}": value for name, value in asdict(settings).items()}
        return {**asdict(model), **training, **task, "task": type(self.task).__name__, "data": self.data.fingerprint}

    def step(self, step: int, batch: Batch, checkpoints: Path) -> Row:
        """One update and what was measured on the way."""
        start = time.perf_counter()
        config, device = self.config, self.processes.device
        rate = config.learning_rate * factor(config, step)
        set_learning_rate(self.optimizer, rate)
        # all that is drawn in a step depends on seed, step and process alone: there is no state to keep
        torch.manual_seed((config.seed * 1_000_003 + step) * 4099 + self.processes.data_rank)
        batch = tuple(t.to(device, non_blocking=True) for t in batch)
        watch = bool(config.watch_every) and step % config.watch_every == 0
        closely = bool(config.statistics_every) and step % config.statistics_every == 0
        with watching(self.module, "everything" if closely else "norm" if watch else "nothing") as layers:
            loss, attention_norm = self._backward(batch, layers if watch or closely else [])
            statistics = [layer.statistics for layer in layers if closely and layer.statistics is not None]
        norm = sharding.gradient_norm(self.module, self.processes)
        measured, gradient_norm = loss.item(), norm.item()
        if not math.isfinite(measured) or not math.isfinite(gradient_norm):
            found = checkpoint.complete(checkpoints)
            last = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
            raise NonFiniteLossError(f"step {step}: loss {measured}, gradient norm {gradient_norm}; {last}")
        if config.clip is not None:
            sharding.clip_gradient(self.module, config.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        inner = sharding.unwrap(self.module)
        self.task.after_step(inner, config.batch)
        if self.average is not None:
            self.average.update_parameters(inner)
        row: Row = {"step": step, "loss": measured, "learning_rate": rate, "gradient_norm": gradient_norm}
        if attention_norm is not None:
            row["attention_norm"] = attention_norm.item()
        row |= self.processes.statistics(statistics) if statistics else {}
        row["samples_per_second"] = config.batch / (time.perf_counter() - start)
        return row

    def _backward(self, batch: Batch, watched: list[Attention]) -> tuple[Tensor, Tensor | None]:
        """Gradients of the mean loss over the whole batch, in micro-batches.

        Gives that mean, and the mean norm of the watched layers' outputs (None without such layers).
        """
        share = self._share(batch)
        if share is not None:  # this process's positions of each sequence
            part = share.placement.size(share.mesh.get_local_rank()) / share.length
            batch = tuple(share.part(t) for t in batch)
        else:
            part = 1.0
        own = torch.tensor(float(len(batch[0])), device=self.processes.device)
        total = self.processes.sum(own) / self.processes.context_count
        pieces = [t.chunk(self.config.accumulate) for t in batch]
        count = len(pieces[0])
        mean = torch.zeros((), device=self.processes.device)
        norms: list[Tensor] = []
        for i, piece in enumerate(zip(*pieces, strict=True)):
            weight = part * len(piece[0]) / total
            with (
                sharding.synchronised(self.module, i == count - 1),
                shared(self.module, share),
                torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"),
            ):
                loss = self.task.loss(self.module, piece)
            norms += [layer.attention_norm for layer in watched if layer.attention_norm is not None]
            # processes average their gradients, where their losses are to be added
            with sharding.synchronised(self.module, i == count - 1), shared(self.module, share):
                (loss * weight * self.processes.replicas).backward()
            mean += loss.detach() * weight
        mean = self.processes.sum(mean)
        if not norms:
            return mean, None
        each = self.processes.whole_norm(torch.cat(norms))
        return mean, self.processes.sum(each.sum()) / self.processes.sum(torch.full_like(each[0], len(each)))

    def _share(self, batch: Batch) -> Share | None:
        """This process's share of the batch's sequences, where processes share them."""
        mesh = self.processes.context
        if mesh is None:
            return None
        return Share(mesh, Placement(batch[0].shape[1], mesh.size(), balanced=True), self.config.context_strategy)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Metrics on the held-out data; every process computes all of them."""
        module = sharding.unwrap(self.module) if self.average is None else self.average.module
        module.eval()
        device = self.processes.device
        held_out = self.data.validation(self.config.validation_batch)
        batches = (tuple(t.to(device) for t in batch) for batch in held_out)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            metrics = self.task.evaluate(module, batches)
        module.train()
        return metrics

    def finish(self, folder: Path) -> nn.Module:
        """Keep the model, and give it."""
        module = sharding.unwrap(self.module) if self.average is None else self.average.module
        backbone = self.task.backbone(module)
        state = sharding.whole_state(backbone)
        if self.processes.first:
            saving.save(backbone, folder / "model", state)
        self.processes.wait()
        return backbone
