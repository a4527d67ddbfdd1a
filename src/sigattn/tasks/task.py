"""What every task has: the module that is trained, the loss of a batch, and metrics over a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sigattn.data.dataset import Batch


class Task(ABC):
    """An objective and its settings; a frozen dataclass, so that it can be printed and compared.

    Attributes:
        metric: the name, among what ``evaluate`` gives, of the number that says how good a model is.
    """

    metric: str

    @abstractmethod
    def build(self, model: Any) -> nn.Module:
        """What is trained: the model of a configuration, and what the objective adds to it."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, a scalar."""

    @abstractmethod
    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over held-out batches; the module is in evaluation mode and wants no gradient."""

    def backbone(self, module: nn.Module) -> nn.Module:
        """The model within what is trained: what is kept, and served, afterwards."""
        return module

    def after_step(self, module: nn.Module, samples: int) -> None:
        """Called after each update, of so many samples."""
        return
