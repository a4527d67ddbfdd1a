"""Jacobian norms and their bounds (Theorem 3.2, and Castin et al.'s for softmax), and the bias of App. E."""

import math

import pytest
import torch

from experiments import closed_form
from sigattn.theory import bias, regularity
from sigattn.theory.regularity import Head, jacobian_norm, jacobian_norm_matrix_free
from tests.ops.cases import COMPILER_NOISE

pytestmark = [pytest.mark.filterwarnings(w) for w in COMPILER_NOISE]  # PyTorch's, of forward mode


ONE = torch.ones(1, 1, dtype=torch.float64)


def draw(activation, seed, n=7, d=4, **options):
    g = torch.Generator().manual_seed(seed)
    return closed_form.random_head(d, activation, g, **options), torch.randn(n, d, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("hybrid_norm", [False, True])
def test_matrix_free_norm_agrees_with_the_full_matrix(activation, hybrid_norm):
    for seed in range(2):
        head, x = draw(activation, seed, hybrid_norm=hybrid_norm)
        assert jacobian_norm_matrix_free(head, x, tolerance=1e-13) == pytest.approx(jacobian_norm(head, x), rel=1e-4)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_norms_stay_below_their_bounds(size):
    for seed in range(5):
        for activation, bound in (("sigmoid", regularity.sigmoid_bound), ("softmax", regularity.softmax_bound)):
            head, x = draw(activation, seed, std=size)
            assert jacobian_norm(head, x) <= bound(head, x)


def test_search_finds_no_violation_of_theorem_3_2():
    drawn, climbed = regularity.search(trials=20, climbs=1)
    assert (len(drawn), len(climbed)) == (20, 60)
    assert max(*drawn, *climbed) < 1 + 1e-9
    assert max(climbed) > 0.9  # the bound is nearly attained


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_neither_attention_is_globally_lipschitz(activation):
    """The Jacobian grows like R² at one token at 0 and others at ±R (Kim et al.)."""
    signs = torch.tensor([[0.0], [1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    norms = [jacobian_norm(Head(ONE, ONE, ONE, activation, scale=1.0), r * signs) for r in (2.0, 4.0, 8.0)]
    assert norms[1] > 2.5 * norms[0]
    assert norms[2] > 2.5 * norms[1]


def test_bound_needs_the_scale_in_its_matrix():
    """Without the scale, W_q W_kᵀ gives another bound for k > 1."""
    head, x = draw("sigmoid", 0)
    unscaled = Head(head.query, head.key, head.value, scale=1.0)
    torch.testing.assert_close(head.a, unscaled.a / 2)
    torch.testing.assert_close(head.logits(x), x @ head.query @ (x @ head.key).mT / 2 - math.log(7))


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
