"""The Triton backend: supported calls, settings, layout of results."""

import itertools
import types

import pytest
import torch
import triton as kernels
import triton.language as language

from sigattn import sigmoid_attention, sigmoid_kvcache_attention
from sigattn.ops import triton
from sigattn.ops.attention import DENSE
from sigattn.ops.problem import Problem, bias_tensor
from sigattn.ops.triton import activation, kernel_args, tile, tuning
from tests.ops.cases import device_of, path
from tests.ops.truth import assert_as_good_as_formula, formula

DEVICE = device_of("triton")


def problem(device="cpu", dtype=torch.float32, d=8, dv=8):
    q, v = (torch.empty(1, 2, 4, width, dtype=dtype, device=device) for width in (d, dv))
    return Problem(q, q, v)


def test_unsupported_problems_are_refused(monkeypatch):
    for given, interpreted, reason in (
        (problem(device="meta"), "1", "for CUDA and ROCm devices, not for meta"),
        (problem(dtype=torch.float64), "1", "float16, bfloat16, float32, not for torch.float64"),
        (problem(d=257), "1", "heads of 1 to 256, not of 257 \\(query, key\\) and 8"),
        (problem(dv=300), "1", "and 300 \\(value\\)"),
        (problem(), "0", "not for cpu"),
    ):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        with pytest.raises(ValueError, match=f"backend 'triton' does not support this call: .*{reason}"):
            DENSE.choose(given, "triton")


def test_missing_triton_and_old_gpus(monkeypatch):
    gpu = types.SimpleNamespace(
        query=types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 1, 4, 8)),
        value=types.SimpleNamespace(shape=(1, 1, 4, 8)),
    )
    monkeypatch.setattr(triton, "_compute_capability", lambda device: (7, 5))
    assert "this GPU has 7.5" in triton._device_unavailable(gpu.query.device)
    monkeypatch.setattr(triton, "_compute_capability", lambda device: (9, 0))
    assert triton._device_unavailable(gpu.query.device) is None
    monkeypatch.setattr(triton, "_INSTALLED", False)
    assert "Triton is not installed" in triton._device_unavailable(gpu.query.device)


@pytest.mark.filterwarnings("ignore:.*TF32")  # PyTorch's, of its older setting
@pytest.mark.usefixtures("unchecked")
def test_tf32_follows_the_settings_of_pytorch(monkeypatch):
    on_gpu = types.SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    try:
        cases = ("high", 80, "bf16x3"), ("high", 75, "ieee"), ("high", 0, "ieee"), ("highest", 90, "ieee")
        for precision, architecture, expected in cases:
            torch.set_float32_matmul_precision(precision)
            monkeypatch.setattr(kernel_args, "architecture", lambda _, found=architecture: found)
            assert kernel_args.precision(on_gpu) == expected
    finally:
        torch.set_float32_matmul_precision("highest")


