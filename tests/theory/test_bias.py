"""App. E's bias."""

import math

import pytest
import torch

from sigattn.theory import bias


def logits(*shape, size=4.0):
    return size * torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("z", [logits(50, 1000), logits(5, 9, size=1e3), torch.full((1, 2), 1e3)])
def test_bias_normalises_and_lies_within_its_bounds(z):
    b = bias.normalizing_bias(z)
    low, high = bias.bias_bounds(z.double())
    assert ((low <= b) & (b <= high)).all()
    torch.testing.assert_close(torch.sigmoid(z + b[:, None]).sum(-1), torch.ones(len(z), dtype=torch.float64))


def test_bias_bounds():
    """-log(n - 1) - max z and -log(n - 1) - min z, which meet at b* where all logits are equal."""
    low, high = bias.bias_bounds(torch.tensor([[1.0, 2.0, 4.0], [-3.0, -3.0, -3.0]], dtype=torch.float64))
    assert low.tolist() == pytest.approx([-math.log(2) - 4, -math.log(2) + 3], abs=1e-12)
    assert high.tolist() == pytest.approx([-math.log(2) - 1, -math.log(2) + 3], abs=1e-12)
    for n in (2, 3, 100):
        assert bias.normalizing_bias(torch.zeros(n)).item() == pytest.approx(-math.log(n - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("z", "message"),
    [(torch.zeros(1), "at least 2"), (torch.zeros(3, 0), "at least 2"), (torch.tensor([0.0, math.nan]), "finite")],
)
def test_logits_without_a_bias_are_refused(z, message):
    with pytest.raises(ValueError, match=message):
        bias.normalizing_bias(z)
