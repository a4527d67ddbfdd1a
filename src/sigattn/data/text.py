"""Text as bytes or tokens for language models: reading, splitting and drawing windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sigattn.data.dataset import Batch, Data, DataError
from sigattn.data.documents import JSON_SUFFIXES, PLAIN_SUFFIXES, find_text_files
from sigattn.shapes import Int


def load_text(path: Path | None = None) -> bytes:
    """Read a text file, or all ``*.txt``, ``*.md``, ``*.rst`` and ``*.py`` files below a folder, sorted by path.

    Args:
        path: a file or a folder; None for the language reference that comes with CPython (``pydoc_data.topics``).

    Raises:
        DataError: if the file or folder does not exist, cannot be read, contains no text, or is a .jsonl, .jsonl.gz,
            .json.gz, .parquet or .bin file, whose bytes are not its text.
    """
    if path is None:
        return _documentation()
    files = find_text_files(path, PLAIN_SUFFIXES)
    if files == [path] and path.suffix == ".bin":
        raise DataError(f"{path} is a file of tokens (sigattn pack), and bytes are needed here: name a text file")
    if files == [path] and path.name.endswith((*JSON_SUFFIXES, ".parquet")):
        raise DataError(
            f"{path} is no plain text, and a model of bytes would learn its format: name a text file, or use sigattn "
            "tokenizer and sigattn pack, which read its documents"
        )
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
            "this Python comes without its documentation (pydoc_data.topics): name a text file to read instead"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@dataclass(frozen=True)
class TokenText:
    """Text as tokens, bytes by default; its last part is held out for validation.

    The windows of a step depend on the seed and the step only, so that a resumed run continues as an uninterrupted one.

    Attributes:
        training: tokens of the training part.
        validation: tokens of the held-out part.
        sha256: hash of all tokens, and the held-out fraction if it is not the default (``hash_of_split``).
        vocab_size: number of tokens in the vocabulary; a window with another token raises ``DataError``.
    """

    training: Int[Tensor, " training_bytes"]
    validation: Int[Tensor, " validation_bytes"]
    sha256: str
    vocab_size: int = 256

    @classmethod
    def split(cls, text: bytes, seq_len: int, held_out: float = 0.1) -> TokenText:
        """Split a text into bytes and hold out its last part, a fraction ``held_out``.

        Raises:
            DataError: if the held-out part is too short for one window of ``seq_len`` bytes and the next byte.
        """
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        sha256 = hash_of_split(hashlib.sha256(text).hexdigest(), held_out, default=0.1)
        return cls.split_tokens(tokens, seq_len, held_out, sha256, "bytes")

    @classmethod
    def split_tokens(
        cls,
        tokens: Int[Tensor, " tokens"],
        seq_len: int,
        held_out: float,
        sha256: str,
        unit: str = "tokens",
        vocab_size: int = 256,
    ) -> TokenText:
        """Hold out the last part of tokens of any vocabulary, as ``split`` does for bytes."""
        cut = len(tokens) - int(held_out * len(tokens))
        smaller = min(held_out, 1 - held_out)
        if min(cut, len(tokens) - cut) <= seq_len:
            raise DataError(
                f"the text has {len(tokens)} {unit}, of which {len(tokens) - cut} are held out: too short for a "
                f"context of {seq_len} (at least {int((seq_len + 1) / smaller) + 1} {unit} are needed)"
            )
        return cls(tokens[:cut], tokens[cut:], sha256, vocab_size)

    def batch(
        self, step: int, size: int, seq_len: int, seed: int
    ) -> tuple[Int[Tensor, "size seq_len"], Int[Tensor, "size seq_len"]]:
        """Return random windows of the training part and, shifted by one, the tokens to predict."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - seq_len, (size,), generator=generator)
        return _windows(self.training, starts, seq_len, self.vocab_size)

    def validation_batch(
        self, count: int, seq_len: int
    ) -> tuple[Int[Tensor, "count seq_len"], Int[Tensor, "count seq_len"]]:
        """Return windows spread evenly over the held-out part, the same at every call."""
        last = len(self.validation) - seq_len - 1
        starts = torch.linspace(0, last, count).long().clamp(max=last)  # float32 rounds above 2²⁴, also upwards
        return _windows(self.validation, starts, seq_len, self.vocab_size)


def hash_of_split(sha256: str, held_out: float, *, default: float) -> str:
    """Return the identity of a text of which a fraction is held out: its hash alone if that is the default one."""
    return sha256 if held_out == default else f"{sha256}, {held_out} held out"


class TextData(Data):
    """Random training windows and evenly spread held-out windows of a text.

    Args:
        text: the text.
        seq_len: tokens per window.
        held_out: number of held-out windows.
        tokenizer: hash of the tokenizer's file; None for bytes, or if it is unknown.
    """

    def __init__(self, text: TokenText, seq_len: int, held_out: int = 64, *, tokenizer: str | None = None) -> None:
        self.text = text
        self.seq_len = seq_len
        self.held_out = held_out
        self.tokenizer = tokenizer

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return tokens and the tokens that follow them, (B, seq_len) each."""
        tokens, targets = self.text.batch(step, size, self.seq_len, seed)
        return tokens[shard[0] :: shard[1]], targets[shard[0] :: shard[1]]

    def validation(self, size: int) -> Iterable[Batch]:
        """Return tokens and the tokens that follow them from the held-out part, (B, seq_len) each."""
        tokens, targets = self.text.validation_batch(self.held_out, self.seq_len)
        return list(zip(tokens.split(size), targets.split(size), strict=True))

    @property
    def fingerprint(self) -> str:
        """Hash of the text or its tokens, with the held-out fraction if it is not the default, and of the tokenizer."""
        return self.text.sha256 if self.tokenizer is None else f"{self.text.sha256}, tokenizer {self.tokenizer}"


def _windows(tokens: Tensor, starts: Tensor, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(seq_len + 1)
    window = tokens[index].long()
    check_tokens(window, vocab_size)
    return window[:, :-1], window[:, 1:]


def check_tokens(window: Int[Tensor, "batch length"], vocab_size: int) -> None:
    """Raise ``DataError`` if a token is not in 0 … vocab_size - 1."""
    low, high = window.aminmax()
    if low < 0 or high >= vocab_size:
        token = int(low if low < 0 else high)
        raise DataError(f"the text holds token {token}, and the model has a vocabulary of {vocab_size}")
