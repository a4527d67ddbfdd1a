"""Text as bytes, for language models: where it comes from, how it is split and drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sigattn.data.dataset import Batch, Data, DataError
from sigattn.shapes import Int


def load_text(path: Path | None = None) -> bytes:
    """Read a text file, or all ``*.txt``, ``*.md``, ``*.rst`` and ``*.py`` below a folder, in order of their names.

    Args:
        path: a file or a folder; None for the language reference that CPython carries (``pydoc_data.topics``), real
            text that is on every machine.

    Raises:
        DataError: if there is no such file or folder, it cannot be read, or holds no text.
    """
    if path is None:
        return _documentation()
    if not path.exists():
        raise DataError(f"no such text file or folder: {path}")
    suffixes = {".txt", ".md", ".rst", ".py"}
    files = sorted(f for f in path.rglob("*") if f.suffix in suffixes) if path.is_dir() else [path]
    if not files:
        raise DataError(f"the folder {path} holds no {', '.join(sorted(suffixes))} file")
    try:
        text = b"\n".join(f.read_bytes() for f in files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror}") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text


def _documentation() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python comes without its documentation (pydoc_data.topics); name a text file with --text"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@dataclass(frozen=True)
class ByteText:
    """A text as byte tokens, its end held out for validation.

    What a step is trained on depends on the seed and the step alone: so a run that is resumed sees what it would have.

    Attributes:
        training, validation: the tokens. sha256: of all of them.
        vocabulary: number of tokens that there are; a window with another token is an error.
    """

    training: Int[Tensor, " training_bytes"]
    validation: Int[Tensor, " validation_bytes"]
    sha256: str
    vocabulary: int = 256

    @classmethod
    def split(cls, text: bytes, context: int, held_out: float = 0.1) -> ByteText:
        """Hold out the last part of a text.

        Raises:
            DataError: if either part is too short for one sequence of the given context and its next byte.
        """
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        return cls.split_tokens(tokens, context, held_out, hashlib.sha256(text).hexdigest(), "bytes")

    @classmethod
    def split_tokens(
        cls,
        tokens: Int[Tensor, " tokens"],
        context: int,
        held_out: float,
        sha256: str,
        unit: str = "tokens",
        vocabulary: int = 256,
    ) -> ByteText:
        """The same of tokens of any vocabulary."""
        cut = len(tokens) - int(held_out * len(tokens))
        if len(tokens) - cut <= context:
            raise DataError(
                f"the text has {len(tokens)} {unit}, of which {len(tokens) - cut} are held out: too short for a "
                f"context of {context} (at least {int((context + 1) / held_out) + 1} {unit} are needed)"
            )
        return cls(tokens[:cut], tokens[cut:], sha256, vocabulary)

    def batch(
        self, step: int, size: int, context: int, seed: int
    ) -> tuple[Int[Tensor, "size context"], Int[Tensor, "size context"]]:
        """Random windows of the training text and, shifted by one, the bytes to predict."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - context, (size,), generator=generator)
        return _windows(self.training, starts, context, self.vocabulary)

    def validation_batch(
        self, count: int, context: int
    ) -> tuple[Int[Tensor, "count context"], Int[Tensor, "count context"]]:
        """Windows spread evenly over the held-out text, always the same."""
        starts = torch.linspace(0, len(self.validation) - context - 1, count).long()
        return _windows(self.validation, starts, context, self.vocabulary)


class TextData(Data):
    """Windows of a text, to train a language model on: random ones, and evenly spread held-out ones.

    Args:
        text: what it is cut from. context: tokens of a window. held_out: number of windows held out.
        tokenizer: hash of the tokenizer's file; None for bytes, or where it is not known.
    """

    def __init__(self, text: ByteText, context: int, held_out: int = 64, *, tokenizer: str | None = None) -> None:
        self.text, self.context, self.held_out, self.tokenizer = text, context, held_out, tokenizer

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Tokens and the tokens that follow them, (B, context) each."""
        tokens, targets = self.text.batch(step, size, self.context, seed)
        return tokens[shard[0] :: shard[1]], targets[shard[0] :: shard[1]]

    def validation(self, size: int) -> Iterable[Batch]:
        """The same of the held-out text."""
        tokens, targets = self.text.validation_batch(self.held_out, self.context)
        return list(zip(tokens.split(size), targets.split(size), strict=True))

    @property
    def fingerprint(self) -> str:
        """Hash of the text or its tokens, and of the tokenizer."""
        return self.text.sha256 if self.tokenizer is None else f"{self.text.sha256}, tokenizer {self.tokenizer}"


def _windows(tokens: Tensor, starts: Tensor, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    at = starts[:, None] + torch.arange(context + 1)
    window = tokens[at].long()
    check_tokens(window, vocabulary)
    return window[:, :-1], window[:, 1:]


def check_tokens(window: Int[Tensor, "batch length"], vocabulary: int) -> None:
    """Raise DataError if a token is not in 0 … vocabulary - 1."""
    least, most = window.aminmax()
    if least < 0 or most >= vocabulary:
        wrong = int(least if least < 0 else most)
        raise DataError(f"the text holds token {wrong}, and the model has a vocabulary of {vocabulary}")
