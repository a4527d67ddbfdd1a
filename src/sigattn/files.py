"""Files that do not parse, and disks that are full: errors that name the file."""

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
    """A file that does not hold what it should; the message is one line and names the file."""


def read_object(path: Path, **keys: Kind) -> dict[str, Any]:
    """Return the object in a JSON file, which must have these keys with values of these types.

    Raises:
        FileFormatError: if the file is no JSON, no object, lacks a key, or a value has another type.
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
def naming(path: Path) -> Iterator[None]:
    """Context whose OSErrors name ``path``: those of a write, as on a full disk, name no file by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
