"""BYOL: predict a moving-average teacher's projection of another view of the image (Grill et al., 2020)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task, no_batches
from sigattn.models.vision import ViTConfig
from sigattn.tasks.simclr import Projected, projector
from sigattn.validation import SettingsError, check_at_least


class StudentAndTeacher(nn.Module):
    """Student, predictor and teacher; the teacher starts as a copy of the student and gets no gradient."""

    def __init__(self, student: Projected, predictor: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.predictor = predictor
        self.teacher: Projected = copy.deepcopy(student).requires_grad_(False)

    def forward(self, views: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the predictions of all views and the teacher's projections of the first two, each of unit length."""
        with torch.no_grad():
            targets = [F.normalize(self.teacher(view).float(), dim=-1) for view in views[:2]]
        predictions = [F.normalize(self.predictor(self.student(view)).float(), dim=-1) for view in views]
        return predictions, targets


@dataclass(frozen=True, kw_only=True)
class BYOL(Task):
    """2 - 2 cos(prediction, teacher), averaged over all pairs of different views. A batch is views, (B, C, H, W) each.

    The teacher gets the first two views (the large ones of DINO's multi-crop), the student all of them.
    Metrics: ``loss``, and ``spread``: the standard deviation of the normalised projections' features times √output_dim,
    which is 1 for projections uniform on the sphere and 0 for collapsed ones.

    Attributes:
        momentum: decay of the teacher's moving average at a batch size of ``base_batch_size``; at κ times that size it
            is momentum^κ (Busbridge et al., 2023).
        base_batch_size: batch size for which ``momentum`` is given.
        projector_dim: hidden features of projector and predictor; not stated in the paper, this is MoCo v3's value.
        output_dim: output features of projector and predictor.
    """

    momentum: float = 0.996
    base_batch_size: int = 256
    projector_dim: int = 4096
    output_dim: int = 256
    metric = "loss"
    needs_whole_batch = True  # of the projector's and the predictor's batch norm
    has_labels = False
    num_views = 2

    def __post_init__(self) -> None:
        if not 0 <= self.momentum <= 1:
            raise SettingsError(f"momentum must lie in [0, 1], got {self.momentum}")
        check_at_least(1, self, "base_batch_size", "projector_dim", "output_dim")

    def build(self, model: ViTConfig) -> nn.Module:
        """Return student (backbone and projector), predictor and teacher."""
        student = Projected(replace(model, num_classes=0), [self.projector_dim, self.projector_dim, self.output_dim])
        return StudentAndTeacher(student, projector([self.output_dim, self.projector_dim, self.output_dim]))

    def tiny(self) -> BYOL:
        return replace(self, projector_dim=128, output_dim=32)

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the student's backbone."""
        return module.get_submodule("student.backbone")

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean over the pairs of a student's view and a different view of the teacher's."""
        return self._compare(module, batch)[0]

    def _compare(self, module: Any, views: Batch) -> tuple[Tensor, Tensor]:
        predictions, targets = module(views)
        losses = []
        for i, predicted in enumerate(predictions):
            losses += [2 - 2 * (predicted * t).sum(-1).mean() for j, t in enumerate(targets) if j != i]
        return torch.stack(losses).mean(), torch.cat(targets)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        loss, count, projections = 0.0, 0, []
        for views in batches:
            batch_loss, targets = self._compare(module, views)
            loss, count = loss + batch_loss.item() * len(views[0]), count + len(views[0])
            projections.append(targets)
        if not projections:
            raise no_batches()
        return {"loss": loss / count, "spread": torch.cat(projections).std(0).mean().item() * self.output_dim**0.5}

    @torch.no_grad()
    def after_step(self, module: nn.Module, samples: int) -> None:
        """Update the teacher's moving average of the student's weights and batch-norm statistics."""
        weight = 1 - self.momentum ** (samples / self.base_batch_size)
        states = (module.get_submodule(name).state_dict().values() for name in ("teacher", "student"))
        for slow, fast in zip(*states, strict=True):
            if slow.is_floating_point():
                slow.lerp_(fast.to(slow.dtype), weight)
            else:
                slow.copy_(fast)
