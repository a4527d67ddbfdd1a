"""Theorem 3.1 by construction: the error of the network falls."""

import itertools

import pytest
import torch

from examples import universal_approximation
from examples.universal_approximation import TARGETS, Attention, FeedForward, UniversalApproximator


@pytest.mark.parametrize(("d", "n", "sizes"), [(2, 2, (2, 4)), (1, 3, (4, 8))])
def test_error_falls_with_delta(d, n, sizes):
    """Also for several numbers and more tokens; ``tests/test_examples.py`` has two tokens of one number."""
    coarse, fine = (UniversalApproximator(TARGETS["softmax attention"], d, n, size).error(400) for size in sizes)
    assert fine < 0.85 * coarse


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


def test_attention_calls_the_operator(monkeypatch):
    calls = []
    real = universal_approximation.sigmoid_attention
    monkeypatch.setattr(universal_approximation, "sigmoid_attention", lambda *a, **o: calls.append(o) or real(*a, **o))
    net = UniversalApproximator(TARGETS["mean of the tokens"], 1, 2, 3)
    net(torch.rand(1, 2, 1))
    assert len(calls) == net.mapping.grid + 1
    assert all(o["bias"] == 0.0 for o in calls)


def test_permutation_equivariance():
    net = UniversalApproximator(TARGETS["wave"], 1, 3, 4)
    x = torch.rand(50, 3, 1, dtype=torch.float64)
    order = [2, 0, 1]
    torch.testing.assert_close(net(x[:, order]), net(x)[:, order])


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
