"""Edge cases that small random problems rarely hit: borders of windows, limits of 16 bits, sizes of 0, NaN."""

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sigattn import (
    attention_statistics,
    log_length_bias,
    sigmoid_attention,
    sigmoid_kvcache_attention,
    sigmoid_varlen_attention,
)
from sigattn.ops import blocked
from sigattn.ops.blocked import tiles
from sigattn.ops.problem import Problem
from tests.ops.cases import COMPLETE, ON_CPU, SUPPORTING, device_of, nan_filled_memory, negated, operands, path, ways
from tests.ops.truth import formula


@pytest.mark.parametrize(
    ("largest", "sides"),  # which are largest; None for a side of 1
    [*((n, (1, 1)) for n in (2**31 - 1, sys.maxsize, 2**64)), *((2**63 - 1, s) for s in ((0, 1), (1, 0), (1, None)))],
)
def test_the_largest_side_of_a_window_hides_no_key(largest, sides):
    """Added to or subtracted from the position of a query it would overflow."""
    window = tuple(1 if side is None else largest if side else -1 for side in sides)
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    options = {"bias": -1.0, "window": (-1, min(window[1], 10))}
    expected = formula(q, k, v, **options)
    for backend in (None, *SUPPORTING):
        out = sigmoid_attention(
            *(t.to(device_of(backend)) for t in (q, k, v)), window=window, bias=-1.0, backend=backend
        )
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-5)
    for backend in ("blocked", "triton"):
        cached = (t.transpose(1, 2).to(device_of(backend)) for t in (q[:, :, -1:], k, v))
        out = sigmoid_kvcache_attention(*cached, window=window, bias=-1.0, backend=backend).transpose(1, 2)
        torch.testing.assert_close(out.cpu().double(), expected[:, :, -1:], rtol=1e-4, atol=1e-5)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    packed = (t[0].transpose(0, 1) for t in (q, k, v))
    out = sigmoid_varlen_attention(*packed, starts, starts, 5, 5, window=window, bias=-1.0)
    torch.testing.assert_close(out.transpose(0, 1)[None].double(), expected, rtol=1e-4, atol=1e-5)
    found = attention_statistics(q, k, v, window=window, bias=-1.0).row_mass_mean
    mass = formula(q, k, v, weights=True, **options).sum(-1).mean(-1)
    torch.testing.assert_close(found.double(), mass, rtol=1e-5, atol=0.0)


def edges():
    """Return the operands and the options of calls by name."""
    sizes = ((5, 6, 0), (0, 6), (5, 0), (5, 6, 2, 0, 0), (5, 6, 2, 0, 1))
    calls = {f"sizes {size}": (operands(*size), {}) for size in sizes}
    # without features of queries and keys every logit is the bias; without those of values there is no gradient
    for d, dv in ((0, 7), (4, 0), (0, 0)):
        calls[f"features {d}, {dv}"] = operands(key_heads=2, d=d, dv=dv), {"bias": 0.0, "enable_gqa": True}
    for dtype, n, is_tensor in itertools.product((torch.float32, torch.bfloat16), (5, 40), (False, True)):
        what, (q, k, v) = f"{dtype} {n} {is_tensor}", (t.to(dtype) for t in operands(n, n, 1, 3 if is_tensor else 1))
        # all weights of a head are 1 or all are 0
        extremes = (math.inf, -math.inf, 3.4e38)
        extremes = (torch.tensor(extremes).view(3, 1, 1),) if is_tensor else extremes
        low, lower = (torch.full((3, 1, 1), b) if is_tensor else b for b in (-3.0, -100.3))
        calls |= {f"extreme bias {i} {what}": ((q, k, v), {"bias": b}) for i, b in enumerate(extremes)}
        calls[f"scale 0 {what}"] = (q, k, v), {"scale": 0.0, "bias": low}  # with alpha = 0 oneDNN ignores beta
        # would be rounded to -100.5, which determines the result with a product of 100
        calls[f"bias -100.3 {what}"] = (q * 0 + 5, k * 0 + 10, v), {"scale": 0.25, "bias": lower}
    q, k, v = operands()
    calls["overflow to +inf"] = (torch.full_like(q, 1e30), torch.full_like(k, 1e30), v), {}
    return calls


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)  # rounding to bfloat16 exceeds the tolerance for one in a hundred operands
    EDGES = edges()


