"""Small .tar archives, read whole into memory up to a limit."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from pathlib import Path
from typing import Any

from sigattn.data.dataset import DataError

# The Free Spoken Digit Dataset has 3,000 recordings, 20 MB in all. Compressed zeros take a thousandth of their size.
MOST_BYTES = 512 << 20
MOST_MEMBERS = 100_000

_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


def members(archive: Path, suffix: str) -> dict[str, bytes]:
    """Return the contents of the files of an archive whose names end in ``suffix``, by name.

    Raises:
        DataError: if it cannot be read, unpacks to more than ``MOST_BYTES`` (headers and other files included), or has
            more than ``MOST_MEMBERS`` members.
    """
    found: dict[str, bytes] = {}
    try:
        with archive.open("rb") as raw:
            start = raw.peek(6)[:6]
            opener = next((o for magic, o in _OPENERS.items() if start.startswith(magic)), lambda file: file)
            # in order and without seeking, so that all that is unpacked is counted
            with opener(raw) as content, tarfile.open(fileobj=_Limited(content, archive), mode="r|") as tar:
                for count, member in enumerate(tar):
                    if count >= MOST_MEMBERS:
                        raise DataError(f"{archive} has more than {MOST_MEMBERS:,} members")
                    if member.isreg() and not member.issparse() and member.name.endswith(suffix):
                        file = tar.extractfile(member)
                        assert file is not None
                        found[member.name] = file.read()
    except (OSError, EOFError, ValueError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read the archive {archive}: {error}") from error
    return found


class _Limited(io.RawIOBase):
    """A stream that raises ``DataError`` beyond ``MOST_BYTES``, before it reads them into memory."""

    def __init__(self, content: Any, archive: Path) -> None:
        self.content, self.archive, self.left = content, archive, MOST_BYTES

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes."""
        most = self.left + 1
        data: bytes = self.content.read(most if size < 0 else min(size, most))
        self.left -= len(data)
        if self.left < 0:
            raise DataError(
                f"{self.archive} unpacks to more than {MOST_BYTES >> 20} MB: unpack it, and name the folder instead"
            )
        return data
