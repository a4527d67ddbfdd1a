"""Images in WebDataset's layout: .tar files in which ``KEY.jpg`` stands beside ``KEY.cls``, the number of its class.

Each image is found again by its place in its file, so that samples can be drawn in any order and a run be resumed
exactly; readers that only stream (webdataset's, timm's) cannot.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from sigattn.data.dataset import DataError

SUFFIXES = ("jpeg", "jpg", "png", "webp")
_LONGEST_LABEL = 32  # bytes


@dataclass(frozen=True)
class ShardedImage:
    """An image within a .tar file.

    Attributes:
        shard: the file. name: the member's. offset, size: of its bytes. label: number of its class.
    """

    shard: Path
    name: str
    offset: int
    size: int
    label: int

    def __str__(self) -> str:
        return f"{self.shard}/{self.name}"

    def open(self) -> io.BytesIO:
        """Its bytes."""
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))


def shards(root: Path, split: str) -> list[Path]:
    """The .tar files of a folder whose names say "train" or "val", in order."""
    return sorted(p for p in root.glob("*.tar") if split in p.name)


def sharded_images(files: list[Path]) -> list[ShardedImage]:
    """All images of .tar files, in order. Reads their headers and labels, not the images.

    Raises:
        DataError: if a file cannot be read, or an image has no class.
    """
    found: list[ShardedImage] = []
    for file in files:
        images: dict[str, tarfile.TarInfo] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    key, kind = _split(member.name)
                    if kind.lower() in SUFFIXES:
                        images[key] = member
                    elif kind == "cls" and (content := archive.extractfile(member)) is not None:
                        labels[key] = int(content.read(_LONGEST_LABEL))  # a sparse member can claim any size
        except (tarfile.TarError, OSError, ValueError) as error:
            raise DataError(f"cannot read {file}: {error}") from error
        if missing := sorted(images.keys() - labels.keys()):
            raise DataError(f"{file}: {len(missing)} images have no class beside them (KEY.cls), {missing[0]!r} first")
        found += [ShardedImage(file, m.name, m.offset_data, m.size, labels[key]) for key, m in images.items()]
    return found


def _split(name: str) -> tuple[str, str]:
    """A member's name at its base name's first full stop, which is where WebDataset's keys end."""
    folder, _, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return f"{folder}/{key}".lstrip("/"), kind
