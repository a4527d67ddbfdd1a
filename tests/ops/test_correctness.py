"""Every backend, over all options, forward and every gradient, against the formula in float64."""

from unittest import mock

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import problem
from sigattn.ops.triton import kernel_args
from tests.ops.cases import (
    COMPLETE,
    Case,
    device_of,
    nan_filled_memory,
    negated,
    numbers,
    path,
    random_case,
    ways,
    wide,
)
from tests.ops.truth import assert_as_good_as_formula, formula, sums_of_magnitudes


def run(function, given, options, grad_out, frozen=()):
    """Return the output and the gradients of floating-point inputs but those that are frozen, from new leaves."""
    leaves = {k: t.detach().clone() if t.dtype is torch.bool else t.detach() for k, t in given.items()}
    floating = {k: t.requires_grad_() for k, t in leaves.items() if t.is_floating_point() and k not in frozen}
    out = function(leaves["query"], leaves["key"], leaves["value"], **options(leaves))
    gradients = torch.autograd.grad(out, list(floating.values()), grad_out.to(out), allow_unused=True)
    pairs = zip(floating.items(), gradients, strict=True)
    return out.detach().cpu(), {k: (torch.zeros_like(t) if g is None else g).cpu() for (k, t), g in pairs}


def is_laid_out_like(t, operand):
    """Return True if a tensor has no gaps, and its rows the order in memory of those of an operand."""
    orders = [sorted((i for i in range(3) if x.shape[i] > 1), key=x.stride) for x in (t, operand)]
    return t.stride() == torch.empty_like(t).stride() and orders[0] == orders[1]


def check(case: Case, backend: str | None, repeats: int = 0) -> None:
    """Compare output and gradients with the formula, and their layout with that of the operands.

    Further runs are compared with the first, bit by bit.
    """
    if case.dtype is torch.float64 and wide(backend) is not torch.float64:
        case.dtype = wide(backend)
    inputs, lengths = case.tensors()
    there, lengths_there = case.tensors(device_of(backend))
    batch, kv, rep, n, _, _, dv = case.shape
    grad_out = torch.randn(batch, kv * rep, n, dv, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    grad_out = negated(grad_out) if case.layout == "negated" else grad_out

    def in_dtype(dtype):
        def call(q, k, v, **o):
            return formula(q, k, v, dtype=dtype, **o)

        return run(call, inputs, lambda leaves: case.formula_options(leaves, lengths), grad_out)

    def ours(*tensors, **o):
        with mock.patch.object(problem, "new_seed", case.dropout_seed.to):
            return sigmoid_attention(*tensors, backend=backend, **o)

    truth, truth_grads = in_dtype(torch.float64)
    same, same_grads = in_dtype(case.dtype)
    out, grads = run(ours, there, lambda leaves: case.options(leaves, lengths_there), grad_out, case.frozen)
    double = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    magnitude = sums_of_magnitudes(double, grad_out, **case.formula_options(double, lengths))
    assert_as_good_as_formula(out, truth, same, magnitude["output"], "output")
    if case.layout != "expanded" and out.numel():
        assert is_laid_out_like(out, there["query"])
    for name, gradient in grads.items():
        assert gradient.dtype == inputs[name].dtype, name
        if name in ("query", "key", "value") and backend != "reference":
            assert is_laid_out_like(gradient, torch.empty_like(there[name])), name
        assert_as_good_as_formula(
            gradient, truth_grads[name].double(), same_grads[name], magnitude[name], name, case.dtype
        )
    for _ in range(repeats):
        again, more = run(ours, there, lambda leaves: case.options(leaves, lengths_there), grad_out, case.frozen)
        assert torch.equal(again, out), "output differs between two runs"
        is_atomic = {"attn_mask"} if not torch.are_deterministic_algorithms_enabled() else set()  # of a broadcast mask
        for name in grads.keys() - is_atomic:
            assert torch.equal(more[name], grads[name]), f"{name} differs between two runs"


def check_written(case: Case, backend: str | None, way: str) -> None:
    """Check a case in one way, every second one with new memory that is NaN."""
    if "bfloat16" in way and case.seed % 4 > 1:  # such products are used if the logits have no terms but a bias
        case.dtype, case.softcap, case.slopes = torch.bfloat16, 0.0, None
        case.mask = ("bool", case.mask[1]) if case.mask else None
    with path(way), nan_filled_memory(case.seed % 2 == 1):
        check(case, backend, repeats=int(device_of(backend) == "cuda"))


@pytest.mark.parametrize(
    ("backend", "way", "number"),
    [(b, w, n) for b, few in (("reference", 40), ("blocked", 40), (None, 12)) for w in ways(b) for n in numbers(few)],
)
def test_output_and_gradients_match_the_formula(backend, way, number):
    check_written(random_case(number), backend, way)


@pytest.mark.parametrize("number", numbers(120 if torch.cuda.is_available() else 8))
@pytest.mark.parametrize("way", ways("triton") if torch.cuda.is_available() else ["small tiles"])
def test_output_and_gradients_of_triton_match_the_formula(way, number):
    """In large tiles, interpreted: test_any_call_is_cached."""
    number += 1000 * (way == "tuned") + 499  # other calls; the first eight have every option
    check_written(random_case(number, interpreted=not torch.cuda.is_available()), "triton", way)


BLOCKED, TRITON = (1, 1, 2, 300, 4500, 16, 24), (1, 1, 1, 150, 170, 64, 64)


@pytest.mark.parametrize(
    ("backend", "shape", "dtype", "causal", "window"),
    [
        ("blocked", BLOCKED, torch.float32, True, None),
        ("blocked", BLOCKED, torch.bfloat16, False, None),
        ("triton", TRITON, torch.bfloat16, True, None),
        ("triton", TRITON, torch.float16, False, (130, 40)),
    ],
)
def test_sizes_that_cross_real_tiles(monkeypatch, backend, shape, dtype, causal, window):
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel_args, "architecture", lambda device: 90)
    slopes = "head" if backend == "triton" else None
    check(Case(shape, dtype, causal, None, window, None, None, slopes, False, "length first", 5), backend)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize(
    ("dtype", "softcap", "keys", "most"),
    [
        (torch.float32, 0.0, torch.linspace(-60, 0, 250), 2e-5),
        *((torch.float32, cap, torch.linspace(-5, 2, 100), 3e-5) for cap in (0.01, 1.0, 1e5)),
        *((torch.float16, cap, torch.linspace(-5, 2, 100), 1e-3) for cap in (0.01, 1e5)),
    ],
)
def test_small_weights_keep_their_relative_accuracy(backend, dtype, softcap, keys, most):
    """With b = -log n and very negative logits P is tiny; its error must be small relative to P, not to 1.

    So must that of tanh: with a large cap, its arguments are small. The output are the weights.
    """
    n = len(keys)
    tensors = [t.to(dtype) for t in (torch.ones(1, 1, 3, 1), keys.view(1, 1, n, 1), torch.eye(n).view(1, 1, n, n))]
    options = {"scale": 1.0, "softcap": softcap, "bias": -3.0 if softcap else None}
    out = sigmoid_attention(*(t.to(device_of(backend)) for t in tensors), backend=backend, **options).cpu().double()
    truth = formula(*tensors, **options)
    assert ((out - truth).abs() / truth).max() < most
