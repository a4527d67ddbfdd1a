"""Theorem 3.1 by construction: sigmoid-attention and feed-forward layers that approximate a given function.

The function maps n tokens of d numbers in [0, 1] to n tokens of d numbers; it is continuous and
permutation-equivariant. As in the theorem, attention layers have 4 heads of size 1 and feed-forward layers have width
4, each with a residual connection. The network has three parts (App. C):

1. quantisation: feed-forward layers, one for each coordinate and grid line, round each number down to its grid line;
2. contextual mapping: attention layers, one selective shift for each grid point and a global shift, give each token a
   number that no other token of the sequence and no other sequence yields (``sigattn.theory.ContextualMapping``);
3. value mapping: feed-forward layers, one for each of those numbers, replace the token by the function's value.

Steps are σ(λ ·) with λ a parameter: as λ grows, the network approaches the exact construction everywhere except on the
grid lines; as δ shrinks, the construction approaches the function. Numbers grow like c^(2n + 2), and float64 holds
integers exactly up to 2^53.

The construction adds two details that the paper leaves open. Grid points with equal tokens are not an input of the
contextual mapping, but cover about n² δ^d / 2 of the volume; they pass through the layers and are mapped as well. And
a last pair of layers for each coordinate clamps the output, because tokens near the grid lines end between two of the
numbers and would otherwise get huge values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sigattn import sigmoid_attention
from sigattn.theory import ContextualMapping

_double = functools.partial(torch.tensor, dtype=torch.float64)


def _constant(values: Tensor | Sequence[float]) -> nn.Parameter:
    """Return values as a parameter in float64 that is not trained."""
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float64), requires_grad=False)


Target = Callable[[Tensor], Tensor]  # (..., n, d) → (..., n, d)


class FeedForward(nn.Module):
    """Residual feed-forward layer x + W₂ activation(W₁ x + b) of width at most 4, (B, n, d) → (B, n, d).

    Each hidden unit is a step σ(λz) or, where ``ramps`` is true, a ramp z · σ(λz), a smooth ReLU.
    """

    def __init__(self, steepness: float, w1: Tensor, bias: Sequence[float], w2: Tensor, ramps: Sequence[bool]) -> None:
        super().__init__()
        self.ramps: Tensor
        assert len(w1) <= 4, "the theorem's feed-forward layers have width 4"
        self.steepness = steepness
        self.w1: nn.Parameter = _constant(w1)
        self.bias: nn.Parameter = _constant(bias)
        self.w2: nn.Parameter = _constant(w2)
        self.register_buffer("ramps", torch.tensor(ramps))

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d)
        z = x @ self.w1.mT + self.bias
        step = torch.sigmoid(self.steepness * z)
        return x + torch.where(self.ramps, z * step, step) @ self.w2.mT


class Attention(nn.Module):
    """Residual sigmoid attention with at most 4 heads of size 1, (B, n, d) → (B, n, d).

    Query and key of a head are uᵀx minus a shift, its value is uᵀx; the weighted sum of the heads is added to the
    first number of each token.
    """

    def __init__(
        self,
        steepness: float,
        u: Tensor,
        query_shifts: Sequence[float],
        key_shifts: Sequence[float],
        weights: Sequence[float],
    ) -> None:
        super().__init__()
        assert len(weights) <= 4, "the theorem's attention has four heads"
        self.steepness = steepness
        self.u: nn.Parameter = _constant(u)
        self.query_shifts: nn.Parameter = _constant(query_shifts)
        self.key_shifts: nn.Parameter = _constant(key_shifts)
        self.weights: nn.Parameter = _constant(weights)

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d)
        heads = len(self.weights)
        index = (x @ self.u)[:, None, :, None].expand(-1, heads, -1, 1)  # (B, heads, n, 1)
        query = index - self.query_shifts[:, None, None]
        key = index - self.key_shifts[:, None, None]
        sums = sigmoid_attention(query, key, index, scale=self.steepness, bias=0.0)  # (B, heads, n, 1)
        update = (sums[..., 0] * self.weights[:, None]).sum(1)  # (B, n)
        return torch.cat([(x[..., 0] + update).unsqueeze(-1), x[..., 1:]], -1)


class UniversalApproximator(nn.Module):
    """Network of Theorem 3.1 that approximates a target function, (B, n, d) in [0, 1] → (B, n, d).

    Args:
        target: (..., n, d) → (..., n, d), continuous and equivariant under permutations of the tokens; called with
            float64 tensors.
        d: numbers per token.
        n: tokens per sequence.
        inverse_delta: 1/δ.
        steepness: λ, in units of 1 / grid cell: a step is a few 1/λ cells wide. It must grow with 1/δ.
        largest_grid: largest number of grid points δ^(-dn); each takes n layers.

    Raises:
        ValueError: if the target is not permutation-equivariant (tested on samples) or changes the shape, the grid is
            too large, or the numbers exceed the integers that float64 holds exactly (2^53).

    >>> net = UniversalApproximator(lambda x: x.mean(-2, keepdim=True).expand_as(x), d=1, n=2, inverse_delta=4)
    >>> net(_double([[[0.1], [0.9]]])).shape
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
        self.mapping: ContextualMapping = ContextualMapping(d=d, n=n, inverse_delta=inverse_delta)
        self.target = target
        self.steepness = steepness
        points = self.mapping.grid**n
        if points > largest_grid:
            raise ValueError(
                f"UniversalApproximator: 1/δ = {inverse_delta} has {points:,} grid points for {n} tokens of {d} "
                f"numbers; the limit is {largest_grid:,}: reduce inverse_delta or raise largest_grid"
            )
        _check_target(target, d, n)
        self.bound: float = 1.0
        numbers = self._numbers()
        self.largest: int = max(numbers)
        if self.largest >= 2**53:
            raise ValueError(
                f"UniversalApproximator: the contextual mapping reaches {self.largest:.3g} units, and float64 holds "
                f"integers exactly up to 2^53 = {2**53:.3g}: reduce n or inverse_delta"
            )
        self.layers: nn.Sequential = nn.Sequential(
            *self._quantise(), *self._contextualise(), *self._map(numbers), *self._clamp()
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, n, d) in [0, 1] → (B, n, d)
        """Return the approximation of target(x). The layers count in units of δ."""
        out: Tensor = self.layers(x.double() * self.mapping.inverse_delta)
        return out / self.mapping.inverse_delta

    # -- the parts ----------------------------------------------------------------------------------------------------

    def _quantise(self) -> list[nn.Module]:
        """Return the layers that round down: for each coordinate and line k, t ↦ k if k ≤ t < k + 1."""
        layers: list[nn.Module] = []
        for along in torch.eye(self.mapping.d, dtype=torch.float64):
            for k in map(float, range(self.mapping.inverse_delta)):
                # -ramp(t - k) + ramp(t - k - 1) + step(t - k - 1) is k - t inside the cell and 0 elsewhere
                w1, w2 = along.repeat(3, 1), torch.stack([-along, along, along], 1)
                layers.append(FeedForward(self.steepness, w1, [-k, -k - 1.0, -k - 1.0], w2, [True, True, False]))
        return layers

    def _contextualise(self) -> list[nn.Module]:
        """Return the layers of ``ContextualMapping``.

        A bias of 0 becomes -1/2, which compares alike with every index, and no index is equal to it.
        """
        m, u = self.mapping, self._index_weights()
        layers: list[nn.Module] = []
        for i in range(m.grid):
            low, high = i - 0.5, i + 0.5
            query_shifts, key_shifts = [low, high, high, low], [-0.5, -0.5, high, high]
            weights = [0.5 * m.c, -0.5 * m.c, -0.5 * m.c, 0.5 * m.c]
            layers.append(Attention(self.steepness, u, query_shifts, key_shifts, weights))
        return [*layers, Attention(self.steepness, u, [-0.5], [m.c**m.n + 0.5], [float(m.c ** (m.n + 1))])]

    def _index_weights(self) -> Tensor:
        """Return u, whose product with a token is the token's index."""
        return _double([float(self.mapping.inverse_delta**row) for row in range(self.mapping.d)])

    def _numbers(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return, for every number that a token can end with, the token and its value, both in units of δ."""
        m = self.mapping
        tokens = list(itertools.product(range(m.inverse_delta), repeat=m.d))
        tokens.sort(key=m.index)
        sequences = list(itertools.combinations_with_replacement(range(m.grid), m.n))
        sequences.sort(key=lambda s: len(set(s)) < m.n)  # sequences of different tokens first, so that theirs are kept
        result: dict[int, tuple[Tensor, Tensor]] = {}
        for indices in sequences:
            x = _double([tokens[i] for i in indices])  # (n, d)
            value = self.target((x + 0.5) / m.inverse_delta) * m.inverse_delta  # at the centre of the cell
            final = m.global_shift(m.selective_shifts(indices))
            for before, number, token, token_value in zip(indices, final, x, value, strict=True):
                shifted = token.clone()
                shifted[0] += number - before
                result.setdefault(number, (shifted, token_value))
            self.bound = max(self.bound, (value / m.inverse_delta).abs().max().item())
        return result

    def _map(self, numbers: dict[int, tuple[Tensor, Tensor]]) -> list[nn.Module]:
        """Return, for each number, a layer with a bump of two steps that replaces the token by its value.

        Values are first moved below 0, where no bump lies, and a last layer moves all of them back, so that no bump
        applies to a value already mapped.
        """
        m, u = self.mapping, self._index_weights()
        away = torch.zeros(m.d, dtype=torch.float64)
        away[0] = 4 * self.bound * m.inverse_delta * m.grid
        layers: list[nn.Module] = []
        for number, (token, value) in numbers.items():
            change = value - away - token
            w2 = torch.stack([change, -change], 1)
            layers.append(FeedForward(self.steepness, u.repeat(2, 1), [0.5 - number, -0.5 - number], w2, [False] * 2))
        always = FeedForward(self.steepness, torch.zeros_like(away[None]), [1e3], away[:, None], [False])
        return [*layers, always]

    def _clamp(self) -> list[nn.Module]:
        """Return the layers min(t, B) and max(t, -B) for each coordinate; B exceeds every value of the target."""
        layers: list[nn.Module] = []
        limit = 1.01 * self.bound * self.mapping.inverse_delta
        for along in torch.eye(self.mapping.d, dtype=torch.float64):
            for sign in (1.0, -1.0):
                layers.append(FeedForward(self.steepness, sign * along[None], [-limit], -sign * along[:, None], [True]))
        return layers

    def error(self, samples: int = 2000, p: float = 2.0, seed: int = 0) -> float:
        """Return the Monte Carlo estimate of the L^p error (∫ ‖f - g‖_p^p dX)^(1/p) over [0, 1]^(n × d)."""
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
        raise ValueError(
            f"UniversalApproximator: the target must return the shape of its input, {tuple(x.shape)}, "
            f"got {tuple(y.shape)}"
        )
    for _ in range(4):
        order = torch.randperm(n, generator=generator)
        if not torch.allclose(target(x[:, order]), y[:, order], atol=1e-9):
            raise ValueError(
                "UniversalApproximator: the target is not permutation-equivariant: target(x[:, order]) differs from "
                f"target(x)[:, order] for order = {order.tolist()}"
            )


TARGETS: dict[str, Target] = {
    "mean of the tokens": lambda x: x.mean(-2, keepdim=True).expand_as(x),
    "each token's share": lambda x: x / (x.sum(-2, keepdim=True) + 0.5),
    "softmax attention": lambda x: torch.softmax(4 * x @ x.mT, -1) @ x,
    "wave": lambda x: 0.5 + 0.5 * torch.sin(3 * x * x.sum(-2, keepdim=True)),
}


def main() -> None:
    """Print the L² error of the networks for finer grids and steeper steps."""
    for name, target in TARGETS.items():
        errors = [f"{UniversalApproximator(target, 1, 2, size).error(500):.3f}" for size in (2, 4, 8)]
        print(f"{name}, 1/δ = 2, 4, 8: L² errors {', '.join(errors)}")
    target = TARGETS["softmax attention"]
    errors = [f"{UniversalApproximator(target, 1, 2, 8, 10.0**k).error(500):.3f}" for k in (2, 3, 4, 6)]
    print(f"softmax attention, 1/δ = 8, λ = 10², 10³, 10⁴, 10⁶: L² errors {', '.join(errors)}")


if __name__ == "__main__":
    main()
