"""Fit of a layer's bias to -log of the softmax denominators, by least squares per head from running moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sigattn.convert.attention_call import Attend, AttentionCall, ConversionError
from sigattn.convert.row_statistics import RowStatistics, row_statistics
from sigattn.nn.fitted_bias import VisibleKeysLinearBias

_PRIOR = 1e-6  # weight of a slope of -1, which decides where every row sees the same number of keys


class VisibleKeysFit:
    """Least-squares fit of c + a · log(visible keys) to -lse, for each head of one layer.

    Args:
        num_heads: number of query heads.
    """

    def __init__(self, num_heads: int) -> None:
        self.products: Tensor = torch.zeros(num_heads, 2, 2, dtype=torch.float64)  # Σ x xᵀ, x = (1, log visible)
        self.targets: Tensor = torch.zeros(num_heads, 2, dtype=torch.float64)  # Σ x (-lse + log visible)

    def update(self, rows: RowStatistics) -> None:
        """Add the rows of a call."""
        log_visible = rows.visible.log().double().cpu()  # (B, Hq, N)
        weight = rows.counted.double().cpu()
        target = torch.where(rows.counted, -rows.lse, 0).double().cpu() + log_visible * weight
        x = torch.stack([torch.ones_like(log_visible), log_visible], -1) * weight.unsqueeze(-1)
        self.products += torch.einsum("bhnf,bhng->hfg", x, x)
        self.targets += torch.einsum("bhnf,bhn->hf", x, target)

    def solve(self) -> VisibleKeysLinearBias:
        """Return the fitted bias."""
        bias = VisibleKeysLinearBias(len(self.targets))
        count = self.products[:, :1, :1].clamp(min=1)
        prior = torch.diag(torch.tensor([0.0, _PRIOR], dtype=torch.float64))
        solution = torch.linalg.solve(self.products / count + prior, self.targets / count[..., 0])
        with torch.no_grad():
            bias.constant.copy_(solution[:, 0])
            bias.slope.copy_(solution[:, 1] - 1)
        return bias


def fit_biases(run: Callable[[Attend], object], names: Sequence[str]) -> dict[str, VisibleKeysLinearBias]:
    """Fit a bias for each layer.

    Args:
        run: runs the model on the batches of the fit, with a function that answers its attention calls.
        names: names of the layers.

    Raises:
        ConversionError: naming a layer that these batches do not reach, or whose logits are not finite.
    """
    fits: dict[str, VisibleKeysFit] = {}

    def observe(call: AttentionCall) -> object:
        rows = row_statistics(call.problem)
        check_finite(call.name, rows)
        fits.setdefault(call.name, VisibleKeysFit(rows.lse.shape[1])).update(rows)
        return call.softmax()

    run(observe)
    if missing := [name for name in names if name not in fits]:
        raise ConversionError(
            f"convert: the batches do not reach the attention of {', '.join(map(repr, missing))}: pass batches that "
            "run every layer"
        )
    return {name: fits[name].solve() for name in names}


def check_finite(name: str, rows: RowStatistics) -> None:
    """Raise ConversionError if the denominator of a row that counts is not finite."""
    if not (rows.lse.isfinite() | ~rows.counted).all():
        raise ConversionError(f"convert: the attention logits of {name!r} are not finite: check weights and batches")
