"""Images in WebDataset's layout: .tar files with an image ``KEY.jpg`` and its class index ``KEY.cls`` per sample.

Images are read by their offset in the file, so that samples can be drawn in any order and a run can be resumed exactly,
unlike with streaming readers (webdataset's, timm's).
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
    """Image in a .tar file.

    Attributes:
        shard: the .tar file.
        name: name of the member.
        offset: offset of the image's first byte in the file.
        size: number of bytes.
        label: class index.
    """

    shard: Path
    name: str
    offset: int
    size: int
    label: int

    def __str__(self) -> str:
        return f"{self.shard}/{self.name}"

    def open(self) -> io.BytesIO:
        """Read the image's bytes."""
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))


def find_shards(root: Path, split: str) -> list[Path]:
    """Return the .tar files of a folder whose names contain ``split`` ("train" or "val"), sorted."""
    return sorted(p for p in root.glob("*.tar") if split in p.name)


def index_shards(files: list[Path]) -> list[ShardedImage]:
    """Return all images of .tar files in order, reading headers and labels but not the images.

    Raises:
        DataError: if a file cannot be read, or an image has no label.
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
            raise DataError(f"{file}: {len(missing)} images have no label (KEY.cls), the first is {missing[0]!r}")
        found += [ShardedImage(file, m.name, m.offset_data, m.size, labels[key]) for key, m in images.items()]
    return found


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into WebDataset's key and extension, at the first full stop of the base name."""
    folder, _, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return f"{folder}/{key}".lstrip("/"), kind
