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
MAX_CLASSES = 1 << 20
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
        DataError: if a file cannot be read, an image has no label in 0 … ``MAX_CLASSES`` - 1, or an image or label is
            a link or a sparse file.
    """
    sharded: list[ShardedImage] = []
    for file in files:
        images: dict[str, tarfile.TarInfo] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    key, kind = _split(member.name)
                    if member.isdir() or (kind.lower() not in SUFFIXES and kind != "cls"):
                        continue
                    if not member.isreg() or member.issparse():  # their content is elsewhere, or can claim any size
                        raise ValueError(f"{member.name} must be a plain file, and is a link or a sparse file")
                    if kind == "cls":
                        labels[key] = _label(archive, member)
                    elif key in images and images[key].name != member.name:
                        raise ValueError(f"{key!r} has two images, {images[key].name} and {member.name}")
                    else:
                        images[key] = member
        except (tarfile.TarError, OSError, ValueError) as error:
            raise DataError(f"cannot read {file}: {error}") from error
        if missing := sorted(images.keys() - labels.keys()):
            raise DataError(f"{file}: {len(missing)} images have no label (KEY.cls), the first is {missing[0]!r}")
        sharded += [ShardedImage(file, m.name, m.offset_data, m.size, labels[key]) for key, m in images.items()]
    return sharded


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    content = archive.extractfile(member)
    assert content is not None
    text = content.read(_LONGEST_LABEL + 1).strip()
    if not (text.isdigit() and len(text) <= _LONGEST_LABEL and int(text) < MAX_CLASSES):
        raise ValueError(
            f"{member.name} must hold a class index, a whole number in 0 … {MAX_CLASSES - 1:,}, got "
            f"{text.decode(errors='replace')!r}"
        )
    return int(text)


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into WebDataset's key and extension, at the first full stop of the base name."""
    folder, _, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return f"{folder}/{key}".lstrip("/"), kind
