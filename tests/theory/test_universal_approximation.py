"""Theorem 3.1 by construction: the error of the network falls."""

import itertools

import pytest
import torch

from examples.universal_approximation import TARGETS, Attention, FeedForward, UniversalApproximator


def test_output_in_a_cell_is_the_value_at_its_centre():
    """Away from the grid lines the network equals the piecewise constant function, also on equal tokens."""
    target, size = TARGETS["each token's share"], 4
    net = UniversalApproximator(target, 1, 2, size)
    for i, j in itertools.product(range(size), repeat=2):
        centre = (torch.tensor([[[i], [j]]], dtype=torch.float64) + 0.5) / size
        inside = centre + 0.3 / size
        torch.testing.assert_close(net(inside), target(centre), atol=1e-6, rtol=1e-6)


def test_layers_have_the_theorems_sizes():
    net = UniversalApproximator(TARGETS["mean of the tokens"], 2, 2, 2)
    kinds = {kind: [layer for layer in net.layers if type(layer) is kind] for kind in (FeedForward, Attention)}
    assert sum(map(len, kinds.values())) == len(net.layers)
    assert all(len(layer.weights) <= 4 for layer in kinds[Attention])
    assert all(layer.w2.shape[1] == layer.w1.shape[0] <= 4 for layer in kinds[FeedForward])
    assert len(kinds[Attention]) == net.mapping.grid + 1


@pytest.mark.parametrize(
    ("target", "sizes", "message"),
    [
        (lambda x: x.cumsum(-2), (1, 2, 4), "not permutation-equivariant"),
        (lambda x: x.sum(-1), (1, 2, 4), "must return the shape"),
        (lambda x: x, (2, 3, 8), "262,144 grid points"),
    ],
)
def test_unsupported_targets_and_sizes_raise(target, sizes, message):
    with pytest.raises(ValueError, match=message):
        UniversalApproximator(target, *sizes)


def test_numbers_beyond_float64_raise():
    with pytest.raises(ValueError, match="2\\^53"):
        UniversalApproximator(lambda x: x, 1, 4, 8)
