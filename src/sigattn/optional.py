"""Packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed; the message says what needs it, and how to install it."""


def require(package: str, purpose: str, install: str) -> Any:
    """Import a package.

    Args:
        package: its name. purpose: what needs it, in the plural. install: what to give to pip.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackageError(f"{purpose} need {package}: pip install {install}") from error
