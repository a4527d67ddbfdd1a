"""Interface between the operator and its backends."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import custom_ops
from sigattn.ops.attention import DENSE
from sigattn.ops.cpu import blocked, matmul, tiles
from sigattn.ops.cpu.tiles import Span
from sigattn.ops.problem import Problem
from tests.ops.truth import assert_as_good_as_formula


@pytest.fixture
def picky(monkeypatch):
    """Register a backend of highest priority that supports float64 only and counts its calls."""
    calls = []

    def forward(problem):
        calls.append(problem)
        return blocked.forward(problem)

    def unavailable(problem):
        return None if problem.query.dtype is torch.float64 else "it is for float64"

    backend = custom_ops.Backend(forward, unavailable, blocked.backward)
    monkeypatch.setattr(DENSE, "backends", {"picky": backend, **DENSE.backends})
    monkeypatch.setattr("sigattn.ops.attention.BACKENDS", ("reference", *DENSE.backends))
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


class TestProbe:
    """oneDNN's fused sigmoid is an internal operator: used where it works, replaced elsewhere."""

    @pytest.fixture(autouse=True)
    def _fresh(self):
        matmul._probe.cache_clear()
        yield
        matmul._probe.cache_clear()

    def test_it_is_used_where_it_is_right(self):
        if matmul.fused_unavailable(torch.device("cpu"), torch.float32) is not None:
            pytest.skip("no oneDNN here")
        q = torch.empty(1, 1, 1024, 64)
        assert tiles.arithmetic(Problem(q, q, q)) == (torch.float32, matmul.Fused)

    @pytest.mark.parametrize(
        ("replacement", "reason"),
        [
            (lambda x, w, a: torch.tanh(x @ w.mT), "wrong result"),
            (lambda x, w, a: (_ for _ in ()).throw(RuntimeError("no such operator")), "no such operator"),
        ],
    )
    def test_a_wrong_or_missing_operator_is_not_used(self, monkeypatch, replacement, reason):
        monkeypatch.setattr(matmul, "linear", replacement)
        assert reason in matmul.fused_unavailable(torch.device("cpu"), torch.float32)
        q, k, v = torch.randn(3, 1, 1, 400, 8).unbind()
        expected = sigmoid_attention(q, k, v, backend="reference")
        torch.testing.assert_close(sigmoid_attention(q, k, v, backend="blocked"), expected)

    @pytest.mark.filterwarnings("ignore:TF32 acceleration")  # PyTorch's, of restoring its own flags
    def test_switched_off_by_the_user(self):
        with torch.backends.mkldnn.flags(enabled=False):
            assert "is disabled" in matmul.fused_unavailable(torch.device("cpu"), torch.float32)

    def test_other_devices_and_dtypes(self):
        assert "CPUs only, not cuda" in matmul.fused_unavailable(torch.device("cuda"), torch.float32)
        assert "float32 and bfloat16" in matmul.fused_unavailable(torch.device("cpu"), torch.float64)

    def test_half_precision_is_computed_in_float32_without_it(self, monkeypatch):
        monkeypatch.setattr(tiles, "fused_unavailable", lambda device, dtype: "no")
        q = torch.empty(1, 1, 512, 64, dtype=torch.bfloat16)
        assert tiles.arithmetic(Problem(q, q, q)) == (torch.float32, matmul.Products)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("query_heads", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tiles_stay_within_their_memory(right, query_heads, dtype):
    """At most twice the limit, for any number of query heads per key head, and with a window."""
    query = torch.empty(1, query_heads, 5000, 8, dtype=dtype)
    key = torch.empty(1, 1, 5000, 8, dtype=dtype)
    for group in tiles.groups(Problem(query, key, key, right=right)):
        for block in group.short_blocks(Span(0, 5000), long_side=5000):
            weights = len(group.key) * query_heads * block.size * tiles.LONG_SIDE
            assert weights * group.dtype.itemsize <= 2 * tiles.TILE_BYTES


class TestThePlainestCalls:
    """Short self-attention takes a fast path on a CPU, with the same results."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("n", [1, 30, 64, 200])
    def test_same_result(self, dtype, causal, n):
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 2, n, 3, 16).to(dtype).transpose(2, 3).unbind()
        for scale, bias in ((None, None), (0.3, -2.0)):
            out = sigmoid_attention(q, k, v, is_causal=causal, scale=scale, bias=bias)
            options = {"is_causal": causal, "scale": scale, "bias": bias, "backend": "reference"}
            truth = sigmoid_attention(q.double(), k.double(), v.double(), **options)
            rough = sigmoid_attention(q, k, v, **options)
            assert_as_good_as_formula(out, truth, rough, 1.0)

    def test_it_is_taken(self, monkeypatch):
        q = torch.randn(1, 2, 64, 8)
        monkeypatch.setattr("sigattn.ops.attention.canonical", None)
        assert sigmoid_attention(q, q, q).shape == q.shape
        assert sigmoid_attention(q.requires_grad_(), q, q).requires_grad
        for changed in (q.detach().double(), torch.nn.Parameter(q)):
            with pytest.raises(TypeError, match="NoneType"):
                sigmoid_attention(changed, changed, changed)


class TestScratch:
    """Tiles are written into memory that each thread keeps."""

    @pytest.mark.parametrize("n", [300, 700])
    def test_after_inference_mode(self, n):
        q = torch.randn(1, 4, n, 16)
        matmul._kept.__dict__.clear()
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

    def test_it_is_bounded(self):
        scratch = matmul.Scratch()
        scratch.tile("logits", torch.empty(0), 1 << 24)
        assert not scratch._buffers
        small = scratch.tile("logits", torch.empty(0, dtype=torch.bfloat16), 8, 100)
        assert small.shape == (8, 100)
        assert small.dtype is torch.bfloat16
        assert sum(map(len, scratch._buffers.values())) == 1600
