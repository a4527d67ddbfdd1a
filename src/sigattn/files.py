"""JSON files, hashes, checksums of folders, and errors of writes, with messages that name the file."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigattn.validation import UserError

CHECKSUMS = "SHA256SUMS"  # file of a folder, in the format of the command sha256sum
MAX_HASHED_BYTES = 1 << 30  # collections up to this size are hashed with contents (seconds); ImageNet has 150 GB


class FileFormatError(UserError):
    """A file does not have the expected content; the message is one line and names the file."""


def read_json_object(path: Path, *, version: int | None = None, **keys: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the object in a JSON file; raise FileFormatError unless it has these keys with values of these types.

    A ``version`` is the number that "format" must have in files whose format changes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path} must hold a JSON object, got {type(content).__name__}")
    if version is not None and content.get("format") != version:
        raise FileFormatError(
            f"{path.name} has the format {content.get('format')} of another version of sigattn, and this version reads "
            f"{version}"
        )
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` at the end, and is deleted after an error."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of named files: of names and sizes, and of contents if all sizes sum to ≤ ``MAX_HASHED_BYTES``.

    Missing and unreadable files do not raise; they enter the hash as missing or unreadable.
    """
    sizes = [(name, path, path.stat().st_size if path.is_file() else None) for name, path in files]
    with_contents = sum(size or 0 for _, _, size in sizes) <= MAX_HASHED_BYTES
    digest = hashlib.sha256()
    for name, path, size in sizes:
        try:
            content = file_sha256(path) if with_contents and size is not None else ""
        except OSError as error:
            content = f"unreadable: {error.errno}"
        digest.update(f"{name}\0{size}\0{content}\n".encode())
    return digest.hexdigest()


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write the checksums of a folder's files, by name."""
    write_text(folder / CHECKSUMS, "".join(f"{checksums[name]}  {name}\n" for name in sorted(checksums)))


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder's files, by name; raise FileFormatError if they are missing or damaged."""
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
    """Raise FileFormatError if files of a folder, or their checksums, have changed or are missing."""
    checksums = read_checksums(folder)
    for name in names:
        if file_sha256(folder / name) != checksums.get(name):
            raise FileFormatError(
                f"{folder / name} has changed since it was written (its SHA-256 is not that in {CHECKSUMS}): restore "
                "it from a copy"
            )
