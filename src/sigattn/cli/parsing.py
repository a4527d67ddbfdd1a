"""Parsing a command's arguments, apart from running the command."""

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
        SettingsError: if a configuration refuses its arguments. (tyro would print a box around the message.)
        SystemExit: for --help, and for arguments that tyro refuses.
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
    return parser()  # prints what the first call had no place to print


def bind(command: Callable[..., None]) -> Callable[..., Any]:
    """Return a function with the same arguments that does not run the command but returns a call of it."""

    @functools.wraps(command)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return functools.partial(command, *args, **kwargs)

    return bound
