"""Floating-point operations of the forward pass per token and attention head, softmax and sigmoid (Table 1)."""

from __future__ import annotations


def visible_fraction(n: int, causal: bool) -> float:
    """Return Table 1's factor c, the mean fraction of keys visible to a token: (n + 1) / 2n if causal, otherwise 1."""
    if n < 1:
        raise ValueError(f"visible_fraction: a context has at least one token, got n = {n}")
    return (n + 1) / (2 * n) if causal else 1.0


def logits(n: int, head_dim: int, causal: bool = False) -> float:
    """Return the FLOPs of the logits Q Kᵀ: 2 · c · n · d."""
    return 2 * visible_fraction(n, causal) * n * head_dim


def softmax(n: int, causal: bool = False) -> float:
    """Return the FLOPs of softmax, 5 · c · n: maximum and its subtraction (2), exponentiation, summation, division."""
    return 5 * visible_fraction(n, causal) * n


def sigmoid(n: int, causal: bool = False) -> float:
    """Return the FLOPs of the sigmoid, 5 · c · n: bias, sign, exponentiation, addition, division."""
    return 5 * visible_fraction(n, causal) * n


def values(n: int, head_dim: int, causal: bool = False) -> float:
    """Return the FLOPs of P V, 2 · c · n · d, which Table 1 leaves out."""
    return 2 * visible_fraction(n, causal) * n * head_dim
