"""Checks of settings, called in ``__post_init__`` of every configuration.

Each function takes a configuration and names of its fields, or a dict of names and values. It raises ``SettingsError``
with the field's name and value if a value is out of range, infinite, NaN or not a number. A bool is not a number. A
field that is None passes; every element of a tuple is checked.
"""

import math
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from pathlib import Path


class UserError(Exception):
    """Base class of errors whose cause is a setting, a file or the machine, not a defect; the message is one line."""


class SettingsError(UserError, ValueError):
    """A setting is out of range, or settings do not fit together.

    ``settings`` name the settings that resolve the error, if the message does not; the command line shows their flags.
    """

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


def check_at_least(least: int, config: object, *names: str) -> None:
    """Require whole numbers of at least ``least``."""
    for name, value in _values(config, names):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise SettingsError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            raise SettingsError(f"{name} must be at least {least}, got {value}")


def check_finite(config: object, *names: str) -> None:
    """Require finite numbers."""
    _check(config, names, "be a finite number", lambda value: True)


def check_positive(config: object, *names: str) -> None:
    """Require finite numbers above 0."""
    _check(config, names, "be a finite number above 0", lambda value: value > 0)


def check_not_negative(config: object, *names: str) -> None:
    """Require finite numbers of at least 0."""
    _check(config, names, "be a finite number of at least 0", lambda value: value >= 0)


def check_probability(config: object, *names: str) -> None:
    """Require numbers in [0, 1)."""
    _check(config, names, "lie in [0, 1)", lambda value: 0 <= value < 1)


def check_fraction(config: object, *names: str) -> None:
    """Require numbers between 0 and 1, both excluded."""
    _check(config, names, "lie between 0 and 1", lambda value: 0 < value < 1)


def check_seed(config: object, *names: str) -> None:
    """Require whole numbers in 0 … 2³² - 1, so that every seed derived from them fits in 64 bits."""
    check_at_least(0, config, *names)
    _check(config, names, "be below 2^32", lambda value: value < 2**32)


def check_bool(config: object, *names: str) -> None:
    """Require True or False; None does not pass."""
    for name, value in _fields(config, names).items():
        if not isinstance(value, bool):
            raise SettingsError(f"{name} must be True or False, got {value!r}")


def check_among(allowed: tuple[str, ...], config: object, *names: str) -> None:
    """Require one of several names."""
    for name, value in _values(config, names):
        if value not in allowed:
            raise SettingsError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_output_file(path: Path | None, source: Path | None = None) -> None:
    """Require a path at which a file can be written, before the work whose result it will hold.

    ``source`` is a file that the work reads, which must not be overwritten. Raises also NotADirectoryError.
    """
    if path is None:
        return
    if path.is_dir():
        raise SettingsError(f"name a file to write, got the folder {path}")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise SettingsError(f"{path} is the data itself, which would be overwritten: name another file to write")
    _check_parents(path)


def check_output_folder(path: Path) -> None:
    """Require a path at which a folder exists or can be made, before the work whose results it will hold.

    Raises FileExistsError or NotADirectoryError if the path or a parent is a file.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"name a folder to write into, got the file {path}")
    _check_parents(path)


def _check_parents(path: Path) -> None:
    """Require that no parent of a path is a file."""
    if file := next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None):
        raise NotADirectoryError(f"{file}: is a file, so that {path} cannot be written")


def _check(config: object, names: tuple[str, ...], rule: str, is_valid: Callable[[float], bool]) -> None:
    for name, value in _values(config, names):
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        if not math.isfinite(number) or not is_valid(number):
            raise SettingsError(f"{name} must {rule}, got {value!r}")


def _values(config: object, names: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for name, value in _fields(config, names).items():
        for element in value if isinstance(value, (tuple, list)) else (value,):
            if element is not None:
                yield name, element


def _fields(config: object, names: tuple[str, ...]) -> dict[str, object]:
    return config if isinstance(config, dict) else {name: getattr(config, name) for name in names}
