"""Options shared by the functions of ``sigattn.flash``: validation, and conversion for the operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.ops import validation


class Options(NamedTuple):
    """Options of a call, as they were passed."""

    dropout_p: Any
    softmax_scale: Any
    causal: bool
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: bool
    sigmoid_bias: Any
    sigmoid_precision: str | None
    backend: str | None

    def checked(
        self, caller: str, q: Tensor, batch: int, backends: Iterable[str], queries: int | None = None
    ) -> dict[str, Any]:
        """Return the options as arguments of ``ops.problem.make_problem``; raise unless they fit q.

        batch: number of samples or sequences. queries: number of entries of a bias along queries; None if it has none.
        """
        if isinstance(self.dropout_p, bool) or isinstance(self.softmax_scale, bool):
            raise TypeError(
                f"{caller}: dropout_p and softmax_scale must be numbers, got {self.dropout_p!r} and "
                f"{self.softmax_scale!r}; flash-attn 3's order (q, k, v, softmax_scale, causal, …) is that of "
                "sigattn.flash.v3"
            )
        dropout_p, scale, window, softcap = validation.numbers(
            caller,
            self.dropout_p,
            self.softmax_scale,
            self.window_size,
            self.softcap,
            scale_name="softmax_scale",
            window_name="window_size",
        )
        validation.flag(caller, "causal", self.causal)
        validation.flag(caller, "deterministic", self.deterministic)
        validation.choice(caller, "backend", self.backend, tuple(backends))
        if self.alibi_slopes is not None:
            validation.slopes(caller, self.alibi_slopes, q, batch, q.shape[-2], two_sided=False, query_name="q")
        if self.sigmoid_bias is not None:
            flash_validation.bias(caller, self.sigmoid_bias, q, batch, queries)
        return {
            "dropout_p": dropout_p,
            "scale": scale,
            "is_causal": self.causal,
            "window": window,
            "softcap": softcap,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
            "bias": None if self.sigmoid_bias is None else operator_bias(self.sigmoid_bias),
            "precision": self.sigmoid_precision,
        }


def refuse(caller: str, return_attn_probs: bool) -> None:
    """Raise ValueError if the weights or their row sums are requested."""
    if return_attn_probs:
        raise ValueError(
            f"{caller}: return_attn_probs=True is not supported: a sigmoid has no log-sum-exp, and the weights are "
            "never stored; see sigattn.attention_statistics"
        )


def operator_bias(bias: float | Tensor) -> float | Tensor:
    """Return the bias as the operators take it: a number, or (B or 1, Hq or 1, N or 1, 1)."""
    if not isinstance(bias, Tensor):
        return bias
    shapes = {0: (1, 1, 1, 1), 1: (-1, 1, 1, 1), 2: (*bias.shape, 1, 1), 3: (*bias.shape, 1)}
    return bias.reshape(shapes[bias.dim()])
