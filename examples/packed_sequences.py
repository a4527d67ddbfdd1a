"""Attend within each of several sequences that are packed into one, without padding, and compare with each alone."""

import torch

from sigattn import sigmoid_attention, sigmoid_varlen_attention


def main():
    """Compare packed attention with that of each sequence."""
    torch.manual_seed(0)
    lengths = torch.tensor([30, 7, 100, 64])
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)  # (5,)
    heads, key_heads, width = 8, 2, 64  # grouped queries: four query heads share a key head
    query = torch.randn(int(lengths.sum()), heads, width, requires_grad=True)
    key, value = torch.randn(2, int(lengths.sum()), key_heads, width)
    longest = int(lengths.max())
    # the bias of each sequence is -log of its own length, unless one is passed
    out = sigmoid_varlen_attention(
        query, key, value, starts, starts, longest, longest, is_causal=True, enable_gqa=True
    )  # (total, heads, width)
    out.sum().backward()
    for i, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        q, k, v = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))  # (1, heads, length, width)
        alone = sigmoid_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        difference = (alone - out[start:stop]).abs().max().item()
        print(f"sequence {i} of {stop - start} tokens: largest difference from attention alone {difference:.1e}")
        assert difference < 1e-5


if __name__ == "__main__":
    main()
