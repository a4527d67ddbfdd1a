"""Parsing of a command's arguments without running the command."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any, TypeVar

from sigattn.validation import SettingsError

Parsed = TypeVar("Parsed")


def parse(parser: Callable[[], Parsed]) -> Parsed:
    """Call a parser of tyro.

    Raises:
        SettingsError: if a configuration rejects its arguments. (tyro would print a box around the message.)
        SystemExit: for --help, and for arguments that tyro rejects.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return parser()
        except SystemExit as stop:
            cause: BaseException | None = stop
            while cause is not None and not isinstance(cause, SettingsError):
                cause = cause.__context__
    if cause is not None:
        raise cause
    return parser()  # parse again to print the output that was suppressed in the first call


def bind(command: Callable[..., object]) -> Callable[..., Any]:
    """Return a function with the command's signature that returns the command bound to its arguments."""

    @functools.wraps(command)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], object]:
        return functools.partial(command, *args, **kwargs)

    return bound
