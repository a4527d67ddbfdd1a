"""Process-wide setting of the precision of σ."""

from __future__ import annotations

from sigattn.ops import validation

PRECISIONS = ("accurate", "fast")

_precision = "accurate"


def set_sigmoid_precision(precision: str) -> None:
    """Set the precision of the sigmoid in this process, for calls that do not specify it themselves.

    Args:
        precision: "accurate" (the default): the error of every weight P is small relative to P, at any length. "fast"
            allows an error that is small relative to 1 only: on NVIDIA GPUs the hardware's tanh replaces ex2 and a
            polynomial, as in the paper's kernel (App. F). With b = -log n the relative error of a typical weight 1/n
            then grows with n (measured in docs/operator.md). It has no effect on devices without a faster form.

    Raises:
        ValueError: if it is neither.

    >>> set_sigmoid_precision("accurate")
    """
    global _precision
    validation.choice("set_sigmoid_precision", "precision", precision, PRECISIONS, optional=False)
    _precision = precision


def get_sigmoid_precision() -> str:
    """Return the current setting of ``set_sigmoid_precision``: "accurate" or "fast"."""
    return _precision


def is_fast(precision: str | None) -> bool:
    """Return True if a call with this precision may use the fast form; None uses the process-wide setting."""
    if precision is None:
        return _precision == "fast"
    validation.choice("sigattn", "sigmoid precision", precision, PRECISIONS)
    return precision == "fast"
