"""Dropout: the right fraction of weights, the same in every backend, scaled by 1 / (1 - p)."""

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import problem as problems
from sigattn.ops.dropout import keep_mask
from sigattn.ops.problem import Problem
from sigattn.ops.triton import kernel_args
from tests.ops.cases import SUPPORTING, device_of, wide


def test_dropped_weights_are_independent():
    """Independent of row, column, head and seed: correlations of neighbours and rows are those of chance."""
    keep = keep_mask(torch.tensor(7), torch.arange(4), torch.arange(256), torch.arange(256), 0.5).double() - 0.5
    other = keep_mask(torch.tensor(8), torch.arange(4), torch.arange(256), torch.arange(256), 0.5).double() - 0.5
    pairs = {
        "rows": (keep[:, 1:], keep[:, :-1]),
        "columns": (keep[..., 1:], keep[..., :-1]),
        "heads": (keep[1:], keep[:-1]),
        "seeds": (keep, other),
        "transposed": (keep, keep.mT),
        "squares": (keep[:, 1:, 1:] * keep[:, :-1, :-1], keep[:, 1:, :-1] * keep[:, :-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()
        assert abs(correlation) < 5 / a.numel() ** 0.5, name
    for sums in (keep.sum(-1), keep.sum(-2)):  # variance of a sum of 256 coins of ±1/2 is 64
        assert abs(sums.var() / 64 - 1) < 0.25


@pytest.mark.parametrize("backend", SUPPORTING)
def test_seeded_scaled_and_unbiased(backend):
    q, k = torch.randn(2, 1, 2, 16, 8, dtype=wide(backend), device=device_of(backend)).unbind()
    v = torch.eye(16, dtype=q.dtype, device=q.device).expand(1, 2, 16, 16)  # the output is P itself

    def weights(p):
        return sigmoid_attention(q, k, v, dropout_p=p, bias=-1.0, backend=backend)

    torch.manual_seed(5)
    first = weights(0.25)
    torch.manual_seed(5)
    assert torch.equal(weights(0.25), first)
    assert not torch.equal(weights(0.25), first)
    assert not weights(1 - 1e-11).any()  # p · 2^32 is rounded to 2^32 there, one more than the largest hash
    full = weights(0.0)
    kept = first != 0
    assert 0.5 < kept.double().mean() < 0.95
    torch.testing.assert_close(first[kept], full[kept] / 0.75)
    draws = 60 if backend != "triton" else 8  # interpreted kernels, which drop the same weights, are slow
    ratio = torch.stack([weights(0.25) for _ in range(draws)]).mean(0) / full
    standard_error = (0.25 / 0.75 / draws) ** 0.5
    assert (ratio - 1).abs().max() < 5 * standard_error
    assert abs(ratio.mean() - 1) < 4 * standard_error / ratio.numel() ** 0.5


def test_seeds_stay_on_the_device():
    """A host number would be the same at every replay of a CUDA graph, and a CPU tensor would synchronise."""
    assert problems.new_seed(torch.device("meta")).device.type == "meta"
    q = torch.randn(1, 2, 5, 8)
    problem = problems.make_problem(Problem, q, q, q, dropout_p=0.5)
    assert kernel_args.prepare(problem).arguments["seed"] is problem.seed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_of_a_cuda_graph_drop_other_weights_and_the_backward_pass_the_same():
    q, k = torch.randn(2, 1, 2, 64, 32, device="cuda").unbind()
    v = torch.eye(64, device="cuda").expand(1, 2, 64, 64).clone().requires_grad_()  # the output is P itself

    def step():
        out = sigmoid_attention(q, k, v, dropout_p=0.5, bias=0.0)
        return out.detach(), torch.autograd.grad(out.sum(), v)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step()
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
        torch.testing.assert_close(grad, out.sum(2)[..., None].expand_as(grad), rtol=1e-2, atol=1e-2)
    assert not torch.equal(seen[0] == 0, seen[1] == 0)
