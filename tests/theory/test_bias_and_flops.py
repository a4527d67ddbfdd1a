"""App. E's bias, and Table 1."""

import math

import pytest
import torch

from sigattn.theory import bias, flops


@pytest.mark.parametrize("n", [2, 3, 17, 1000])
def test_bias_normalises_and_lies_within_its_bounds(n):
    z = 4 * torch.randn(50, n, dtype=torch.float64)
    b = bias.normalizing_bias(z)
    low, high = bias.bias_bounds(z)
    assert ((low <= b) & (b <= high)).all()
    torch.testing.assert_close(torch.sigmoid(z + b[:, None]).sum(-1), torch.ones(50, dtype=torch.float64))


def test_bias_bounds():
    """-log(n - 1) - max z and -log(n - 1) - min z, which meet at b* where all logits are equal."""
    low, high = bias.bias_bounds(torch.tensor([[1.0, 2.0, 4.0], [-3.0, -3.0, -3.0]], dtype=torch.float64))
    assert low.tolist() == pytest.approx([-math.log(2) - 4, -math.log(2) + 3], abs=1e-12)
    assert high.tolist() == pytest.approx([-math.log(2) - 1, -math.log(2) + 3], abs=1e-12)
    for n in (2, 3, 100):
        low, high = bias.bias_bounds(torch.full((n,), 0.7, dtype=torch.float64))
        b = low.item()
        assert b == high.item()
        assert n / (1 + math.exp(-0.7 - b)) == pytest.approx(1, abs=1e-12)
        assert bias.normalizing_bias(torch.zeros(n)).item() == pytest.approx(-math.log(n - 1), abs=1e-12)


def test_extreme_logits():
    z = torch.tensor([[-700.0, 700.0], [1e3, 1e3]], dtype=torch.float64)
    b = bias.normalizing_bias(z)
    torch.testing.assert_close(torch.sigmoid(z + b[:, None]).sum(-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("z", "message"),
    [*((z, "at least 2") for z in (torch.zeros(1), torch.zeros(3, 0), torch.tensor(1.0))),
     (torch.tensor([0.0, math.nan]), "finite")],
)  # fmt: skip
def test_logits_without_a_bias_are_refused(z, message):
    with pytest.raises(ValueError, match=message):
        bias.normalizing_bias(z)


def test_table_1():
    assert flops.logits(2048, 64) == 2 * 2048 * 64
    assert flops.logits(2048, 64, causal=True) == 2 * (2049 / 4096) * 2048 * 64
    assert flops.softmax(2048) == flops.sigmoid(2048) == 5 * 2048
    assert flops.values(10, 4, causal=True) == 2 * 5.5 * 4
    with pytest.raises(ValueError, match="at least one token"):
        flops.logits(0, 64)
