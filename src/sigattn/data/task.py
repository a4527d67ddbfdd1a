"""Base class of the training objectives."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.data.dataset import Batch, DataError
from sigattn.validation import SettingsError


def no_batches() -> DataError:
    """Return the error of an evaluation without batches."""
    return DataError("the held-out data has no batches, so that nothing can be measured: hold out more data")


class Task(ABC):
    """Training objective and its settings; subclasses are frozen dataclasses, so that they can be printed and compared.

    Attributes:
        metric: key of the main metric in the result of ``evaluate``.
        needs_whole_batch: True if the loss of a sample depends on the other samples of the batch, so that the batch
            cannot be split into micro-batches.
        needs_whole_sequences: True if the loss needs all positions of a sequence on one process, so that context
            parallelism is not supported.
        has_labels: True if the classes of images are targets, which the model must have as many of.
        num_views: number of augmented views of each image in a batch.
    """

    metric: str
    needs_whole_batch = False
    needs_whole_sequences = False
    has_labels = True
    num_views = 1

    def build(self, model: Any) -> nn.Module:
        """Return the module to train: the model of a configuration and any layers that the objective adds."""
        return model.build()

    def check(self, model: Any) -> nn.Module:
        """Build the module on the meta device and return it; raise SettingsError if settings do not fit together."""
        try:
            with torch.device("meta"):
                return self.build(model)
        except ValueError as error:
            raise SettingsError(str(error)) from error

    def tiny(self) -> "Task":
        """Return the objective of a recipe's small form."""
        return self

    def distributions(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits in a model's output, (…, classes), and the weights, (…), of their mean in the loss.

        The weights are None if all are equal. Raises SettingsError if the task's models predict no distributions.
        """
        raise SettingsError(f"distillation needs outputs that are distributions, and {type(self).__name__} has none")

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar."""

    def count(self, batch: Batch) -> Tensor | int:
        """Return the number of terms of which ``loss`` is the mean, by default the number of samples.

        It is the weight of a micro-batch, or of a process's part of the batch, in the loss of the whole batch.
        """
        return len(batch[0])

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the metrics over held-out batches, by name: the sums of ``measure``, divided by the counts.

        The caller puts the module in evaluation mode and disables gradients. Raises DataError if there are no batches.
        """
        totals: dict[str, float] = defaultdict(float)
        total = 0.0
        for batch in batches:
            sums, count = self.measure(module, batch)
            total += count
            for name, value in sums.items():
                totals[name] += value.item()
        if not totals:
            raise no_batches()
        return {name: value / max(total, 1) for name, value in totals.items()}

    def measure(self, module: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """Return the sums of the metrics over a batch, by default ``loss`` of its samples, and the number of terms."""
        return {"loss": self.loss(module, batch) * len(batch[0])}, len(batch[0])

    def backbone(self, module: nn.Module) -> nn.Module:
        """Return the model without the objective's additional layers: the part that is saved after training."""
        return module

    def after_step(self, module: nn.Module, samples: int) -> None:
        """Update state outside the optimizer; called after each optimizer step on ``samples`` samples."""
        return
