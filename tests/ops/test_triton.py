"""The Triton backend beside its mathematics: what it serves, its settings, the layout of what it gives."""

import types

import pytest
import torch

from sigattn import sigmoid_attention
from sigattn.ops import library, triton
from sigattn.ops.problem import Problem
from sigattn.ops.triton import launch, tuning
from tests.ops.cases import device_of
from tests.ops.truth import assert_as_good_as_formula, formula

DEVICE = device_of("triton")


def problem(device="cpu", dtype=torch.float32, d=8, dv=8):
    q, v = torch.empty(1, 2, 4, d, dtype=dtype, device=device), torch.empty(1, 2, 4, dv, dtype=dtype, device=device)
    return Problem(q, q, v)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(device="meta"), "for CUDA and ROCm devices, not for meta"),
        (problem(dtype=torch.float64), "float16, bfloat16, float32, not for torch.float64"),
        (problem(d=257), "heads of 1 to 256, not of 257 \\(query, key\\) and 8"),
        (problem(dv=300), "and 300 \\(value\\)"),
    ],
)
def test_what_it_does_not_serve(monkeypatch, given, reason):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call: .*{reason}"):
        library.choose(given, "triton")


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "not for cpu" in triton.unavailable(problem())


def test_missing_triton_and_old_gpus(monkeypatch):
    gpu = types.SimpleNamespace(
        query=types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 1, 4, 8)),
        value=types.SimpleNamespace(shape=(1, 1, 4, 8)),
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=7, minor=5))
    assert "this GPU has 7.5" in triton._no_machine(gpu.query.device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=9, minor=0))
    assert triton._no_machine(gpu.query.device) is None
    monkeypatch.setattr(triton, "_INSTALLED", False)
    assert "Triton is not installed" in triton._no_machine(gpu.query.device)


def test_outputs_and_gradients_are_laid_out_as_the_query():
    """(B, N, H, D) from projections comes back so: what follows needs no copy."""
    x = torch.randn(2, 9, 3, 16, device=DEVICE, requires_grad=True)
    q = x.transpose(1, 2)
    out = sigmoid_attention(q, q, q, backend="triton")
    assert out.transpose(1, 2).is_contiguous()
    contiguous = q.detach().contiguous()
    plain = sigmoid_attention(contiguous, contiguous, contiguous, backend="triton")
    assert plain.is_contiguous()
    torch.testing.assert_close(out.detach(), plain)


@pytest.mark.filterwarnings("ignore:.*TF32")  # PyTorch's, of its older setting
def test_tf32_follows_pytorch_s_settings():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert launch.tf32_is_allowed()
        torch.set_float32_matmul_precision("highest")
        assert not launch.tf32_is_allowed()
    finally:
        torch.set_float32_matmul_precision(before)


def test_every_table_has_every_size():
    for architecture in (0, 80, 86, 89, 90, 100, 103, 120):
        for itemsize in (2, 4):
            for kernel in (tuning.FORWARD, tuning.KEYS, tuning.QUERIES):
                for width in range(1, 257):
                    config = tuning.configuration(kernel, architecture, width, itemsize)
                    assert min(config.block_m, config.block_n) >= 16  # what a product needs


def test_added_queries_gradient_is_the_same(monkeypatch):
    """The kernel that adds dQ atomically, which no architecture has by default yet."""
    q, k, v = (torch.randn(1, 4, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))

    def gradients():
        out = sigmoid_attention(q, k, v, is_causal=True, backend="triton")
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = gradients()
    monkeypatch.setattr(tuning, "ADD_QUERY_ATOMICALLY", frozenset([launch.architecture(q.device)]))
    for a, b in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_sums_of_a_broadcast_mask_repeat_when_asked_to():
    """Deterministic algorithms: each head has a matrix of its own, and the sum is PyTorch's."""
    q = torch.randn(2, 3, 20, 8, device=DEVICE)
    mask = torch.randn(20, 1, device=DEVICE, requires_grad=True)

    def gradient(deterministic):
        torch.use_deterministic_algorithms(deterministic)
        try:
            return torch.autograd.grad(sigmoid_attention(q, q, q, mask, backend="triton").sum(), mask)[0]
        finally:
            torch.use_deterministic_algorithms(False)

    first = gradient(True)
    assert torch.equal(first, gradient(True))
    torch.testing.assert_close(first, gradient(False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_strongly_attended_keys_do_not_overflow(dtype):
    """With b = -log 65536 float16 weights are carried multiplied by 2^15; a dS of a weight of 1/2 must not be."""
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
