"""Reference of the benchmarks, and the check of every implementation."""

import math

import pytest
import torch

from benchmarks import reference
from benchmarks.baselines import naive_sigmoid
from benchmarks.inputs import random_inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_reference_equals_autograd_in_float64(softmax, causal, alibi):
    inputs = random_inputs(1, 2, 37, 8, torch.float64, CPU, causal=causal, alibi=alibi)
    q, k, v = inputs.leaves()
    if softmax:
        i = torch.arange(37)
        mask = torch.zeros(2, 37, 37, dtype=torch.float64)
        if alibi:
            mask = mask - inputs.options.slopes.double()[:, None, None] * (i[:, None] - i).abs()
        if causal:
            mask = mask.masked_fill(i[:, None] < i, -math.inf)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    else:
        out = naive_sigmoid(q, k, v, inputs.options)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.grad_out)
    at = torch.tensor([0, 5, 36])
    found = reference.reference_results(inputs, at, softmax)
    for ours, theirs in zip(found, (out.detach(), *gradients), strict=True):
        torch.testing.assert_close(ours, theirs[0, :, at])


def test_a_wrong_output_or_gradient_raises():
    inputs = random_inputs(1, 2, 37, 8, torch.float32, CPU)
    q, k, v = inputs.leaves()
    out = naive_sigmoid(q, k, v, inputs.options)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.grad_out)
    error, worst = reference.check(inputs, False, out.detach(), gradients)
    assert max(error, worst) < 1e-5
    with pytest.raises(reference.WrongResultError, match="relative errors"):
        reference.check(inputs, False, 1.1 * out.detach(), gradients)
    for at in range(3):
        wrong = [g.clone() for g in gradients]
        wrong[at][0, 0, 5, 2] = math.nan
        with pytest.raises(reference.WrongResultError, match="nan"):
            reference.check(inputs, False, out.detach(), wrong)
