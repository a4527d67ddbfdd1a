"""Learn the bias of each head: fit sigmoid attention to the output of attention with other biases."""

import argparse
import math

import torch

from sigattn import sigmoid_attention


def main():
    """Fit the biases by gradient descent, and print them on the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    heads, length, width = 4, 128, 32
    query, key, value = torch.randn(3, 2, heads, length, width)
    wanted = torch.tensor([-6.0, -5.0, -4.0, -3.0]).view(heads, 1, 1)  # one bias for each head
    target = sigmoid_attention(query, key, value, is_causal=True, bias=wanted)
    bias = torch.nn.Parameter(torch.full((heads, 1, 1), -math.log(length)))
    optimizer = torch.optim.Adam([bias], lr=0.05)
    for step in range(options.steps + 1):
        out = sigmoid_attention(query, key, value, is_causal=True, bias=bias)
        loss = (out - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: error {loss.item():.2e}, biases {[round(b, 2) for b in bias.flatten().tolist()]}")
    return bias.detach().flatten()


if __name__ == "__main__":
    main()
