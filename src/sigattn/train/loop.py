"""Training and evaluation of a run in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sigattn.data.dataset import Data
from sigattn.data.task import Task
from sigattn.distributed import sharding
from sigattn.distributed.process_mesh import ProcessMesh, init_process_mesh
from sigattn.models import saving
from sigattn.models.config import ModelConfig
from sigattn.train import checkpoint
from sigattn.train.config import TrainConfig, settings_to_resume
from sigattn.train.folder_lock import FolderInUseError, lock_folder
from sigattn.train.interrupt import StopRequest
from sigattn.train.metrics import MetricsLog
from sigattn.train.trainer import Row, Trainer


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
    with _lock_on_main_process(folder, processes):
        if not resume:
            checkpoint.check_no_checkpoints(folder)
        torch.manual_seed(config.seed)
        trainer = Trainer.build(task, model, config, data, processes, folder, weights)
        settings = settings_to_resume(task, model, config, data.fingerprint)
        done = trainer.load_last_checkpoint(settings) if resume else 0
        log = MetricsLog(folder, done, wandb=config.wandb, settings=settings) if processes.is_main_process else None
        try:
            if processes.is_main_process:
                on_start(done)
            with StopRequest() as request:
                trainer.train(done, settings, request, log, on_row)
        finally:
            if log is not None:
                log.close()
        return trainer.save_model(folder)


@contextmanager
def _lock_on_main_process(folder: Path, processes: ProcessMesh) -> Iterator[None]:
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


def evaluate(task: Task, model: ModelConfig, config: TrainConfig, data: Data, folder: Path) -> dict[str, float]:
    """Return the metrics of a run on the held-out data; arguments as in ``train``.

    The model in ``folder/model`` is evaluated if it is the whole trained module, else (before training has ended, or
    with an objective that adds layers to the model) the last checkpoint.

    Raises:
        CheckpointError: if there is neither, or the checkpoint does not fit.
        ModelError: if the model in the folder has another configuration.
    """
    processes, evaluation = init_process_mesh(), replace(config, compile=False)
    if processes.world_size == 1:  # a run of several processes can be evaluated on one
        evaluation = replace(evaluation, tensor_parallel=1, context_parallel=1)
    trainer = Trainer.build(task, model, evaluation, data, processes, folder)
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
