"""Reading of JSON files and errors of writes, with messages that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

Kind = type | tuple[type, ...]
TEXT_OR_NONE = (str, NoneType)


class FileFormatError(Exception):
    """A file does not have the expected content; the message is one line and names the file."""


def read_json_object(path: Path, **keys: Kind) -> dict[str, Any]:
    """Return the object in a JSON file, which must have these keys with values of these types.

    Raises:
        FileFormatError: if the file is not valid JSON or not an object, lacks a key, or has a value of another type.
        OSError: if the file cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{path} must hold a JSON object, got {type(found).__name__}")
    if missing := keys.keys() - found.keys():
        raise FileFormatError(f"{path} lacks {', '.join(sorted(missing))}")
    for key, kind in keys.items():
        if not isinstance(found[key], kind) or (kind is int and isinstance(found[key], bool)):
            raise FileFormatError(f"{path} has a wrong value for {key}: {str(found[key])[:60]!r}")
    return found


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to every OSError raised in the context, because those of a write (full disk) name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
