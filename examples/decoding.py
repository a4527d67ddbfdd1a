"""Decode token by token with a cache, and compare with attention over the whole sequence."""

import math

import torch

from sigattn import sigmoid_attention, sigmoid_kvcache_attention


def main():
    """Decode a random sequence and print the largest difference."""
    torch.manual_seed(0)
    batch, heads, key_heads, width, length = 2, 8, 2, 64, 48
    query = torch.randn(batch, length, heads, width)
    key, value = torch.randn(2, batch, length, key_heads, width)
    # the bias must not change from token to token: it is that of the length that the model was trained with
    bias = -math.log(length)
    caches = torch.zeros(2, batch, 64, key_heads, width)
    steps = []
    for i in range(length):
        now = slice(i, i + 1)
        cached = torch.full((batch,), i, dtype=torch.int32)  # tokens in the cache before this one
        steps.append(
            sigmoid_kvcache_attention(
                query[:, now], *caches, key[:, now], value[:, now],
                bias=bias, cache_seqlens=cached, is_causal=True, enable_gqa=True,
            )
        )  # fmt: skip
    decoded = torch.cat(steps, 1)  # (batch, length, heads, width)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    whole = sigmoid_attention(q, k, v, is_causal=True, bias=bias, enable_gqa=True).transpose(1, 2)
    difference = (decoded - whole).abs().max().item()
    print(f"{length} tokens decoded one by one: largest difference from the whole sequence {difference:.1e}")
    assert difference < 1e-5


if __name__ == "__main__":
    main()
