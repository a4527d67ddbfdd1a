"""Small .tar archives, read into memory completely, up to a size limit."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import tarfile
import zlib
from pathlib import Path
from typing import Any

from sigattn.data.dataset import DataError

# The Free Spoken Digit Dataset has 3,000 recordings, 20 MB in all. Without limits a small archive could fill the
# memory: compression reduces zeros to a thousandth of their size.
MAX_BYTES = 512 << 20
MAX_MEMBERS = 100_000

_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


@functools.cache
def read_members(archive: Path, suffix: str) -> dict[str, bytes]:
    """Return the contents of an archive's files whose names end in ``suffix``, by name; an archive is read only once.

    Raises:
        DataError: if the archive cannot be read, unpacks to more than ``MAX_BYTES`` (headers and other files
            included), or has more than ``MAX_MEMBERS`` members.
    """
    contents: dict[str, bytes] = {}
    try:
        with archive.open("rb") as raw:
            start = raw.peek(6)[:6]
            opener = next((o for magic, o in _OPENERS.items() if start.startswith(magic)), lambda file: file)
            # "r|" reads in order without seeking, so that _Limited counts all unpacked bytes
            with opener(raw) as content, tarfile.open(fileobj=_Limited(content, archive), mode="r|") as tar:
                for count, member in enumerate(tar):
                    if count >= MAX_MEMBERS:
                        raise DataError(
                            f"{archive} has more than {MAX_MEMBERS:,} members: unpack it, and name the folder instead"
                        )
                    if member.isreg() and not member.issparse() and member.name.endswith(suffix):
                        file = tar.extractfile(member)
                        assert file is not None
                        contents[member.name] = file.read()
    except (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read the archive {archive}: {error}") from error
    return contents


class _Limited(io.RawIOBase):
    """Stream that raises ``DataError`` once more than ``MAX_BYTES`` are read from it."""

    def __init__(self, content: Any, archive: Path) -> None:
        self.content, self.archive, self.left = content, archive, MAX_BYTES

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes."""
        limit = self.left + 1  # one more than allowed, so that excess is noticed without reading all of it
        data: bytes = self.content.read(limit if size < 0 else min(size, limit))
        self.left -= len(data)
        if self.left < 0:
            raise DataError(
                f"{self.archive} unpacks to more than {MAX_BYTES >> 20} MB: unpack it, and name the folder instead"
            )
        return data