@pytest.mark.parametrize("name", EDGES)
def test_edges(request, name):
    """In every backend and its ways; new memory is NaN."""
    (q, k, v), options = EDGES[name]
    if "scale" in name:
        request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
        torch.set_float32_matmul_precision("medium")
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    truth = formula(*leaves, **{name: x for name, x in options.items() if name != "enable_gqa"})
    expected = [t.double() for t in (truth, *torch.autograd.grad(truth.sum(), leaves))]
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-5 if q.dtype is torch.float32 and "scale" not in name else 0.03)
    is_small = q.shape[2] < 40 and q.shape[3] and v.shape[3]  # interpreted kernels are slow
    for backend, way in [
        (b, w) for b in (None, *(SUPPORTING if is_small else ON_CPU)) for w in ways(b) if w != "tuned"
    ]:
        with path(way), nan_filled_memory():
            out = sigmoid_attention(*(t.to(device_of(backend)) for t in leaves), backend=backend, **options)
            found = [t.cpu().double() for t in (out, *torch.autograd.grad(out.sum(), leaves))]
        torch.testing.assert_close(found, expected, **tolerance, msg=lambda m, b=backend, w=way: f"{b} {w}: {m}")


def test_a_scale_of_zero_times_nan():
    """0 · NaN is NaN; and in a cache, a scale of 0."""
    q, k, v = torch.randn(3, 2, 2, 40, 16).unbind()
    cached = (t.transpose(1, 2) for t in (q[:, :, :1], k, v))
    out = sigmoid_kvcache_attention(*cached, bias=-3.0, scale=0.0).transpose(1, 2)
    expected = v.sum(2, keepdim=True) * torch.sigmoid(torch.tensor(-3.0))
    torch.testing.assert_close(out, expected)
    q[0, 0, 2, 0] = math.nan
    for backend, n in itertools.product(COMPLETE, (5, 40)):
        out = sigmoid_attention(*(t[:, :, :n] for t in (q, k, v)), scale=0.0, backend=backend)
        assert (out[0, 0, 2].isnan().all(), out.isnan().sum()) == (True, 16)


def test_tensors_whose_memory_is_not_their_data():
    """A gradient without memory; packed and cached keys that are negated (dense ones: test_correctness.py)."""
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    for backend in (None, *ON_CPU):
        out = sigmoid_attention(q, q, q, backend=backend)
        (grad,) = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape))
        assert not grad.any()
    rows, starts = torch.randn(40, 2, 16), torch.tensor([0, 40])
    out = [sigmoid_varlen_attention(t, rows, rows, starts, starts, 40, 40) for t in (negated(rows), rows)]
    torch.testing.assert_close(*out)
    cache, query = torch.randn(1, 64, 2, 16), torch.randn(1, 1, 2, 16)
    out = [sigmoid_kvcache_attention(query, cache, t, bias=-1.0) for t in (negated(cache), cache)]
    torch.testing.assert_close(*out)


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


def test_long_operands_are_converted_tile_by_tile():
    """Query, key and value of 65,536 rows take 8 MiB each in float16, and 16 in float32, in which they are computed."""

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
                self.found = max(self.found, result.nbytes)
            return result

    q = torch.randn(1, 1, 65_536, 64, dtype=torch.float16)
    with Largest() as mode:
        blocked.forward(Problem(q, q, q, left=16, right=16), None)
    assert 0 < mode.found <= tiles.TILE_BYTES


def test_log_length_bias():
    assert log_length_bias(1) == 0
    assert log_length_bias(2048) == -math.log(2048)  # the -7.62 of the authors' configurations
    torch.testing.assert_close(log_length_bias(torch.tensor([1, 2048])), torch.tensor([0.0, -math.log(2048)]))
    assert log_length_bias(torch.tensor([3.0], dtype=torch.float64)).dtype is torch.float64
