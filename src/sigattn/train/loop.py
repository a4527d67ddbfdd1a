"""Training loop for any task and model, on one process or many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sigattn.data.dataset import Batch, Data
from sigattn.distributed import sharding
from sigattn.distributed.context_parallel import ContextParallelShard, context_parallel
from sigattn.distributed.process_mesh import ProcessMesh, init_process_mesh
from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.models import saving
from sigattn.models.language import LanguageModelConfig
from sigattn.models.transformer import Transformer, recording
from sigattn.nn.attention import Attention
from sigattn.train import checkpoint
from sigattn.train.config import TrainConfig
from sigattn.train.folder_lock import FolderInUseError, lock_folder
from sigattn.train.identity import settings_to_resume
from sigattn.train.interrupt import StopRequest
from sigattn.train.metrics import MetricsLog
from sigattn.train.optimizer import make_optimizer, set_learning_rate
from sigattn.train.schedule import learning_rate_factor
from sigattn.validation import SettingsError

Row = dict[str, Any]


@runtime_checkable
class Objective(Protocol):
    """Protocol of a task, a dataclass (implemented by ``sigattn.tasks.task``, which this module does not import)."""

    def build(self, model: Any) -> nn.Module:
        """Build the module that is trained, from the configuration of a model."""

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch."""

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return metrics over held-out batches."""

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the model within the trained module."""

    def after_step(self, module: nn.Module, samples: int) -> None:
        """Update state that is not trained by gradients; called after each update."""


