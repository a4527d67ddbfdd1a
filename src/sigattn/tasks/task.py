"""Base class of the training objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sigattn.data.dataset import Batch


class Task(ABC):
    """Training objective and its settings; subclasses are frozen dataclasses, so that they can be printed and compared.

    Attributes:
        metric: key of the main metric in the result of ``evaluate``.
    """

    metric: str

    @abstractmethod
    def build(self, model: Any) -> nn.Module:
        """Return the module to train: the model of a configuration and any layers that the objective adds."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar."""

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the metrics over held-out batches, by name; the default is ``loss``, averaged over the samples.

        The caller puts the module in evaluation mode and disables gradients.
        """
        total = count = 0.0
        for batch in batches:
            total += self.loss(module, batch).item() * len(batch[0])
            count += len(batch[0])
        return {"loss": total / max(count, 1)}

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the model without the objective's additional layers: the part that is saved after training."""
        return module

    def after_step(self, module: nn.Module, samples: int) -> None:
        """Update state outside the optimizer; called after each optimizer step on ``samples`` samples."""
        return
