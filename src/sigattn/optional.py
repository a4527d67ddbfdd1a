"""Imports of optional packages, with errors that name the package to install."""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

from sigattn.validation import UserError


class MissingPackageError(UserError, ImportError):
    """A package is missing or cannot be imported; the message names it and the command that installs it."""


def require(package: str, purpose: str, install: str) -> Any:
    """Import a package or module, which a feature (``purpose``, plural) needs; ``install`` is pip's argument.

    Raises MissingPackageError if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (package, package.partition(".")[0]):
            raise
        raise MissingPackageError(f"{purpose} need {error.name}: pip install {install}") from error


@contextlib.contextmanager
def explain_import_errors(extra: str) -> Iterator[None]:
    """Raise MissingPackageError for an import error in the context; it names the package and the extra to install.

    It names torchvision and torch if their builds are incompatible: the import of timm and transformers fails then.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        raise MissingPackageError(_explanation(error, extra)) from error


def _explanation(error: BaseException, extra: str) -> str:
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(link)
    for link in chain:
        if "torchvision::" in str(link):
            torchvision, torch = (importlib.metadata.version(name) for name in ("torchvision", "torch"))
            return (
                f"torchvision {torchvision} cannot be imported next to torch {torch} ({link}): they are builds for "
                "different devices or versions. Install both from one index, or uninstall torchvision, which only timm "
                "and folders of images need"
            )
    missing = next((e.name for e in chain if isinstance(e, ModuleNotFoundError) and e.name), None)
    if missing is not None:
        return f"this needs {missing}: pip install 'sigattn[{extra}]'"
    return f"{chain[-1]} (installed by pip install 'sigattn[{extra}]')"
