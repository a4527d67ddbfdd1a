"""Interface between the operator and its backends."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import blocked, custom_ops
from sigattn.ops.attention import DENSE


@pytest.fixture
def picky(monkeypatch):
    """Register a backend of highest priority that supports float64 only and counts its calls."""
    calls = []

    def forward(problem, save):
        calls.append(problem)
        return blocked.forward(problem, save)

    def unavailable(problem):
        return None if problem.query.dtype is torch.float64 else "it is for float64"

    backend = custom_ops.Backend(forward, unavailable, blocked.backward, blocked.saved_weights)
    monkeypatch.setattr(DENSE, "backends", {"picky": backend, **DENSE.backends})
    monkeypatch.setattr("sigattn.ops.attention.BACKENDS", tuple(DENSE.backends))
    return calls


def test_the_first_that_can_serve_is_the_default_and_an_explicit_one_never_falls_back(picky):
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    sigmoid_attention(q, k, v)
    assert not picky
    sigmoid_attention(q.double(), k.double(), v.double())
    assert len(picky) == 1
    with pytest.raises(ValueError, match="backend 'picky' does not support this call: it is for float64"):
        sigmoid_attention(q, k, v, backend="picky")
    assert len(picky) == 1


def test_memory_of_tiles_is_shared_with_nothing():
    """Neither with calls in inference mode or other threads, nor with outputs."""
    inputs = [torch.randn(1, 4, 600, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    with torch.inference_mode():
        alone = [sigmoid_attention(q, q, q, is_causal=True) for q in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = list(pool.map(lambda q: sigmoid_attention(q, q, q, is_causal=True), inputs))
            torch.testing.assert_close(together, [t.clone() for t in alone])
    q, other = (t.requires_grad_() for t in inputs[:2])
    out = sigmoid_attention(q, q, q, is_causal=True)
    (grad,) = torch.autograd.grad(out.sum(), q)
    before = out.detach().clone(), grad.clone()
    sigmoid_attention(other, other, other, is_causal=True).sum().backward()
    assert torch.equal(out.detach(), before[0])
    assert torch.equal(grad, before[1])