def test_every_table_has_every_size():
    """Of tiles of at least what a product needs, each within one block of a BlockMask."""
    kernels, architectures = (tuning.FWD, tuning.DKDV, tuning.DQ), (0, 80, 86, 89, 90, 100, 103, 120)
    for case in itertools.product(kernels, architectures, range(1, 257), (2, 4)):
        tile = tuning.kernel_config(*case)[:2]
        assert min(tile) >= 16, case
        assert all(triton._MAX_TILE % size == 0 for size in tile), case


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_strongly_attended_keys_do_not_overflow(dtype):
    """With b = -log 65536 float16 weights are multiplied by 2^15, but dS of a weight of 1/2 must not be."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=g).to(dtype).requires_grad_() for n in (20, 40, 40))
    grad = (60 * torch.randn(1, 1, 20, 16, generator=g)).to(dtype)
    bias, scale = -11.0903, 3.0  # logits of up to ±40: weights from 0 to 1

    def gradients(out, leaves):
        return torch.autograd.grad(out, leaves, grad.to(out.dtype).to(out.device))

    there = [t.detach().to(DEVICE).requires_grad_() for t in (q, k, v)]
    ours = gradients(sigmoid_attention(*there, bias=bias, scale=scale, backend="triton"), there)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = gradients(formula(*wide, bias=bias, scale=scale), wide)
    same = gradients(formula(q, k, v, bias=bias, scale=scale, dtype=dtype), (q, k, v))
    assert (grad.double() @ v.double().mT).abs().max() > 500  # dP
    for a, t, f in zip(ours, truth, same, strict=True):
        assert a.isfinite().all()
        assert_as_good_as_formula(a.cpu(), t, f)


@pytest.mark.parametrize(
    "strides", [(0, 2**31, 16, 1), (2**31 + 64, 64, 256, 1), (0, 16, 2**27, 1), (0, 700, 16, 2**29)]
)
def test_tensors_may_have_more_than_2_to_the_31_elements(strides):
    """Large strides of heads, samples, rows or columns; memory that is not accessed is not allocated."""
    b, h, n, d = (2 if strides[0] else 1), 2, 40, 8
    extent = 1 + sum((size - 1) * stride for size, stride in zip((b, h, n, d), strides, strict=True))
    assert extent > 2**31
    far = torch.empty(extent, dtype=torch.float16, device=DEVICE).as_strided((b, h, n, d), strides)
    near = torch.randn(b, h, n, d, device=DEVICE).half()
    far.copy_(near)
    results = []
    for q, backend in ((far, "triton"), (near.float(), "reference")):
        q = q.detach().requires_grad_()
        out = sigmoid_attention(q, q, q, is_causal=True, backend=backend)
        results.append([t.float() for t in (out, *torch.autograd.grad(out.float().square().sum(), q))])
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_a_cache_with_features_first_may_have_large_strides():
    """Its 8 GiB are not allocated, but for the pages of 20 keys."""
    cache = torch.empty(32, 2**27, dtype=torch.float16, device=DEVICE)[:, :20].t()[None, :, None]
    cache.copy_(torch.randn(1, 20, 1, 32))
    q = torch.randn(1, 1, 1, 32, device=DEVICE).half()

    def attend(k):
        return sigmoid_kvcache_attention(q, k, k, bias=-3.0, cache_seqlens=20, backend="triton")

    torch.testing.assert_close(attend(cache), attend(cache.contiguous()))


def test_hidden_tiles_are_not_visited():
    """They contain NaN, which would reach a result even if multiplied by 0."""
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE) for n in (32, 96, 96))
    for options, seen in (({"is_causal": True}, slice(0, 32)), ({"window": (-1, 10)}, slice(0, 64))):
        nowhere = torch.ones(96, dtype=torch.bool)
        nowhere[seen] = False
        keys, values = k.clone(), v.clone()
        keys[:, :, nowhere], values[:, :, nowhere] = torch.nan, torch.nan
        leaves = [t.requires_grad_() for t in (q.clone(), keys, values)]
        with path("small tiles"):
            out = sigmoid_attention(*leaves, bias=-1.0, backend="triton", **options)
            gradients = torch.autograd.grad(out.sum(), leaves)
        assert out.isfinite().all()
        assert gradients[0].isfinite().all()
        assert not gradients[2][:, :, nowhere].any()


@kernels.jit
def _tile_bounds_of(numbers, out, HAS_LEFT: language.constexpr, HAS_RIGHT: language.constexpr):
    at = language.arange(0, 1024)
    first, last = language.load(numbers + at), language.load(numbers + 1024 + at)
    length = language.load(numbers + 2048 + at)
    left, right = language.load(numbers + 3072 + at), language.load(numbers + 4096 + at)
    start, full_start, full_stop, stop = tile.tile_bounds(first, last, length, left, right, 16, HAS_LEFT, HAS_RIGHT)
    language.store(out + at, start + 0 * at)
    language.store(out + 1024 + at, full_start + 0 * at)
    language.store(out + 2048 + at, full_stop + 0 * at)
    language.store(out + 3072 + at, stop + 0 * at)


@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("has_right", [False, True])
def test_tiles_that_a_window_shows(has_left, has_right):
    """Visited are the tiles in which a query sees a key, and without a mask those in which all queries see all keys."""
    low, high = torch.tensor([-20, 1, 0, 0, 0]), torch.tensor([60, 33, 97, 41, 41])
    numbers = (torch.rand(1024, 5) * (high - low)).int() + low.int()
    numbers[:, 1] += numbers[:, 0]
    found = torch.empty(4, 1024, dtype=torch.int32, device=DEVICE)
    _tile_bounds_of[(1,)](numbers.T.contiguous().to(DEVICE), found, int(has_left), int(has_right))
    first, last, length, left, right = numbers.view(1024, 5, 1, 1).unbind(1)
    i, j = torch.arange(-20, 92).view(-1, 1), torch.arange(96)
    exists = (i >= first) & (i < last)
    sees = (j < length) & (~exists | ((j >= i - left) | (not has_left)) & ((j <= i + right) | (not has_right)))
    tiles = torch.arange(0, 96, 16)
    start, full_start, full_stop, stop = found.cpu().view(4, 1024, 1)
    some = (sees & exists).any(1).view(1024, 6, 16).any(-1)
    assert torch.equal(((tiles >= start) & (tiles < stop))[some.any(1)], some[some.any(1)])
    assert torch.equal((tiles >= full_start) & (tiles < full_stop), sees.all(1).view(1024, 6, 16).all(-1))


@kernels.jit
def _sigmoid_of(z, p, KIND: language.constexpr):
    at = language.arange(0, 4096)
    language.store(p + at, activation.sigmoid(language.load(z + at), 1.0, 0.0, KIND, False))


@pytest.mark.parametrize(("kind", "most"), [("accurate", 3.4e-5), ("exact", 5e-6)])
def test_error_of_the_sigmoid_relative_to_itself(kind, most):
    """At every P, also the smallest; NaN stays NaN, and values beyond float32 give 0 or 1."""
    x = torch.linspace(-80, 40, 4096)
    x[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    p = torch.empty(4096, device=DEVICE)
    _sigmoid_of[(1,)]((-x * 1.4426950408889634).to(DEVICE), p, kind)
    p = p.cpu().double()
    assert p[0].isnan()
    assert p[1].item() == pytest.approx(1, abs=most)
    assert p[2] < 1e-35
    truth = torch.sigmoid(x[3:].double())
    assert ((p[3:] / truth - 1).abs()).max() < most + 1.2e-7 * 80  # and the rounding of z


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_compiled_graphs_stay_on_the_device():
    """A CUDA graph of a compiled model would replay the recorded value of a number on the CPU."""
    compiled = torch.compile(lambda query: bias_tensor(-1.0, query), backend="eager", fullgraph=True)
    query = torch.empty(1, device="meta", dtype=torch.float16)
    for given, dtype in ((query, torch.float32), (query.double(), torch.float64)):
        found = compiled(given)
        assert (found.shape, found.device, found.dtype) == ((1, 1, 1, 1), query.device, dtype)
    assert compiled(torch.empty(1)).shape == ()
