"""SimCLR and BYOL: objectives over augmented views of images (Chen et al., 2020; Grill et al., 2020)."""

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task, no_batches
from sigattn.distributed.collectives import AllReduceSum, all_gather_rows
from sigattn.models.vision import ViT, ViTConfig
from sigattn.nn.batch_norm import BatchNorm
from sigattn.validation import SettingsError, check_at_least, check_positive


class SyncBatchNorm(BatchNorm):
    """``BatchNorm1d`` of (B, C) whose mean and variance in training are those of the samples of all processes.

    The result does not depend on the number of processes that share a batch; with one process it is ``BatchNorm``. It
    also runs on CPUs, where PyTorch's ``SyncBatchNorm`` does not.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (PyTorch's name)
        """Normalise (B, C) → (B, C); B may differ between processes."""
        single_process = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if single_process or not self.training:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        ones = x.new_full((1,), float(len(x)))
        total = AllReduceSum.apply(torch.cat((ones, x.sum(0))))  # (1 + C,)
        count, mean = total[0], total[1:] / total[0]
        centred = x - mean
        variance = AllReduceSum.apply(centred.square().sum(0)) / count  # (C,); in one pass, E[x²] - E[x]² would cancel
        self.update_running_stats(mean.detach(), variance.detach(), count.detach())
        out = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            out = out * self.weight + self.bias
        return out.to(input.dtype)


def projector(widths: list[int]) -> nn.Sequential:
    """Return an MLP of these widths with batch norm and ReLU between layers and a final batch norm without parameters.

    This is the projector of MoCo v3 (Chen et al., 2021), from which the paper's recipes for SimCLR and BYOL come. Batch
    norm is synchronised over all processes.
    """
    parts: list[nn.Module] = []
    last = len(widths) - 2
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Linear(inputs, outputs, bias=False))
        parts.append(SyncBatchNorm(outputs, affine=i < last))
        if i < last:
            parts.append(nn.ReLU())
    return nn.Sequential(*parts)


class Projected(nn.Module):
    """Backbone followed by a projector."""

    def __init__(self, model: ViTConfig, widths: list[int]) -> None:
        super().__init__()
        self.backbone: ViT = ViT(model)
        self.projector: nn.Sequential = projector([model.embed_dim, *widths])

    def forward(self, images: Tensor) -> Tensor:
        """Return the projections of images, (B, C, H, W) → (B, output_dim)."""
        return self.projector(self.backbone(images))


@dataclass(frozen=True, kw_only=True)
class SimCLR(Task):
    """InfoNCE over the views of the whole batch, gathered from all ranks. A batch is two views, (B, C, H, W) each.

    Metrics: ``loss``, and ``retrieval``, the fraction of views whose nearest neighbour is the other view of the image.
    The paper states none of the numbers below; they are MoCo v3's.

    Attributes:
        temperature: divisor of the similarities.
        projector_dim: hidden features of the projector.
        output_dim: output features of the projector.
    """

    temperature: float = 0.2
    projector_dim: int = 4096
    output_dim: int = 256
    metric = "retrieval"
    needs_whole_batch = True  # the other samples are the negatives
    has_labels = False
    num_views = 2

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        check_at_least(1, self, "projector_dim", "output_dim")

    def build(self, model: ViTConfig) -> nn.Module:
        return Projected(replace(model, num_classes=0), [self.projector_dim, self.projector_dim, self.output_dim])

    def tiny(self) -> "SimCLR":
        return replace(self, projector_dim=128, output_dim=32)

    def backbone(self, module: nn.Module) -> nn.Module:
        return module.get_submodule("backbone")

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean InfoNCE of both views."""
        logits, targets = self._similarities(module, batch, all_gather_rows)
        return F.cross_entropy(logits, targets)

    def _similarities(
        self, module: Any, batch: Batch, collect: Callable[[Tensor], tuple[Tensor, int]]
    ) -> tuple[Tensor, Tensor]:
        """Return logits (2b, 2B) of this rank's b samples against all B, and the column of each row's other view.

        The logit of a view with itself is -inf. ``collect`` returns the rows of all ranks and the index of this rank's
        first row.
        """
        first, second = batch
        z = F.normalize(module(torch.cat([first, second])).float(), dim=-1)
        views = [collect(v) for v in z.chunk(2)]  # each (B, output_dim)
        all_views, offset = torch.cat([v for v, _ in views]), views[0][1]
        total, index = len(all_views) // 2, torch.arange(len(z) // 2, device=z.device) + offset
        itself = torch.cat([index, index + total])
        logits = (z @ all_views.T / self.temperature).scatter(1, itself[:, None], -torch.inf)
        return logits, torch.cat([index + total, index])

    def measure(self, module: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        # not gathered: every process evaluates the same batches
        logits, targets = self._similarities(module, batch, lambda rows: (rows, 0))
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return {"loss": loss, "retrieval": (logits.argmax(-1) == targets).sum()}, len(targets)


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
        student = Projected(replace(model, num_classes=0), [self.projector_dim, self.projector_dim, self.output_dim])
        return StudentAndTeacher(student, projector([self.output_dim, self.projector_dim, self.output_dim]))

    def tiny(self) -> "BYOL":
        return replace(self, projector_dim=128, output_dim=32)

    def backbone(self, module: nn.Module) -> nn.Module:
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
