"""Process-wide setting of the precision of σ."""

from __future__ import annotations

from sigattn.ops import validation

PRECISIONS = ("accurate", "fast")

current_precision = "accurate"


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
    global current_precision
    validation.choice("set_sigmoid_precision", "precision", precision, PRECISIONS, optional=False)
    current_precision = precision


def get_sigmoid_precision() -> str:
    """Return the current setting of ``set_sigmoid_precision``: "accurate" or "fast"."""
    return current_precision


def checked_precision(precision: str) -> str:
    """Return the precision of a call; raise ValueError if it is not one of ``PRECISIONS``."""
    validation.choice("sigattn", "sigmoid precision", precision, PRECISIONS, optional=False)
    return precision
