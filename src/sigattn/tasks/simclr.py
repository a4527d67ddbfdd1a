"""SimCLR: identify the other view of an image among the views of all images (Chen et al., 2020)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.distributed.collectives import all_gather_rows
from sigattn.models.vision import ViT, ViTConfig
from sigattn.nn.batch_norm import BatchNorm
from sigattn.validation import check_at_least, check_positive


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
        total = _Sum.apply(torch.cat((ones, x.sum(0))))  # (1 + C,)
        count, mean = total[0], total[1:] / total[0]
        centred = x - mean
        variance = _Sum.apply(centred.square().sum(0)) / count  # (C,); in one pass, E[x²] - E[x]² would cancel
        self.update_running_stats(mean.detach(), variance.detach(), count.detach())
        out = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            out = out * self.weight + self.bias
        return out.to(input.dtype)


class _Sum(torch.autograd.Function):
    """Sum over all processes. Each process uses the sum, so the gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


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
        """Return backbone and projector."""
        return Projected(replace(model, num_classes=0), [self.projector_dim, self.projector_dim, self.output_dim])

    def tiny(self) -> SimCLR:
        return replace(self, projector_dim=128, output_dim=32)

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the backbone without the projector."""
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
