"""Warnings of combinations that the paper found hard to train, each given once per process."""

import warnings

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn unless this process has given the same warning, so that a model of many layers warns once."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"{message} (Ramapuram et al., 2025)", stacklevel=3)
