"""Warnings of combinations that the paper found hard to train, each said once in a process."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def warn_once(message: str) -> None:
    """Say it, where it has not been said before: a model of many layers warns once."""
    if message not in _said:
        _said.add(message)
        warnings.warn(f"{message} (Ramapuram et al., 2025)", stacklevel=3)
