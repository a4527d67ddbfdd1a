"""Table 1: forward floating operations per token and attention head, of softmax and of sigmoid attention."""

from __future__ import annotations


def visible_share(n: int, causal: bool) -> float:
    """The factor c: the share of keys that a token sees on average, (n + 1) / 2n when causal, else 1."""
    if n < 1:
        raise ValueError(f"visible_share: a context has at least one token, got n = {n}")
    return (n + 1) / (2 * n) if causal else 1.0


def logits(n: int, head_dim: int, causal: bool = False) -> float:
    """L = Q Kᵀ: 2 · c · n · d per token and head."""
    return 2 * visible_share(n, causal) * n * head_dim


def softmax(n: int, causal: bool = False) -> float:
    """5 · c · n: maximum and its subtraction (2), exponentiation, summation, division."""
    return 5 * visible_share(n, causal) * n


def sigmoid(n: int, causal: bool = False) -> float:
    """5 · c · n: bias, sign, exponentiation, addition, division."""
    return 5 * visible_share(n, causal) * n


def values(n: int, head_dim: int, causal: bool = False) -> float:
    """P V, which the table leaves out: 2 · c · n · d per token and head."""
    return 2 * visible_share(n, causal) * n * head_dim
