"""Programs of torch.export with symbolic batch and lengths, compared with eager calls at other sizes.

Calls of the same arguments are exported together, as one program.
"""

import torch
from torch import nn
from torch.export import Dim

from sigattn.nn import Attention

B, N, M = Dim("b"), Dim("n"), Dim("m")  # without bounds, so that a size that is fixed or compared raises
TRACED, OTHERS = (3, 11, 7), ((5, 29, 13), (2, 2, 3))  # n above and below m
ROWS, KEYS, BATCH = {0: B, 1: N}, {0: B, 1: M}, {0: B}
H, D, E = 4, 8, 32


class Program(nn.Module):
    """Calls with the same arguments, by name."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        for name, call in calls.items():  # parameters of modules that lambdas call are constants of the program
            if isinstance(call, nn.Module):
                self.add_module(name, call)

    def forward(self, *args):
        return {name: call(*args) for name, call in self.calls.items()}


def assert_exported(inputs, dims, *, strict=False, **calls):
    """Compare the exported calls with the eager ones; ``inputs`` returns the arguments for b, n, m."""
    program = Program(calls).eval()
    with torch.no_grad():
        exported = torch.export.export(program, inputs(*TRACED), dynamic_shapes=(dims,), strict=strict).module()
        for size in OTHERS:
            arguments = inputs(*size)
            results = [call(*(t.clone() for t in arguments)) for call in (program, exported)]
            for name in calls:
                expected, actual = (result[name] for result in results)
                torch.testing.assert_close(
                    actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
                )


def heads_first(b, n, heads=H):
    return torch.randn(b, heads, n, D)


def rows_first(b, n, heads=H):
    return torch.randn(b, n, heads, D)


def features(b, n):
    return torch.randn(b, n, E)


def lengths(b, n):
    return torch.arange(b) % n + 1


def padding(b, n):
    """True for padding; every sample has a key."""
    return torch.arange(n) > torch.arange(b)[:, None]


def starts(b, n):
    return torch.nn.functional.pad(lengths(b, n).cumsum(0), (1, 0)).int()


def packed(b, n):
    return torch.randn(int(starts(b, n)[-1]), H, D)


def causal_mask(n):
    return nn.Transformer.generate_square_subsequent_mask(n)


def attention(bias=-2.0, activation="sigmoid", **options):
    return Attention(E, H, activation=activation, attention_bias=bias, **options)
