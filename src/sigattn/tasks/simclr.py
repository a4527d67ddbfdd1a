"""SimCLR: tell the other view of an image from the views of all other images (Chen et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.distributed.gather import gather
from sigattn.models.vision import VisionTransformer, VisionTransformerConfig
from sigattn.tasks.projector import projector
from sigattn.tasks.task import Task
from sigattn.validation import check_at_least, check_positive


class Projected(nn.Module):
    """A backbone and a projector behind it."""

    def __init__(self, model: VisionTransformerConfig, widths: list[int]) -> None:
        super().__init__()
        self.backbone = VisionTransformer(model)
        self.projector = projector([model.width, *widths])

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, outputs)."""
        projected: Tensor = self.projector(self.backbone(images))
        return projected


@dataclass(frozen=True, kw_only=True)
class SimCLR(Task):
    """InfoNCE over the views of the whole batch, gathered from all ranks. A batch is two views, (B, C, H, W) each.

    Metrics: ``loss``, and ``retrieval``, how often a view's nearest neighbour is its partner.

    Attributes:
        temperature: that similarities are divided by. (The paper states none of these numbers; they are MoCo v3's.)
        hidden: features within the projector.
        outputs: of the projector.
    """

    temperature: float = 0.2
    hidden: int = 4096
    outputs: int = 256
    metric = "retrieval"

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        check_at_least(1, self, "hidden", "outputs")

    def build(self, model: VisionTransformerConfig) -> nn.Module:
        """Backbone and projector."""
        return Projected(replace(model, classes=0), [self.hidden, self.hidden, self.outputs])

    def backbone(self, module: nn.Module) -> nn.Module:
        """Without the projector."""
        inner: Any = module
        found: nn.Module = inner.backbone
        return found

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean InfoNCE of both views."""
        logits, partner = self._similarities(module, batch, gather)
        return F.cross_entropy(logits, partner)

    def _similarities(
        self, module: Any, batch: Batch, collect: Callable[[Tensor], tuple[Tensor, int]]
    ) -> tuple[Tensor, Tensor]:
        """(2b, 2B) logits of these b samples against all B, each but itself, and the partners' places.

        ``collect`` gives everyone's rows, and where one's own begin.
        """
        first, second = batch
        z = F.normalize(module(torch.cat([first, second])).float(), dim=-1)
        mine, theirs = z.chunk(2)
        views = [collect(v) for v in (mine, theirs)]  # each (B, outputs)
        everyone, offset = torch.cat([v for v, _ in views]), views[0][1]
        total, here = len(everyone) // 2, torch.arange(len(mine), device=z.device) + offset
        own = torch.cat([here, here + total])
        logits = (z @ everyone.T / self.temperature).scatter(1, own[:, None], -torch.inf)
        return logits, torch.cat([here + total, here])

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """See the class."""
        loss = correct = count = 0.0
        for batch in batches:
            # every process judges the same batches: there is nobody else's to add
            logits, partner = self._similarities(module, batch, lambda rows: (rows, 0))
            loss += F.cross_entropy(logits, partner, reduction="sum").item()
            correct += (logits.argmax(-1) == partner).sum().item()
            count += len(partner)
        return {"loss": loss / max(count, 1), "retrieval": correct / max(count, 1)}
