"""Hashes of files and collections of files, which identify data sets."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import sigattn.files

# Collections up to this size are hashed with contents (a few seconds), larger ones (ImageNet: 150 GB) without.
MAX_BYTES = 1 << 30


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, cached while size and modification time are unchanged."""
    status = path.stat()
    return _sha256(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    return sigattn.files.file_sha256(path)


def files_sha256(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of named files: of names and sizes, and also of contents if all sizes sum to ≤ ``MAX_BYTES``.

    Missing and unreadable files do not raise; they enter the hash as missing or unreadable.
    """
    sizes = [(name, path, path.stat().st_size if path.is_file() else None) for name, path in files]
    with_contents = sum(size or 0 for _, _, size in sizes) <= MAX_BYTES
    digest = hashlib.sha256()
    for name, path, size in sizes:
        content = _readable_sha256(path) if with_contents and size is not None else ""
        digest.update(f"{name}\0{size}\0{content}\n".encode())
    return digest.hexdigest()


def _readable_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        return f"unreadable: {error.errno}"
