"""Fit of a layer's bias to -log of the softmax denominators, by least squares per head from running moments.

The bias is ``MARGIN`` below -lse, and the output is multiplied by e^MARGIN (``output_scale.py``): a softmax weight p
then becomes p / (1 + p e^-MARGIN), which is nearly p where single keys dominate, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sigattn.conversion.report import ConversionError
from sigattn.conversion.row_statistics import RowStatistics, row_statistics
from sigattn.nn.bias import AttentionBias
from sigattn.nn.fitted_bias import MAX_DIRECTIONS, QuadraticBias, VisibleKeysLinearBias
from sigattn.nn.observer import Attend, AttentionCall
from sigattn.ops.autocast import without_autocast
from sigattn.ops.problem import Problem

MARGIN = 2.0  # without one p = 1 becomes 0.5, with 2 it becomes 0.88; beyond 2 losses hardly fall (docs/log.md)
_PRIOR = 1e-6  # weight of a slope of -1, which decides where every row sees the same number of keys
_RIDGE = 1e-3  # of the mean square of a feature of the query, at least 1
_PRIOR_ROWS = 10.0  # weight, in rows, of coefficients of 0
_LIMIT = 5.0  # standard deviations of the query's term from its mean
_ROWS = 4096  # of which features are computed at once


class QueryFeatures:
    """Features of the queries of one layer, in which a quadratic function of a query is linear.

    They are the query and the products of pairs of its components in the directions in which its logits vary most: the
    leading eigenvectors of the keys' covariance, in the metric of the queries' second moments. 8 directions give 36
    pairs.

    Args:
        problem: a call of the layer, whose queries and keys give the directions.
    """

    def __init__(self, problem: Problem) -> None:
        # rows of padding need not be finite
        query, key = (_by_head(t).nan_to_num(0, 0, 0) for t in (problem.query, problem.key))
        num_heads, _, dim = query.shape
        moments = (query.mT @ query / query.shape[1]).double().cpu()
        mean_square = moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        identity = torch.eye(dim, dtype=torch.float64, device="cpu")
        moments = moments + (1e-3 * mean_square + torch.finfo(torch.float32).tiny) * identity
        key = key - key.mean(1, keepdim=True)
        covariance = (key.mT @ key / key.shape[1]).double().cpu().repeat_interleave(num_heads // len(key), 0)
        values, vectors = torch.linalg.eigh(moments)
        root, inverse = (vectors * values.pow(p)[:, None] @ vectors.mT for p in (0.5, -0.5))
        directions = torch.linalg.eigh(root @ covariance @ root).eigenvectors[..., -MAX_DIRECTIONS:]
        self.projection: Tensor = (inverse @ directions).float().to(problem.query.device)  # (Hq, D, k)
        self.scale: Tensor = moments.diagonal(dim1=1, dim2=2).rsqrt().float().to(problem.query.device)  # (Hq, D)
        k = self.projection.shape[2]
        self.pairs: Tensor = torch.triu_indices(k, k, device=problem.query.device)
        self.count: int = dim + self.pairs.shape[1]

    def __call__(self, query: Tensor, head: int) -> Tensor:
        """Return the features of queries of a head, (rows, D) → (rows, count)."""
        z = query @ self.projection[head]
        i, j = self.pairs
        return torch.cat([query * self.scale[head], z[:, i] * z[:, j]], 1)

    def coefficients(self, solution: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return w (Hq, D), directions u (Hq, D, k) of length 1 and their λ (Hq, k), of the term w·q + Σ λ (u·q)².

        Args:
            solution: coefficients of the features, (Hq, count).
        """
        dim, k = self.projection.shape[1:]
        i, j = self.pairs.cpu()
        form = solution.new_zeros(len(solution), k, k)
        form[:, i, j] = solution[:, dim:]
        values, vectors = torch.linalg.eigh((form + form.mT) / 2)
        directions = self.projection.double().cpu() @ vectors
        norm = directions.norm(dim=1)
        return solution[:, :dim] * self.scale.double().cpu(), directions / norm.unsqueeze(1), values * norm.square()


