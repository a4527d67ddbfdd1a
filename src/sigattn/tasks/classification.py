"""Supervised classification, with label smoothing and mixup."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.validation import check_not_negative, check_probability


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Cross-entropy of the class. A batch is the model's inputs, such as images (B, C, H, W), and labels (B,).

    Metrics: ``loss``, and the accuracies ``top1`` and ``top5`` in 0 … 1.

    Attributes:
        label_smoothing: fraction of the target that is spread evenly over all classes.
        mixup: parameter α of mixup's Beta(α, α) distribution (Zhang et al., 2018), for images; 0 turns mixup off.
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    metric = "top1"

    def __post_init__(self) -> None:
        check_probability(self, "label_smoothing")
        check_not_negative(self, "mixup")

    def build(self, model: Any) -> nn.Module:
        """Return the model; raise ValueError if it has fewer than 2 classes, or mixup is on for tokens."""
        if model.num_classes < 2:
            raise ValueError(
                f"Classification needs a model with at least 2 classes, got num_classes={model.num_classes}"
            )
        if self.mixup and not model.example_inputs(1)[0].is_floating_point():
            raise ValueError(f"mixup averages images, and the inputs of {type(model).__name__} are tokens: set mixup=0")
        return super().build(model)

    def distributions(self, output: Tensor, batch: Batch) -> tuple[Tensor, None]:
        return output, None

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats, with mixed targets if mixup is on."""
        *inputs, labels = batch
        if not self.mixup:
            return F.cross_entropy(module(*inputs).float(), labels, label_smoothing=self.label_smoothing)
        (images,) = inputs
        share = torch.distributions.Beta(self.mixup, self.mixup).sample().to(images)
        other = torch.randperm(len(images), device=images.device)
        logits = module(share * images + (1 - share) * images[other]).float()
        first, second = (
            F.cross_entropy(logits, target, label_smoothing=self.label_smoothing) for target in (labels, labels[other])
        )
        return share * first + (1 - share) * second

    def measure(self, module: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        *inputs, labels = batch
        logits = module(*inputs).float()
        best = logits.topk(min(5, logits.shape[1]), -1).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss, "top1": best[:, 0].sum(), "top5": best.sum()}, len(labels)
