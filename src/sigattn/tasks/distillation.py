"""Distillation: a model learns the outputs of a teacher next to its own objective (Hinton et al., 2015)."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.distributed.process_mesh import init_process_mesh
from sigattn.models import saving
from sigattn.validation import SettingsError, check_positive


@dataclass(frozen=True, kw_only=True)
class Distillation(Task):
    """The loss of another task plus ``weight`` times the divergence of the model's outputs from a teacher's.

    The divergence is KL(teacher ‖ model) of the distributions that the outputs stand for, over tokens or classes, in
    nats: the mean over the tokens whose targets are not ignored, over images, or, of speech, over the samples after the
    mean over the steps of each. Metrics are those of the other task.

    Attributes:
        task: the objective, such as language modelling, classification or CTC, whose models predict distributions.
        teacher: folder of the teacher's saved model, with inputs and outputs as those of the model.
        weight: factor of the divergence.
    """

    task: Task
    teacher: str
    weight: float = 1.0

    needs_whole_sequences = True  # the teacher is not context-parallel

    def __post_init__(self) -> None:
        check_positive(self, "weight")
        if type(self.task).distributions is Task.distributions:
            raise SettingsError(
                f"Distillation supports tasks whose models predict distributions, not {type(self.task).__name__}"
            )

    @property
    def metric(self) -> str:  # type: ignore[override]
        """Key of the other task's main metric."""
        return self.task.metric

    def build(self, model: Any) -> nn.Module:
        """Return the other task's module; raise ModelError if the teacher cannot be loaded."""
        _ = self._teacher
        return self.task.build(model)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the other task's loss plus weight · KL(teacher ‖ module), a scalar."""
        calls: list[tuple[Any, Any, Any]] = []
        hook = module.register_forward_hook(
            lambda _, args, kwargs, out: calls.append((args, kwargs, out)), with_kwargs=True
        )
        try:
            loss = self.task.loss(module, batch)
        finally:
            hook.remove()
        ((args, kwargs, output),) = calls
        with torch.no_grad():  # the same inputs, which may be mixed images
            wanted, _ = self.task.distributions(self._teacher(*args, **kwargs), batch)
        logits, weights = self.task.distributions(output, batch)
        student, teacher = (x.float().log_softmax(-1) for x in (logits, wanted))
        divergences = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        return loss + self.weight * (divergences.mean() if weights is None else (divergences * weights).sum())

    def count(self, batch: Batch) -> Tensor | int:
        return self.task.count(batch)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        return self.task.evaluate(module, batches)

    def backbone(self, module: nn.Module) -> nn.Module:
        return self.task.backbone(module)

    def after_step(self, module: nn.Module, samples: int) -> None:
        self.task.after_step(module, samples)

    @functools.cached_property
    def _teacher(self) -> nn.Module:
        return saving.load(Path(self.teacher), init_process_mesh().device).requires_grad_(False)