class BiasFit:
    """Least-squares fit of the bias to -lse, for each head of one layer.

    Args:
        problem: a call of the layer.
    """

    def __init__(self, problem: Problem) -> None:
        self.num_heads: int = problem.query.shape[1]
        self.query_dim: int = problem.query.shape[3]
        self.head_dim: int = problem.value.shape[3]
        self.features: QueryFeatures = QueryFeatures(problem)
        self.device: torch.device = problem.query.device
        size = 2 + self.features.count
        options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        self.products: Tensor = torch.zeros(self.num_heads, size, size, **options)  # Σ x xᵀ
        self.targets: Tensor = torch.zeros(self.num_heads, size, **options)  # Σ x (-lse + log visible)

    def check_sizes(self, call: AttentionCall) -> None:
        """Raise ConversionError if a call has other heads or features than the first, because a bias has one size."""
        sizes = call.problem.query.shape[1], call.problem.query.shape[3], call.problem.value.shape[3]
        if sizes != (first := (self.num_heads, self.query_dim, self.head_dim)):
            raise ConversionError(
                f"convert: {call.name!r} calls attention with (heads, features of a query, of a value) {first} and "
                f"{sizes}, so that no bias for each head fits it"
            )

    def update(self, query: Tensor, rows: RowStatistics) -> None:
        """Add the rows of a call, with queries (B, Hq, N, D). x is 1, log visible, and the features of the query."""
        log_visible = rows.visible.log()
        target = torch.where(rows.counted, log_visible - rows.lse, 0)
        query = query.masked_fill(~rows.counted.unsqueeze(-1), 0)
        by_head = map(_by_head, (query, log_visible, target, rows.counted))
        for head, (q, log_n, y, counted) in enumerate(zip(*by_head, strict=True)):
            for part in zip(*(t.split(_ROWS) for t in (q, log_n, y, counted)), strict=True):
                q_part, log_n_part, y_part, counted_part = part
                x = torch.stack([torch.ones_like(log_n_part), log_n_part], 1)
                x = torch.cat([x, self.features(q_part, head)], 1) * counted_part.unsqueeze(1)
                first = (x[:, :2].double().mT @ x.double()).cpu()  # 1 and log visible may be nearly collinear
                products = (x.mT @ x).double().cpu()
                products[:2], products[:, :2] = first, first.mT
                self.products[head] += products
                self.targets[head] += (x.double().mT @ y_part.double()).cpu()

    def solve_visible(self) -> VisibleKeysLinearBias:
        """Return the fitted bias that depends on the number of visible keys only, without a margin."""
        bias = VisibleKeysLinearBias(self.num_heads).float()
        solution, _ = self._solution(slice(2))
        with torch.no_grad():
            bias.constant.copy_(solution[:, 0])
            bias.slope.copy_(solution[:, 1] - 1)
        return bias.to(self.device)

    def solve(self, *, with_query: bool) -> QuadraticBias:
        """Return the fitted bias, the margin subtracted, with a term of 0 in the query unless ``with_query``."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # initial directions are random, replaced below
            bias = QuadraticBias(self.num_heads, self.head_dim, self.query_dim).float()
        solution, products = self._solution(slice(None if with_query else 2))
        with torch.no_grad():
            bias.constant.copy_(solution[:, 0] - MARGIN)
            bias.slope.copy_(solution[:, 1] - 1)
            query_solution = solution[:, 2:] if with_query else solution.new_zeros(self.num_heads, self.features.count)
            linear, directions, curvature = self.features.coefficients(query_solution)
            bias.query_term.linear.copy_(linear.flatten())
            bias.query_term.directions.copy_(directions.flatten())
            bias.query_term.curvature.copy_(curvature.flatten())
            if with_query:
                self._set_limits(bias, solution[:, 2:], products)
        return bias.to(self.device)

    def _solution(self, used: slice) -> tuple[Tensor, Tensor]:
        """Return the coefficients of some features, (Hq, used), and the means of their products, (Hq, used, used)."""
        count = self.products[:, :1, :1].clamp(min=1)
        products, targets = self.products[:, used, used] / count, self.targets[:, used] / count[..., 0]
        # features have a mean square of about 1; what is far less is rounding, in a direction that queries do not take
        strength = (_RIDGE + _PRIOR_ROWS / count[:, :, 0]) * products.diagonal(dim1=1, dim2=2).clamp(min=1)
        strength[:, :2] = torch.tensor([_PRIOR**2, _PRIOR], dtype=torch.float64, device="cpu")
        root = torch.linalg.cholesky(products + torch.diag_embed(strength))
        return torch.cholesky_solve(targets.unsqueeze(-1), root).squeeze(-1), products

    def _set_limits(self, bias: QuadraticBias, solution: Tensor, products: Tensor) -> None:
        """Set the limits of the query's term from its mean and variance over the rows."""
        mean = (products[:, 0, 2:] * solution).sum(-1)
        square = torch.einsum("hf,hfg,hg->h", solution, products[:, 2:, 2:], solution)
        spread = _LIMIT * (square - mean.square()).clamp(min=0).sqrt()
        bias.query_term.lower.copy_(mean - spread)
        bias.query_term.upper.copy_(mean + spread)


def _by_head(x: Tensor) -> Tensor:
    """Return the rows of each head, (B, H, N, …) → (H, B · N, …), in float32."""
    return x.detach().float().transpose(0, 1).flatten(1, 2)


def fit_biases(
    run: Callable[[Attend], object], names: Sequence[str], kind: type[AttentionBias] = QuadraticBias
) -> dict[str, list[Any]]:
    """Fit biases of a class for each layer; of ``QuadraticBias``, one without and one with the term in the query.

    Args:
        run: runs the model on the batches of the fit, with a function that answers its attention calls.
        names: names of the layers.
        kind: ``QuadraticBias`` or ``VisibleKeysLinearBias``.

    Raises:
        ConversionError: naming a layer that these batches do not reach, or whose logits are not finite.
    """
    fits: dict[str, BiasFit] = {}

    def observe(call: AttentionCall) -> object:
        with without_autocast(call.problem.query.device.type):
            rows = row_statistics(call.problem)
            check_finite(call.name, rows)
            if call.name not in fits:
                fits[call.name] = BiasFit(call.problem)
            fits[call.name].check_sizes(call)
            fits[call.name].update(call.problem.query, rows)
        return call.softmax()

    run(observe)
    if missing := [name for name in names if name not in fits]:
        raise ConversionError(
            f"convert: the batches do not reach the attention of {', '.join(map(repr, missing))}: pass batches that "
            "run every layer"
        )
    if kind is VisibleKeysLinearBias:
        return {name: [fits[name].solve_visible()] for name in names}
    return {name: [fits[name].solve(with_query=q) for q in (False, True)] for name in names}


def check_finite(name: str, rows: RowStatistics) -> None:
    """Raise ConversionError if the denominator of a row that counts is not finite."""
    if not (rows.lse.isfinite() | ~rows.counted).all():
        raise ConversionError(f"convert: the attention logits of {name!r} are not finite: check weights and batches")
