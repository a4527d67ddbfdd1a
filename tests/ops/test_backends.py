"""Interface between the operator and its backends."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import blocked, custom_ops
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem


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


def test_the_fastest_that_can_serve_is_the_default(picky):
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    sigmoid_attention(q, k, v)
    assert not picky
    sigmoid_attention(q.double(), k.double(), v.double())
    assert len(picky) == 1


def test_an_explicit_backend_never_falls_back(picky):
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    with pytest.raises(ValueError, match="backend 'picky' does not support this call: it is for float64"):
        sigmoid_attention(q, k, v, backend="picky")
    assert not picky


def test_the_default_on_a_cpu_is_blocked(without_llvmlite):
    t = torch.empty(1, 1, 8, 8)
    assert DENSE.choose(Problem(t, t, t), None) == "blocked"


class TestMemoryOfTiles:
    """Tiles are written into the same memory again."""

    @pytest.mark.parametrize("n", [300, 700])
    def test_after_inference_mode(self, n):
        q = torch.randn(1, 4, n, 16)
        with torch.inference_mode():
            first = sigmoid_attention(q, q, q, is_causal=True)
        torch.testing.assert_close(sigmoid_attention(q, q, q, is_causal=True), first.clone())
        q.requires_grad_()
        sigmoid_attention(q, q, q, is_causal=True).sum().backward()

    def test_threads_do_not_share_it(self):
        inputs = [torch.randn(1, 4, 600, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        alone = [sigmoid_attention(q, q, q, is_causal=True) for q in inputs]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                together = list(pool.map(lambda q: sigmoid_attention(q, q, q, is_causal=True), inputs))
                for a, b in zip(alone, together, strict=True):
                    torch.testing.assert_close(a, b)

    def test_outputs_do_not_lie_in_it(self):
        q = torch.randn(1, 4, 700, 16, requires_grad=True)
        out = sigmoid_attention(q, q, q, is_causal=True)
        (grad,) = torch.autograd.grad(out.sum(), q)
        before = out.detach().clone(), grad.clone()
        other = torch.randn(1, 4, 700, 16, requires_grad=True)
        sigmoid_attention(other, other, other, is_causal=True).sum().backward()
        assert torch.equal(out.detach(), before[0])
        assert torch.equal(grad, before[1])
