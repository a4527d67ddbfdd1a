"""Training and evaluation of a run in a folder: its module, optimiser, data and processes, and its steps."""

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sigattn.data.dataset import Batch, Data, PlaceholderBatch
from sigattn.data.task import Task
from sigattn.distributed import sharding
from sigattn.distributed.process_mesh import ProcessMesh, init_process_mesh
from sigattn.distributed.sequence_sharding import SequenceSharding
from sigattn.distributed.sharded_attention import ContextParallelShard, context_parallel
from sigattn.models import saving
from sigattn.models.config import ModelConfig
from sigattn.models.transformer import Transformer, recording
from sigattn.nn.attention import Attention
from sigattn.nn.evaluation import evaluation_mode
from sigattn.ops.statistics import AttentionStatistics
from sigattn.train import checkpoint
from sigattn.train.config import TrainConfig, settings_to_resume
from sigattn.train.folder_lock import lock_folder
from sigattn.train.metrics import MetricsLog
from sigattn.train.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from sigattn.validation import SettingsError, UserError

Row = dict[str, Any]


class Interrupted(Exception):  # noqa: N818  (not an error)
    """Training was stopped by a signal; its state is in the last checkpoint.

    ``signal`` is the number of the signal, SIGINT (Ctrl-C) or SIGTERM.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class NonFiniteLossError(UserError):
    """A loss, gradient or weight is infinite or NaN; the message names the last good checkpoint."""


def train(
    task: Task,
    model: ModelConfig,
    config: TrainConfig,
    data: Data,
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
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
        weights: state dict of the model to start from; None for its own initial weights. A checkpoint that is resumed
            replaces them.
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
    with lock_folder(folder, processes):
        if not resume:
            checkpoint.check_no_checkpoints(folder)
        torch.manual_seed(config.seed)
        trainer = Trainer(task, model, config, data, processes, folder, weights)
        settings = settings_to_resume(task, model, config, data.fingerprint)
        done = trainer.load_last_checkpoint(settings) if resume else 0
        log = MetricsLog(folder, done, wandb=config.wandb, settings=settings) if processes.is_main_process else None
        try:
            if processes.is_main_process:
                on_start(done)
            trainer.train(done, settings, log, on_row)
        finally:
            if log is not None:
                log.close()
        return trainer.save_model(folder)


def evaluate(task: Task, model: ModelConfig, config: TrainConfig, data: Data, folder: Path) -> dict[str, float]:
    """Return the metrics of a run on the held-out data; arguments as in ``train``.

    The model in ``folder/model`` is evaluated if it is the whole trained module, else (before training has ended, or
    with an objective that adds layers to the model) the last checkpoint. Raises CheckpointError if there is neither or
    the checkpoint does not fit, ModelError if the model in the folder has another configuration.
    """
    processes, evaluation = init_process_mesh(), replace(config, compile=False)
    if processes.world_size == 1:  # a run of several processes can be evaluated on one
        evaluation = replace(evaluation, tensor_parallel=1, context_parallel=1)
    trainer = Trainer(task, model, evaluation, data, processes, folder)
    inner = sharding.unwrap(trainer.module)
    if task.backbone(inner) is inner and (folder / "model").is_dir():
        saved = saving.load(folder / "model")
        if saved.config != model:
            raise saving.ModelError(f"{folder / 'model'} holds another model than the run: {saved.config}")
        sharding.load_full_state_dict(inner, saved.state_dict())
        trainer.average = None  # the saved model is the average
        return trainer.validate()
    settings = settings_to_resume(task, model, config, "")
    del settings["data"]  # the data may differ from the training data
    if not trainer.load_last_checkpoint(settings):
        raise checkpoint.CheckpointError(f"{folder} has no checkpoint to evaluate")
    return trainer.validate()


class StopRequest:
    """Context manager in which SIGINT and SIGTERM only set ``signal``, the signal's number (0 before any).

    A second SIGINT raises KeyboardInterrupt at once. A second SIGTERM is ignored, because schedulers and torchrun may
    both send one; they send SIGKILL when their grace period ends.

    Outside the main thread, where Python does not allow signal handlers, the context does nothing.
    """

    def __init__(self) -> None:
        self.signal: int = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or int(number)


class Trainer:
    """Module, optimiser, data and processes of a run; arguments as in ``train``.

    Attributes:
        processes: with their meshes.
        module: the trained module, distributed over the processes.
        average: exponential moving average of the weights; None for none.
        checkpoints: folder of the checkpoints.
    """

    def __init__(
        self, task: Task, model: ModelConfig, config: TrainConfig, data: Data, processes: ProcessMesh, folder: Path,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        _check_context(task, model, config)
        module = task.build(model)
        if weights is not None:
            task.backbone(module).load_state_dict(weights)
        for layer in module.modules():
            if isinstance(layer, Transformer):
                layer.checkpoint_activations = config.checkpoint_activations
        if config.compile:
            module.compile()
        processes = processes.with_mesh(config.tensor_parallel, config.context_parallel)
        _check_batch(task, config, data, processes)
        if config.parallel != "fsdp" or processes.num_replicas == 1 or config.tensor_parallel > 1:
            module = module.to(processes.device)  # else a device holds at most its shard and one whole block
        self.task, self.config, self.data, self.processes = task, config, data, processes
        self.checkpoints: Path = folder / "checkpoints"
        self.module: nn.Module = sharding.distribute(module, processes, config.parallel, config.precision)
        self.average: AveragedModel | None = None
        if config.ema is not None:
            if processes.world_size > 1 and (config.parallel == "fsdp" or processes.tp_size > 1):
                raise SettingsError(
                    'ema needs the whole weights on each process: set parallel="ddp" and tensor_parallel=1, or ema=None'
                )
            inner = sharding.unwrap(self.module)
            self.average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)
        self.optimizer: torch.optim.Optimizer = make_optimizer(self.module, config, model.transformer.embed_dim)

    def load_last_checkpoint(self, settings: dict[str, Any]) -> int:
        """Load the last checkpoint, if any, and return the number of steps done; raise if it does not fit."""
        checkpoints = checkpoint.list_checkpoints(self.checkpoints)
        if not checkpoints:
            return 0
        run = (self.module, self.optimizer, settings, self.processes)
        return checkpoint.load(checkpoints[-1], *run, average=self.average)

    def train(
        self, done: int, settings: dict[str, Any], log: MetricsLog | None,
        on_row: Callable[[Row], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Run the steps after the first ``done``, with validations and checkpoints; ``on_row`` and errors: ``train``.

        ``settings`` are compared when the run is resumed; ``log`` is that of the main process.
        """
        config = self.config
        batches = self.data.batches(done, config.batch_size, config.seed, self.processes.shard)
        with StopRequest() as request:
            for step in range(done, config.max_steps):
                row = self._step(step, next(batches))
                done = step + 1
                is_last = done == config.max_steps
                if done % config.validate_every == 0 or is_last:
                    self._check_weights(step)
                    row |= {f"validation_{name}": value for name, value in self.validate().items()}
                    if not math.isfinite(row.get("validation_loss", 0.0)):
                        raise self._not_finite(f"step {step}: held-out loss {row['validation_loss']}")
                if log is not None:
                    log.write(row)
                    on_row(row)
                stop = self.processes.reduce_max(request.signal)
                if done % config.checkpoint_every == 0 or is_last or stop:
                    self._check_weights(step)
                    run = (self.module, self.optimizer, done, settings, self.processes)
                    keep = config.keep_checkpoints
                    path = checkpoint.save(self.checkpoints, *run, average=self.average, keep_checkpoints=keep)
                if stop:
                    raise Interrupted(
                        f"stopped after {done} of {config.max_steps} steps; the checkpoint is {path}", stop
                    )

    def _check_weights(self, step: int) -> None:
        """Raise NonFiniteLossError unless all weights and the optimizer's state, on all processes, are finite."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        if self.average is not None:
            tensors += list(self.average.parameters())
        are_finite = [sharding.to_local(t.detach()).isfinite().all().to(self.processes.device) for t in tensors]
        if self.processes.reduce_max(not torch.stack(are_finite).all()):
            raise self._not_finite(f"step {step}: weights that are not finite")

    def _not_finite(self, message: str) -> NonFiniteLossError:
        checkpoints = checkpoint.list_checkpoints(self.checkpoints)
        last = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        return NonFiniteLossError(f"{message}; {last}")

    def _step(self, step: int, batch: Batch) -> Row:
        start = time.perf_counter()
        config = self.config
        rate = config.learning_rate * learning_rate_factor(config, step)
        set_learning_rate(self.optimizer, rate)
        # random numbers depend on seed, step and process only, so that no generator state has to be saved
        torch.manual_seed((config.seed * 1_000_003 + step) * 4099 + self.processes.dp_rank)
        log_norms = bool(config.log_attention_every) and step % config.log_attention_every == 0
        log_statistics = bool(config.statistics_every) and step % config.statistics_every == 0
        with recording(self.module, "everything" if log_statistics else "norm" if log_norms else "nothing") as layers:
            loss, attention_norm, statistics = self._backward(batch, layers if log_norms or log_statistics else [])
        norm = sharding.total_grad_norm(self.module, self.processes)
        measured, gradient_norm = loss.item(), norm.item()
        if not math.isfinite(measured) or not math.isfinite(gradient_norm):
            raise self._not_finite(f"step {step}: loss {measured}, gradient norm {gradient_norm}")
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
        row |= self.processes.reduce_statistics(statistics) if log_statistics and layers else {}
        row["samples_per_second"] = config.batch_size / (time.perf_counter() - start)
        return row

    def _backward(
        self, batch: Batch, recorded: list[Attention]
    ) -> tuple[Tensor, Tensor | None, list[AttentionStatistics]]:
        """Compute the gradients of the mean loss over the whole batch, in micro-batches, and return that mean.

        Also returned: the mean norm of the outputs of the ``recorded`` layers (None without such layers), and the
        layers' last statistics in each of this process's micro-batches.
        """
        processes, device, shard = self.processes, self.processes.device, None
        if processes.cp_mesh is not None:
            positions = SequenceSharding(batch[0].shape[1], processes.cp_size, balanced=True)
            shard = ContextParallelShard(processes.cp_mesh, positions)
        micro_batches = self._micro_batches(batch, shard)
        counts = [self.task.count(part) if is_counted else 0 for part, is_counted in micro_batches]
        # the weights are by the terms of all processes: a mean over each one's own would depend on their number
        total = processes.reduce_sum(torch.as_tensor(sum(counts), dtype=torch.float32, device=device)).clamp(min=1)
        mean = torch.zeros((), device=device)
        norms, statistics = [torch.zeros(0, device=device)], []
        for i, (micro_batch, is_counted) in enumerate(micro_batches):
            weight = counts[i] / total
            sync = i == len(micro_batches) - 1
            with sharding.gradient_sync(self.module, sync), context_parallel(self.module, shard), self._autocast():
                loss = self.task.loss(self.module, micro_batch)
            if is_counted:
                norms += [layer.output_frobenius_norm for layer in recorded if layer.output_frobenius_norm is not None]
                statistics += [layer.statistics for layer in recorded if layer.statistics is not None]
            # gradients are averaged over processes but the losses are to be added, hence the factor num_replicas
            with sharding.gradient_sync(self.module, sync), context_parallel(self.module, shard):
                (loss * weight * processes.num_replicas).backward()
            mean += loss.detach() * weight
        mean = processes.reduce_sum(mean)
        if not recorded:
            return mean, None, []
        norm = processes.reduce_norm(torch.cat(norms))
        count = processes.reduce_sum(torch.tensor(float(len(norm)), device=device))
        return mean, processes.reduce_sum(norm.sum()) / count, statistics

    def _micro_batches(self, batch: Batch, shard: ContextParallelShard | None) -> list[tuple[Batch, bool]]:
        """Return this process's micro-batches on its device, each with False if it does not count.

        All processes compute equally many, because FSDP gathers the weights in each: a process with fewer repeats its
        last one, which does not count, and neither does a placeholder.
        """
        tensors = (t.to(self.processes.device, non_blocking=True) for t in batch)
        if shard is not None:
            tensors = (shard.shard(t) for t in tensors)
        parts = list(zip(*(t.chunk(self.config.grad_accum_steps) for t in tensors), strict=True))
        missing = self.processes.reduce_max(len(parts)) - len(parts) if self.config.grad_accum_steps > 1 else 0
        counted = [not isinstance(batch, PlaceholderBatch)] * len(parts)
        return list(zip(parts + parts[-1:] * missing, counted + [False] * missing, strict=True))

    def _evaluated(self) -> nn.Module:
        """Return the module that is evaluated and saved: with ``ema`` the average."""
        return sharding.unwrap(self.module) if self.average is None else self.average.module

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return metrics on the held-out data; every process evaluates all of it."""
        module, device = self._evaluated(), self.processes.device
        held_out = self.data.validation(self.config.eval_batch_size)
        batches = (tuple(t.to(device) for t in batch) for batch in held_out)
        with evaluation_mode(module), self._autocast():
            return self.task.evaluate(module, batches)

    def _autocast(self) -> torch.autocast:
        enabled = self.config.precision == "bfloat16"
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=enabled)

    def save_model(self, folder: Path) -> nn.Module:
        """Save the trained model in ``folder/model``, and return it."""
        backbone = self.task.backbone(self._evaluated())
        state = sharding.full_state_dict(backbone)
        if self.processes.is_main_process:
            saving.save(backbone, folder / "model", state)
        self.processes.barrier()
        return backbone


