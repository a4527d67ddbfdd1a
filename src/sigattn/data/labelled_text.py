"""Texts of several classes, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from sigattn.data.dataset import Batch, Data, DataError, sample_generator
from sigattn.data.text import TextData, load_text

PACKAGES = ("asyncio", "ctypes", "email", "encodings", "importlib", "multiprocessing", "unittest", "xml")


class LabelledText(Data):
    """Windows of bytes of the texts of several classes; the last tenth of each class is held out.

    Args:
        texts: text of each class, by the class's name.
        seq_len: bytes per window.
        held_out: number of held-out windows per class.

    Raises:
        DataError: if a text is too short to be split.
    """

    def __init__(self, texts: Mapping[str, bytes], seq_len: int, held_out: int = 64) -> None:
        self.classes: list[str] = list(texts)
        self.seq_len = seq_len
        self.held_out = held_out
        self._texts = [TextData.from_bytes(text, seq_len, held_out=held_out) for text in texts.values()]

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return bytes (B, seq_len) and labels (B,); all classes are equally probable."""
        labels = torch.randint(len(self._texts), (size,), generator=sample_generator(seed, step, 0))
        windows = torch.stack([text.batch(step, size, seed)[0] for text in self._texts])
        return windows[labels, torch.arange(size)][shard[0] :: shard[1]], labels[shard[0] :: shard[1]]

    def validation(self, size: int) -> Iterable[Batch]:
        """Return evenly spread windows of the held-out parts, equally many of each class, and their labels."""
        windows = torch.cat([tokens for text in self._texts for tokens, _ in text.validation(self.held_out)])
        labels = torch.arange(len(self._texts)).repeat_interleave(self.held_out)
        return list(zip(windows.split(size), labels.split(size), strict=True))

    @property
    def fingerprint(self) -> str:
        """Hash of the classes and their texts."""
        classes = [(name, text.fingerprint) for name, text in zip(self.classes, self._texts, strict=True)]
        return hashlib.sha256(f"{self.seq_len} {classes}".encode()).hexdigest()


def load_labelled_text(path: Path | None = None) -> dict[str, bytes]:
    """Read the text of each subfolder of a folder, by the subfolder's name.

    Args:
        path: the folder; None for the sources of eight packages of Python's standard library (``PACKAGES``).

    Raises:
        DataError: if there are fewer than two subfolders, or one contains no text.
    """
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        return {name: load_text(library / name) for name in PACKAGES}
    folders = sorted(folder for folder in path.glob("*") if folder.is_dir())
    if len(folders) < 2:
        raise DataError(f"looked for two or more folders of texts, one for each class, in {path}, found {len(folders)}")
    return {folder.name: load_text(folder) for folder in folders}
