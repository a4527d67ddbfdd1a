"""Training in the conversion experiment."""

import copy

import pytest
import torch
from torch import nn

from experiments import conversion, conversion_models


def test_trainer_trains_as_the_loop_does():
    """The same batches, rates and clipped gradients, so that a Llama is compared with the other models."""
    pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, generator=generator) for _ in range(5)]
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    rates, trained = [0.1, 0.2, 0.3, 0.1, 0.05], []
    for engine in (conversion._loop, conversion_models.train_by_trainer):
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # whose steps depend on the clipping
        engine(model, lambda x, m=model: 10 * (m(x) - 3).square().mean(), iter(batches), optimizer, rates)
        trained.append(model)
    for of_loop, of_trainer, untrained in zip(*(m.parameters() for m in (*trained, first)), strict=True):
        torch.testing.assert_close(of_trainer, of_loop)
        assert (of_loop - untrained).abs().max() > 0.01