def _check_batch(task: Task, config: TrainConfig, data: Data, processes: ProcessMesh) -> None:
    """Raise SettingsError if a batch cannot be divided among micro-batches or processes as the settings request."""
    for name in ("grad_accum_steps", "tensor_parallel"):
        if task.needs_whole_batch and getattr(config, name) > 1:
            raise SettingsError(
                f"{type(task).__name__} does not support {name}={getattr(config, name)}, because its loss needs the "
                f"whole batch at once, each sample on one process: set {name}=1"
            )
    if data.batch_unit == "samples" and config.batch_size < processes.dp_size:
        raise SettingsError(
            f"batch_size={config.batch_size} leaves some of the {processes.dp_size} processes without a sample: set "
            f"batch_size to {processes.dp_size} or more, or start fewer processes"
        )


def _check_context(task: Task, model: ModelConfig, config: TrainConfig) -> None:
    """Raise SettingsError if context parallelism does not support the model or the settings.

    A sequence can be split over processes only if sigmoid attention is the only layer that mixes its positions.
    """
    if config.context_parallel == 1:
        return
    transformer = model.transformer
    if not model.supports_context_parallel or transformer.activation != "sigmoid":
        raise SettingsError(f"context_parallel supports language models with sigmoid attention only, got {model}")
    if task.needs_whole_sequences:
        raise SettingsError(f"context_parallel does not support {task}, whose loss needs whole sequences")
    unsupported = {"compile": config.compile, "statistics_every": config.statistics_every}
    for name, value in {**unsupported, "dropout": transformer.dropout}.items():
        if value:
            raise SettingsError(f"context_parallel does not support {name}={value}: set {name}={type(value)()}")
