"""Train a small GPT, in the style of nanoGPT, with one line of its attention changed.

    python examples/nanogpt.py                       # sigmoid attention whose weights sum to one: about two minutes
    python examples/nanogpt.py --attention sigmoid   # the paper's sigmoid attention
    python examples/nanogpt.py --attention softmax   # the line as it was

The text is Python's language reference, which CPython contains (or ``--text``), byte by byte.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

from sigattn import sigmoid_attention
from sigattn.data.text import load_text


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with QK-norm."""

    def __init__(self, width, heads, length, attention):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width // heads)
        self.heads, self.length, self.attention = heads, length, attention

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.norm(q), self.norm(k)
        if self.attention == "softmax":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.attention == "normalized":  # the line that changes
            y = sigmoid_attention(q, k, v, is_causal=True, normalize=True)
        else:  # the bias is that of the training length, also for shorter prompts
            y = sigmoid_attention(q, k, v, is_causal=True, bias=-math.log(self.length))
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, width, *rest):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), CausalSelfAttention(width, *rest)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Language model of bytes."""

    def __init__(self, layers, width, heads, length, attention):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, length, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main():
    """Train on a text, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=("sigmoid", "normalized", "softmax"), default="normalized")
    parser.add_argument("--text")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(load_text(options.text)), dtype=torch.uint8).long()
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    model = GPT(4, options.width, 4, options.length, options.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_on(part, batch):
        starts = torch.randint(len(part) - options.length - 1, (batch,))
        rows = torch.stack([part[i : i + options.length + 1] for i in starts])
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    for step in range(options.steps):
        loss = loss_on(train, 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits per byte", flush=True)
    with torch.no_grad():
        print(f"held out: {loss_on(held_out, 64).item() / math.log(2):.3f} bits per byte")


if __name__ == "__main__":
    main()
