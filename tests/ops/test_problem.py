"""The bias rule, and misprints of the paper that concern the operator (docs/paper-notes.md)."""

import math

import torch

from sigattn import log_length_bias, sigmoid_attention


def test_log_length_bias():
    assert log_length_bias(1) == 0
    assert log_length_bias(2048) == -math.log(2048)  # the -7.62 of the authors' configurations
    torch.testing.assert_close(log_length_bias(torch.tensor([1, 2048])), torch.tensor([0.0, -math.log(2048)]))
    assert log_length_bias(torch.tensor([3.0], dtype=torch.float64)).dtype is torch.float64


def test_default_bias_is_minus_log_of_the_number_of_keys():
    """Sect. 2: y_i = Σ_j e^s / (e^s + n) v_j. The sequence form omits the scale of Eq. 3, which is meant."""
    q, k, v = torch.randn(3, 1, 1, 7, 4, dtype=torch.float64).unbind()
    e = (q @ k.mT / 4**0.5).exp()
    torch.testing.assert_close(sigmoid_attention(q, k, v), e / (e + 7) @ v)


def test_gradients_of_q_and_k_carry_one_over_root_d():
    """App. F's table and Algorithm 2 print √d; and dV_j sums P_ij dO_i over i, dP_ij is dO_i · V_j."""
    q, k, v, g = torch.randn(4, 1, 1, 5, 16, dtype=torch.float64).unbind()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(sigmoid_attention(*leaves, bias=-1.0), leaves, g)
    p = torch.sigmoid(q @ k.mT / 4 - 1)
    ds = p * (1 - p) * torch.einsum("bhid,bhjd->bhij", g, v)
    torch.testing.assert_close(dq, ds @ k / 4)
    torch.testing.assert_close(dk, ds.mT @ q / 4)
    torch.testing.assert_close(dv, torch.einsum("bhij,bhid->bhjd", p, g))


def test_the_bias_that_normalises_equal_logits_is_minus_log_n_minus_1():
    """App. E: the proposition gives b* = -log(n - 1) for logits 0; the paper then takes -log n, a mass of n/(n+1)."""
    n = 9
    zeros, ones = torch.zeros(1, 1, n, 2, dtype=torch.float64), torch.ones(1, 1, n, 1, dtype=torch.float64)
    exact = sigmoid_attention(zeros, zeros, ones, bias=-math.log(n - 1))
    torch.testing.assert_close(exact, torch.ones_like(exact))
    torch.testing.assert_close(sigmoid_attention(zeros, zeros, ones), torch.full_like(exact, n / (n + 1)))
