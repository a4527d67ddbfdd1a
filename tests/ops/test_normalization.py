"""Weights divided by their row's sum: every magnitude and level of the logits, and what the fuzz does not cover."""

import itertools

import pytest
import torch

from sigattn import sigmoid_attention
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
