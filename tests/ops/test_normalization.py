"""Weights divided by their row's sum: every magnitude and level of the logits, and what the fuzz does not cover."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from sigattn import sigmoid_attention, sigmoid_kvcache_attention
from tests.ops.cases import SUPPORTING, device_of
from tests.ops.truth import assert_as_good_as_formula, formula

MAGNITUDES, LEVELS = (1e-3, 1.0, 100.0, 1e4), (0.0, -30.0, -70.0, -1e4, 1e4)


@pytest.mark.parametrize("backend", SUPPORTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accurate_at_every_magnitude_and_level(backend, dtype):
    """The logits of each sample have another magnitude, and the bias of each head is another level."""
    if backend == "llvm" and dtype is torch.float16:
        pytest.skip("not supported")
    n, device, generator = 40, device_of(backend), torch.Generator().manual_seed(0)
    magnitudes, levels = (MAGNITUDES, LEVELS) if backend != "triton" else (MAGNITUDES[1:3], LEVELS[::3])
    q, k, v, grad_out = torch.randn(4, len(magnitudes), len(levels), n, 16, generator=generator).unbind()
    q = q * torch.tensor(magnitudes).view(-1, 1, 1, 1)
    q, k, v, grad_out = (t.to(dtype) for t in (q, k, v, grad_out))
    bias = torch.tensor(levels).view(-1, 1, 1)
    results = []
    for kind in (torch.float64, torch.float32, None):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        if kind is None:
            there = [t.to(device) for t in (*leaves, bias)]
            out = sigmoid_attention(*there[:3], is_causal=True, bias=there[3], normalize=True, backend=backend).cpu()
        else:  # in float32 for half precision too, in which the plain formula has no correct digit at 1e4
            out = formula(*leaves, causal=True, bias=bias, normalize=True, dtype=kind)
        results.append((out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))))
    for name, truth, same, ours in zip(("output", "query", "key", "value"), *results, strict=True):
        assert ours.isfinite().all()
        for (i, magnitude), (j, level) in itertools.product(enumerate(magnitudes), enumerate(levels)):
            scores = 1 + abs(level) * 1e-2 + 4 * magnitude  # the sizes of the sums whose rounding is an error of W
            most = scores * 40 * (magnitude if name == "key" else 1.0)
            tensors = ours[i, j], truth[i, j].double(), same[i, j].to(dtype)
            assert_as_good_as_formula(*tensors, most, f"{name}, {magnitude}, {level}")


@pytest.mark.parametrize("backend", [b for b in SUPPORTING if b != "triton"])  # three times SDPA's error (docs/log.md)
def test_gradients_in_bfloat16_where_one_key_has_nearly_all_weight(backend):
    """dP and δ nearly cancel there. As accurate as those of softmax attention."""
    generator, device = torch.Generator().manual_seed(0), device_of(backend)
    q, k, v, grad_out = torch.randn(4, 1, 2, 64, 32, generator=generator).bfloat16().to(device).unbind()
    q = 100 * q

    def gradients(attend, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(attend(*leaves, is_causal=True), leaves, grad_out.to(dtype))

    def normalized(*leaves, **options):
        return sigmoid_attention(*leaves, **options, bias=-1e4, normalize=True, backend=backend)

    truth = gradients(F.scaled_dot_product_attention, torch.float64)
    softmax, ours = gradients(F.scaled_dot_product_attention, torch.bfloat16), gradients(normalized, torch.bfloat16)
    for exact, theirs, own in zip(truth, softmax, ours, strict=True):
        assert (own - exact).norm() <= 2 * (theirs - exact).norm()


@pytest.mark.parametrize("backend", SUPPORTING)
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30, -1e9])
def test_a_finite_mask_of_a_whole_row(backend, value):
    """It absorbs the logits, so that all keys that have it have the same weight, as in a softmax."""
    query, key, value_rows = (torch.randn(2, 2, 20, 16, device=device_of(backend)) for _ in range(3))
    mask = torch.zeros(20, 20, device=query.device)
    mask[3:], mask[:, 15:] = value, value
    out = sigmoid_attention(query, key, value_rows, mask, bias=-9.0, normalize=True, backend=backend)
    expected = F.scaled_dot_product_attention(query, key, value_rows, mask)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", SUPPORTING)
def test_a_finite_mask_of_a_whole_cache(backend):
    """Of parts of unequal sizes."""
    device = device_of(backend)
    query, (key, value) = torch.randn(1, 1, 1, 16, device=device), torch.randn(2, 1, 200, 1, 16, device=device)
    mask = torch.full((1, 200), -1e9, device=device)
    options = {"attn_mask": mask, "bias": -9.0, "normalize": True, "num_splits": 4, "backend": backend}
    torch.testing.assert_close(
        sigmoid_kvcache_attention(query, key, value, **options), value.mean(1, keepdim=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", SUPPORTING)
def test_the_weight_of_a_single_key_is_1(backend):
    """However low its logit is."""
    device = device_of(backend)
    query = -(10 ** torch.linspace(3, 30, 200, device=device)).view(1, 1, -1, 1)
    key, value = torch.ones(2, 1, 1, 1, 1, device=device).unbind()
    options = {"bias": -9.0, "scale": 1.0, "normalize": True, "backend": backend}
    torch.testing.assert_close(sigmoid_attention(query, key, value, **options), torch.ones_like(query))


@pytest.mark.parametrize("backend", SUPPORTING)
def test_nested_transforms(backend):
    """Levels below a transform do not return what they saved."""
    q, k, v = (torch.randn(1, 1, 12, 8, device=device_of(backend)) for _ in range(3))

    def second(name):
        def first(q):
            return torch.func.grad(lambda q: sigmoid_attention(q, k, v, normalize=True, backend=name).square().sum())(q)

        return torch.func.grad(lambda q: first(q).square().sum())(q)

    torch.testing.assert_close(second(backend), second("reference"), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("backend", [b for b in SUPPORTING if b != "triton"])
def test_rows_far_below_0_whose_weights_are_not_saved(backend):
    """As in compiled graphs: the backward pass lifts them again."""
    leaves = [torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3)]
    options = {"bias": -1e4, "normalize": True, "backend": backend}
    out = torch.compile(lambda *t: sigmoid_attention(*t, **options), backend="aot_eager")(*leaves)
    truth = formula(*leaves, bias=-1e4, normalize=True, dtype=torch.float64)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(truth, leaves, grad_out.double())
    torch.testing.assert_close(torch.autograd.grad(out, leaves, grad_out), expected, rtol=1e-2, atol=1e-3)
