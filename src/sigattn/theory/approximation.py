"""Theorem 3.1 by construction: sigmoid-attention and feed-forward layers that approximate a given function.

The function maps n tokens of d numbers in [0, 1] to n tokens of d numbers, continuous and permutation-equivariant. The
network has layers of attention with 4 heads of size 1 and feed-forward layers of width 4, as in the theorem, each with
a residual connection, in three parts (App. B):

1. quantisation: feed-forward layers, one for each coordinate and grid line, move each number down to its grid line;
2. contextual mapping: attention layers, one selective shift for each grid point and a global one, give each token a
   number that only this sequence gives and only this token of it (``contextual_mapping.py``);
3. value mapping: feed-forward layers, one for each of those numbers, put the function's value in the token's place.

Steps are σ(λ ·) with λ a parameter: as it grows, the network approaches the exact construction everywhere but on the
grid lines; as δ shrinks, the construction approaches the function. Numbers grow like c^(2n + 2), and float64 ends at
2^53.

What the paper leaves open is settled here. Grid points where tokens coincide are no input of the contextual mapping,
but have a share of about n² δ^d / 2 of the volume; they are sent through the layers and mapped as well. And a last pair
of layers for each coordinate bounds what lands between two numbers, near the grid lines, which would be huge.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sigattn.ops.attention import sigmoid_attention
from sigattn.theory.contextual_mapping import ContextualMapping

Target = Callable[[Tensor], Tensor]  # (..., n, d) → (..., n, d)


class FeedForward(nn.Module):
    """x + W₂ activation(W₁ x + b): width at most 4; each unit a step σ(λz) or a ramp z · σ(λz), smooth ReLU."""

    def __init__(self, w1: Tensor, bias: Tensor, w2: Tensor, ramps: Tensor, steepness: float) -> None:
        super().__init__()
        self.ramps: Tensor
        assert len(w1) <= 4, "the theorem's feed-forward layers have width 4"
        self.steepness = steepness
        self.w1, self.bias, self.w2 = (nn.Parameter(t, requires_grad=False) for t in (w1, bias, w2))
        self.register_buffer("ramps", ramps)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d)
        z = x @ self.w1.mT + self.bias
        step = torch.sigmoid(self.steepness * z)
        return x + torch.where(self.ramps, z * step, step) @ self.w2.mT


class Attention(nn.Module):
    """x + four heads of size 1 of sigmoid attention with shifts in query and key, summed into the first number."""

    def __init__(self, u: Tensor, query_shifts: Tensor, key_shifts: Tensor, weights: Tensor, steepness: float) -> None:
        super().__init__()
        assert len(weights) <= 4, "the theorem's attention has four heads"
        self.steepness = steepness
        given = (u, query_shifts, key_shifts, weights)
        self.u, self.query_shifts, self.key_shifts, self.weights = (nn.Parameter(t, requires_grad=False) for t in given)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d)
        heads = len(self.weights)
        index = (x @ self.u)[:, None, :, None].expand(-1, heads, -1, 1)  # (B, heads, n, 1)
        query = index - self.query_shifts[:, None, None]
        key = index - self.key_shifts[:, None, None]
        sums = sigmoid_attention(query, key, index, scale=self.steepness, bias=0.0)  # (B, heads, n, 1)
        update = (sums[..., 0] * self.weights[:, None]).sum(1)  # (B, n)
        return torch.cat([(x[..., 0] + update).unsqueeze(-1), x[..., 1:]], -1)


class UniversalApproximator(nn.Module):
    """The network for a target.

    Args:
        target: (..., n, d) → (..., n, d), continuous and equivariant under permutations of the tokens; called with
            float64 tensors.
        d, n: numbers of a token, tokens. inverse_delta: 1/δ.
        steepness: λ, per grid cell: a step is a few 1/λ wide. It must grow with 1/δ.
        largest_grid: refuse more grid points δ^(-dn) than this, each of which takes n layers.

    Raises:
        ValueError: if the target is not permutation-equivariant (tested on samples), gives another shape, the grid is
            too large, or the numbers would exceed what float64 holds exactly (2^53).

    >>> net = UniversalApproximator(lambda x: x.mean(-2, keepdim=True).expand_as(x), d=1, n=2, inverse_delta=4)
    >>> net(torch.tensor([[[0.1], [0.9]]], dtype=torch.float64)).shape
    torch.Size([1, 2, 1])
    """

    def __init__(
        self,
        target: Target,
        d: int,
        n: int,
        inverse_delta: int,
        steepness: float = 1e8,
        largest_grid: int = 5000,
    ) -> None:
        super().__init__()
        self.mapping = ContextualMapping(d=d, n=n, inverse_delta=inverse_delta)
        self.target, self.steepness = target, steepness
        points = self.mapping.grid**n
        if points > largest_grid:
            raise ValueError(
                f"UniversalApproximator: 1/δ = {inverse_delta} has {points:,} grid points for {n} tokens of {d} "
                f"numbers; the limit is {largest_grid:,}"
            )
        _check_target(target, d, n)
        self.bound = 1.0
        numbers = self._numbers()
        self.largest = max(numbers)
        if self.largest >= 2**53:
            raise ValueError(
                f"UniversalApproximator: the contextual mapping reaches {self.largest:.3g} units, and float64 holds "
                f"integers to 2^53 = {2**53:.3g} only: take fewer tokens or a coarser grid"
            )
        self.layers = nn.Sequential(*self._quantise(), *self._contextualise(), *self._map(numbers), *self._clamp())

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d) in [0, 1] → (B, n, d)
        """The network's output; inside, numbers are counted in units of δ."""
        out: Tensor = self.layers(x.double() * self.mapping.inverse_delta)
        return out / self.mapping.inverse_delta

    # -- the parts ----------------------------------------------------------------------------------------------------

    def _quantise(self) -> list[nn.Module]:
        """For coordinate a and line k: t ↦ k where k ≤ t < k + 1, by two ramps and a step."""
        d = self.mapping.d
        layers: list[nn.Module] = []
        for a in range(d):
            along = torch.zeros(d, dtype=torch.float64)
            along[a] = 1
            for k in range(self.mapping.inverse_delta):
                # -ramp(t - k) + ramp(t - k - 1) + step(t - k - 1): down to the line inside the cell, 0 elsewhere
                layers.append(
                    FeedForward(
                        along.repeat(3, 1),
                        torch.tensor([-k, -k - 1, -k - 1], dtype=torch.float64),
                        torch.stack([-along, along, along], 1),
                        torch.tensor([True, True, False]),
                        self.steepness,
                    )
                )
        return layers

    def _contextualise(self) -> list[nn.Module]:
        """The layers of ``ContextualMapping``. A b_q of 0 becomes -1/2: it sees the same, but no index lies on it."""
        m = self.mapping
        u = torch.tensor([float(m.inverse_delta**row) for row in range(m.d)], dtype=torch.float64)
        layers: list[nn.Module] = []
        for i in range(m.grid):
            low, high = i - 0.5, i + 0.5
            layers.append(
                Attention(
                    u,
                    torch.tensor([low, high, high, low], dtype=torch.float64),
                    torch.tensor([-0.5, -0.5, high, high], dtype=torch.float64),
                    torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64) * m.c,
                    self.steepness,
                )
            )
        shift = Attention(
            u,
            torch.tensor([-0.5], dtype=torch.float64),
            torch.tensor([m.c**m.n + 0.5], dtype=torch.float64),
            torch.tensor([float(m.c ** (m.n + 1))], dtype=torch.float64),
            self.steepness,
        )
        return [*layers, shift]

    def _numbers(self) -> dict[int, tuple[Tensor, Tensor]]:
        """For every number a token may end with: the token then, and the value it shall get, in units of δ."""
        m = self.mapping
        tokens = list(itertools.product(range(m.inverse_delta), repeat=m.d))
        tokens.sort(key=m.index)
        sequences = list(itertools.combinations_with_replacement(range(m.grid), m.n))
        sequences.sort(key=lambda s: len(set(s)) < m.n)  # tokens that differ come first, and are not overruled
        result: dict[int, tuple[Tensor, Tensor]] = {}
        for indices in sequences:
            x = torch.tensor([tokens[i] for i in indices], dtype=torch.float64)  # (n, d)
            value = self.target((x + 0.5) / m.inverse_delta) * m.inverse_delta  # of the cells' centres
            final = list(indices)
            for i in range(m.grid):
                final = m.selective_shift(final, i)
            final = m.global_shift(final)
            for before, number, token, wanted in zip(indices, final, x, value, strict=True):
                shifted = token.clone()
                shifted[0] += number - before
                result.setdefault(number, (shifted, wanted))
            self.bound = max(self.bound, (value / m.inverse_delta).abs().max().item())
        return result

    def _map(self, numbers: dict[int, tuple[Tensor, Tensor]]) -> list[nn.Module]:
        """For each number a bump of two steps, whose height replaces the token by its value.

        Values go below 0 first, where there are no numbers, and come back together: so none is met by another's bump.
        """
        m = self.mapping
        u = torch.tensor([float(m.inverse_delta**row) for row in range(m.d)], dtype=torch.float64)
        away = torch.zeros(m.d, dtype=torch.float64)
        away[0] = 4 * self.bound * m.inverse_delta * m.grid
        layers: list[nn.Module] = []
        for number, (token, value) in numbers.items():
            value = value - away
            layers.append(
                FeedForward(
                    u.repeat(2, 1),
                    torch.tensor([-(number - 0.5), -(number + 0.5)], dtype=torch.float64),
                    torch.stack([value - token, token - value], 1),
                    torch.tensor([False, False]),
                    self.steepness,
                )
            )
        always = torch.tensor([1e3], dtype=torch.float64)
        back = FeedForward(torch.zeros_like(away[None]), always, away[:, None], torch.tensor([False]), self.steepness)
        return [*layers, back]

    def _clamp(self) -> list[nn.Module]:
        """min(t, B) and max(t, -B) for each coordinate, by a ramp each; B is beyond every value."""
        d = self.mapping.d
        layers: list[nn.Module] = []
        limit = 1.01 * self.bound * self.mapping.inverse_delta
        for a in range(d):
            along = torch.zeros(d, dtype=torch.float64)
            along[a] = 1
            for sign in (1.0, -1.0):
                layers.append(
                    FeedForward(
                        sign * along[None],
                        torch.tensor([-limit], dtype=torch.float64),
                        -sign * along[:, None],
                        torch.tensor([True]),
                        self.steepness,
                    )
                )
        return layers

    def error(self, samples: int = 2000, p: float = 2.0, seed: int = 0) -> float:
        """(∫ ‖f - g‖_p^p dX)^(1/p) over [0, 1]^(n × d), by Monte Carlo."""
        m = self.mapping
        x = torch.rand(samples, m.n, m.d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            difference = (self(x) - self.target(x)).abs()
        return float(difference.pow(p).sum((1, 2)).mean() ** (1 / p))


def _check_target(target: Target, d: int, n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8, n, d, generator=generator, dtype=torch.float64)
    y = target(x)
    if y.shape != x.shape:
        raise ValueError(f"UniversalApproximator: the target must give {tuple(x.shape)} for that, got {tuple(y.shape)}")
    for _ in range(4):
        order = torch.randperm(n, generator=generator)
        if not torch.allclose(target(x[:, order]), y[:, order], atol=1e-9):
            raise ValueError(
                "UniversalApproximator: the target is not permutation-equivariant: permuting the tokens does not "
                f"merely permute its result (seen for the order {order.tolist()})"
            )


# Three targets of different kinds, for the experiments.
TARGETS: dict[str, Target] = {
    "mean of the tokens": lambda x: x.mean(-2, keepdim=True).expand_as(x),
    "each token's share": lambda x: x / (x.sum(-2, keepdim=True) + 0.5),
    "softmax attention": lambda x: torch.softmax(4 * x @ x.mT, -1) @ x,
    "wave": lambda x: 0.5 + 0.5 * torch.sin(3 * x * x.sum(-2, keepdim=True)),
}