class Interrupted(Exception):  # noqa: N818  (nothing went wrong)
    """Training was stopped by a signal; its state is in the last checkpoint.

    Attributes:
        signal: number of the signal, SIGINT (Ctrl-C) or SIGTERM.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class NonFiniteLossError(Exception):
    """A loss, gradient or weight is infinite or NaN; the message names the last good checkpoint."""


def train(
    task: Objective,
    model: Any,
    config: TrainConfig,
    data: Data,
    folder: Path,
    *,
    resume: bool = False,
    on_row: Callable[[Row], None] = lambda _: None,
    on_start: Callable[[int], None] = lambda _: None,
) -> nn.Module:
    """Train a model, or finish training it, and write metrics, checkpoints and the model into a folder.

    The folder is locked during training. Nothing in it is changed before settings, data and checkpoint have been
    checked.

    Args:
        task: the objective. model: a configuration of ``sigattn.models``. data: the training and held-out data.
        folder: created if missing. Receives metrics.jsonl, tensorboard's events, checkpoints/ and, at the end, model/
            (``sigattn.models.saving``).
        resume: continue from the folder's last checkpoint, if there is one. The results equal those of a run that was
            never stopped.
        on_row: called with each step's measurements (on the main process).
        on_start: called (on the main process) with the number of steps done before, after all checks have passed.

    Returns:
        The trained model, on this process's device; with ``ema``, its average.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM to any process, once the current step is finished and the checkpoint
            written. (A second Ctrl-C stops at once; the last checkpoint is then the last regular one.)
        NonFiniteLossError: if the loss or its gradient is not finite (the weights are then unchanged by that step), or
            the weights or the held-out loss are not. Checkpoints hold finite weights only.
        CheckpointError: if the checkpoint does not fit.
        FolderInUseError: if another process is writing into the folder.
        SettingsError: a ValueError, if settings do not fit together, or if the folder holds checkpoints and ``resume``
            is False.
        MissingPackageError: if ``wandb`` is set and the package is not installed.
    """
    processes = init_process_mesh()
    with _locked_by_first(folder, processes):
        if not resume:
            checkpoint.check_no_checkpoints(folder)
        torch.manual_seed(config.seed)
        run = _Run.start(task, model, config, data, processes)
        about = settings_to_resume(task, model, config, data.fingerprint)
        done = 0
        if resume and (found := checkpoint.list_checkpoints(folder / "checkpoints")):
            done = run.load(found[-1], about)
        log = MetricsLog(folder, done, wandb=config.wandb, settings=about) if processes.is_main_process else None
        try:
            if processes.is_main_process:
                on_start(done)
            with StopRequest() as request:
                run.steps(done, folder / "checkpoints", about, request, log, on_row)
        finally:
            if log is not None:
                log.close()
        return run.finish(folder)


@contextmanager
def _locked_by_first(folder: Path, processes: ProcessMesh) -> Iterator[None]:
    """Lock a run folder on the main process; if that fails, all processes raise."""
    error: Exception | None = None
    with ExitStack() as stack:
        if processes.is_main_process:
            try:
                stack.enter_context(lock_folder(folder))
            except (FolderInUseError, OSError) as caught:
                error = caught
        if processes.reduce_max(error is not None):
            raise error or FolderInUseError(f"the main process cannot write into the run folder {folder}")
        yield


def evaluate(task: Objective, model: Any, config: TrainConfig, data: Data, folder: Path) -> dict[str, float]:
    """Return the metrics of a run on the held-out data; arguments as in ``train``.

    The model in ``folder/model`` is evaluated if it is the whole trained module, else (before training has ended, or
    with an objective that adds layers to the model) the last checkpoint.

    Raises:
        CheckpointError: if there is neither, or the checkpoint does not fit.
        ModelError: if the model in the folder has another configuration.
    """
    run = _Run.start(task, model, replace(config, compile=False), data, init_process_mesh())
    inner = sharding.unwrap(run.module)
    if task.backbone(inner) is inner and (folder / "model").is_dir():
        kept = saving.load(folder / "model")
        if kept.config != model:
            raise saving.ModelError(f"{folder / 'model'} holds another model than the run: {kept.config}")
        sharding.load_full_state_dict(inner, kept.state_dict())
        run.average = None  # the saved model is the average
        return run.validate()
    found = checkpoint.list_checkpoints(folder / "checkpoints")
    if not found:
        raise checkpoint.CheckpointError(f"{folder} has no checkpoint to evaluate")
    about = settings_to_resume(task, model, config, "")
    del about["data"]  # the data may differ from the training data
    run.load(found[-1], about)
    return run.validate()


def _not_finite(message: str, checkpoints: Path) -> NonFiniteLossError:
    found = checkpoint.list_checkpoints(checkpoints)
    last = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
    return NonFiniteLossError(f"{message}; {last}")


def _check_context(model: Any, config: TrainConfig) -> None:
    """Raise SettingsError if context parallelism does not support the model or the settings.

    A sequence can be split over processes only if sigmoid attention is the only layer that mixes its positions.
    """
    if config.context_parallel == 1:
        return
    if not isinstance(model, LanguageModelConfig) or model.activation != "sigmoid":
        raise SettingsError(f"context_parallel supports language models with sigmoid attention only, got {model}")
    if config.compile:
        raise SettingsError("context_parallel does not support compile=True: set compile=False")


@dataclass
class _Run:
    """Module, optimiser, data and processes of a run."""

    task: Objective
    config: TrainConfig
    data: Data
    processes: ProcessMesh
    module: nn.Module
    optimizer: Optimizer
    average: AveragedModel | None

    @classmethod
    def start(cls, task: Objective, model: Any, config: TrainConfig, data: Data, processes: ProcessMesh) -> _Run:
        """Build the module, distribute it over the processes, and create its optimiser."""
        module = task.build(model)
        for part in module.modules():
            if isinstance(part, Transformer):
                part.checkpoint_activations = config.checkpoint_activations
        if config.compile:
            module.compile()
        width = getattr(model, "embed_dim", None) or model.encoder.embed_dim
        processes = processes.with_mesh(config.tensor_parallel, config.context_parallel)
        _check_context(model, config)
        if config.parallel != "fsdp" or processes.num_replicas == 1 or config.tensor_parallel > 1:
            module = module.to(processes.device)  # else a device holds at most its shard and one whole block
        module = sharding.distribute(module, processes, config.parallel, config.precision)
        average = None
        if config.ema is not None:
            if processes.world_size > 1 and config.parallel == "fsdp":
                raise SettingsError('ema needs the whole weights on each process: set parallel="ddp", or ema=None')
            average = AveragedModel(
                sharding.unwrap(module), multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True
            )
        return cls(task, config, data, processes, module, make_optimizer(module, config, width), average)

    def load(self, path: Path, about: dict[str, Any]) -> int:
        """Load a checkpoint's state, and return the number of steps done.

        Raises:
            CheckpointError: if the checkpoint does not fit, or its weights are not finite.
        """
        done = checkpoint.load(path, self.module, self.optimizer, about, average=self.average)
        if not self.finite():
            raise checkpoint.CheckpointError(f"{path} holds weights that are not finite: delete it to use an older one")
        return done

    def steps(
        self,
        done: int,
        checkpoints: Path,
        about: dict[str, Any],
        request: StopRequest,
        log: MetricsLog | None,
        on_row: Callable[[Row], None],
    ) -> None:
        """Run the remaining steps, starting at ``done``, with validations and checkpoints."""
        config = self.config
        batches = self.data.batches(done, config.batch_size, config.seed, self.processes.shard)
        for step in range(done, config.max_steps):
            row = self.step(step, next(batches), checkpoints)
            done = step + 1
            if done % config.validate_every == 0 or done == config.max_steps:
                self.check_weights(step, checkpoints)
                row |= {f"validation_{name}": value for name, value in self.validate().items()}
                if not math.isfinite(row.get("validation_loss", 0.0)):
                    raise _not_finite(f"step {step}: held-out loss {row['validation_loss']}", checkpoints)
            if log is not None:
                log.write(row)
                on_row(row)
            stop = self.processes.reduce_max(request.signal)
            if done % config.checkpoint_every == 0 or done == config.max_steps or stop:
                self.check_weights(step, checkpoints)
                path = checkpoint.save(
                    checkpoints,
                    self.module,
                    self.optimizer,
                    done,
                    about,
                    average=self.average,
                    keep_checkpoints=config.keep_checkpoints,
                )
            if stop:
                raise Interrupted(f"stopped after {done} of {config.max_steps} steps; the checkpoint is {path}", stop)

    def finite(self) -> bool:
        """Return True if all weights and the optimizer's state, on all processes, are finite."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        if self.average is not None:
            tensors += list(self.average.parameters())
        each = [sharding.to_local(t.detach()).isfinite().all().to(self.processes.device) for t in tensors]
        return not self.processes.reduce_max(not torch.stack(each).all())

    def check_weights(self, step: int, checkpoints: Path) -> None:
        """Raise NonFiniteLossError if a weight is not finite."""
        if not self.finite():
            raise _not_finite(f"step {step}: weights that are not finite", checkpoints)

    def step(self, step: int, batch: Batch, checkpoints: Path) -> Row:
        """Do one update and return its measurements."""
        start = time.perf_counter()
        config, device = self.config, self.processes.device
        rate = config.learning_rate * learning_rate_factor(config, step)
        set_learning_rate(self.optimizer, rate)
        # random numbers depend on seed, step and process only, so that no generator state has to be saved
        torch.manual_seed((config.seed * 1_000_003 + step) * 4099 + self.processes.dp_rank)
        batch = tuple(t.to(device, non_blocking=True) for t in batch)
        watch = bool(config.log_attention_every) and step % config.log_attention_every == 0
        closely = bool(config.statistics_every) and step % config.statistics_every == 0
        with recording(self.module, "everything" if closely else "norm" if watch else "nothing") as layers:
            loss, attention_norm = self._backward(batch, layers if watch or closely else [])
            statistics = [layer.statistics for layer in layers if closely and layer.statistics is not None]
        norm = sharding.total_grad_norm(self.module, self.processes)
        measured, gradient_norm = loss.item(), norm.item()
        if not math.isfinite(measured) or not math.isfinite(gradient_norm):
            raise _not_finite(f"step {step}: loss {measured}, gradient norm {gradient_norm}", checkpoints)
        if config.max_grad_norm is not None:
            sharding.clip_grad_norm(self.module, config.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        inner = sharding.unwrap(self.module)
        self.task.after_step(inner, config.batch_size)
        if self.average is not None:
            self.average.update_parameters(inner)
        row: Row = {"step": step, "loss": measured, "learning_rate": rate, "gradient_norm": gradient_norm}
        if attention_norm is not None:
            row["attention_norm"] = attention_norm.item()
        row |= self.processes.reduce_statistics(statistics) if statistics else {}
        row["samples_per_second"] = config.batch_size / (time.perf_counter() - start)
        return row

    def _backward(self, batch: Batch, watched: list[Attention]) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of the mean loss over the whole batch, in micro-batches.

        Returns:
            That mean, and the mean norm of the outputs of the ``watched`` layers (None without such layers).
        """
        share = self._share(batch)
        if share is not None:
            part = share.sharding.size(share.mesh.get_local_rank()) / share.length
            batch = tuple(share.shard(t) for t in batch)
        else:
            part = 1.0
        own = torch.tensor(float(len(batch[0])), device=self.processes.device)
        total = self.processes.reduce_sum(own) / self.processes.cp_size
        pieces = [t.chunk(self.config.grad_accum_steps) for t in batch]
        count = len(pieces[0])
        mean = torch.zeros((), device=self.processes.device)
        norms: list[Tensor] = []
        for i, piece in enumerate(zip(*pieces, strict=True)):
            weight = part * len(piece[0]) / total
            with (
                sharding.gradient_sync(self.module, i == count - 1),
                context_parallel(self.module, share),
                torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"),
            ):
                loss = self.task.loss(self.module, piece)
            norms += [layer.output_frobenius_norm for layer in watched if layer.output_frobenius_norm is not None]
            # gradients are averaged over processes but the losses are to be added, hence the factor of replicas
            with sharding.gradient_sync(self.module, i == count - 1), context_parallel(self.module, share):
                (loss * weight * self.processes.num_replicas).backward()
            mean += loss.detach() * weight
        mean = self.processes.reduce_sum(mean)
        if not norms:
            return mean, None
        each = self.processes.reduce_norm(torch.cat(norms))
        return mean, self.processes.reduce_sum(each.sum()) / self.processes.reduce_sum(
            torch.full_like(each[0], len(each))
        )

    def _share(self, batch: Batch) -> ContextParallelShard | None:
        """Return this process's positions of the batch's sequences, or None without context parallelism."""
        mesh = self.processes.cp_mesh
        if mesh is None:
            return None
        return ContextParallelShard(
            mesh, SequenceSharding(batch[0].shape[1], mesh.size(), balanced=True), self.config.context_strategy
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return metrics on the held-out data; every process evaluates all of it."""
        module = sharding.unwrap(self.module) if self.average is None else self.average.module
        module.eval()
        device = self.processes.device
        held_out = self.data.validation(self.config.eval_batch_size)
        batches = (tuple(t.to(device) for t in batch) for batch in held_out)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            metrics = self.task.evaluate(module, batches)
        module.train()
        return metrics

    def finish(self, folder: Path) -> nn.Module:
        """Save the trained model in ``folder/model``, and return it."""
        module = sharding.unwrap(self.module) if self.average is None else self.average.module
        backbone = self.task.backbone(module)
        state = sharding.full_state_dict(backbone)
        if self.processes.is_main_process:
            saving.save(backbone, folder / "model", state)
        self.processes.barrier()
        return backbone
