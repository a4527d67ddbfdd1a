"""The one setting of the operator that is not an argument of every call: how precisely σ is computed."""

from __future__ import annotations

from sigattn.ops import checks

PRECISIONS = ("accurate", "fast")

_precision = "accurate"


def set_sigmoid_precision(precision: str) -> None:
    """Say how precisely the sigmoid is to be computed, in this process, where a call does not say it itself.

    Args:
        precision: "accurate" (from the start): every weight P has an error that is small beside P itself, at any
            length. "fast" allows an error that is small beside 1 only: on NVIDIA GPUs the hardware's tanh takes the
            place of ex2 and a polynomial, as in the paper's kernel (App. F), and with b = -log n the error of a typical
            weight 1/n grows with n: docs/operator.md has it measured. What has no faster form stays accurate.

    Raises:
        ValueError: if it is neither.

    >>> set_sigmoid_precision("accurate")
    """
    global _precision
    _precision = "fast" if is_fast(precision) else "accurate"


def get_sigmoid_precision() -> str:
    """What ``set_sigmoid_precision`` was last told: "accurate" or "fast"."""
    return _precision


def is_fast(precision: str | None) -> bool:
    """Whether a call that says this may use the fast form; None is the setting."""
    checks.choice("sigmoid precision", precision, PRECISIONS)
    return (_precision if precision is None else precision) == "fast"
