"""JSON files, checksums, and errors of writes, with messages that name the file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

Kind = type | tuple[type, ...]
TEXT_OR_NONE = (str, NoneType)
CHECKSUMS = "SHA256SUMS"  # file of a folder, in the format of the command sha256sum


class FileFormatError(Exception):
    """A file does not have the expected content; the message is one line and names the file."""


def read_json_object(path: Path, **keys: Kind) -> dict[str, Any]:
    """Return the object in a JSON file, which must have these keys with values of these types.

    Raises:
        FileFormatError: if the file is not valid JSON or not an object, lacks a key, or has a value of another type.
        OSError: if the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path} must hold a JSON object, got {type(content).__name__}")
    if missing := keys.keys() - content.keys():
        raise FileFormatError(f"{path} lacks {', '.join(sorted(missing))}")
    for key, kind in keys.items():
        if not isinstance(content[key], kind) or (kind is int and isinstance(content[key], bool)):
            raise FileFormatError(f"{path} has a wrong value for {key}: {str(content[key])[:60]!r}")
    return content


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to every OSError raised in the context, because those of a write (full disk) name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8; an OSError names the file."""
    with add_path_to_errors(path):
        path.write_text(text, encoding="utf-8")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write the checksums of a folder's files, by name."""
    write_text(folder / CHECKSUMS, "".join(f"{checksums[name]}  {name}\n" for name in sorted(checksums)))


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder's files, by name.

    Raises:
        FileFormatError: if their file is missing or damaged.
    """
    path = folder / CHECKSUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise FileFormatError(
            f"{folder} has no {CHECKSUMS}: the file was deleted, or another version of sigattn wrote the folder"
        ) from error
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is damaged") from error
    matches = [re.fullmatch(r"([0-9a-f]{64})  ([^/\\]+)", line) for line in lines]
    checksums = {match[2]: match[1] for match in matches if match}
    if len(checksums) < len(lines):
        raise FileFormatError(f"{path} is damaged")
    return checksums


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Require that files of a folder are as they were when their checksums were written.

    Raises:
        FileFormatError: if the content of a file has changed, or a file or its checksum is missing.
        OSError: if a file cannot be read.
    """
    checksums = read_checksums(folder)
    for name in names:
        if file_sha256(folder / name) != checksums.get(name):
            raise FileFormatError(
                f"{folder / name} has changed since it was written (its SHA-256 is not that in {CHECKSUMS}): restore "
                "it from a copy"
            )
