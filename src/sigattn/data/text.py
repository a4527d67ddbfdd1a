"""Text as bytes or tokens for language models, in memory or streamed: reading, splitting and drawing windows."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sigattn.data.dataset import Batch, Data, DataError
from sigattn.data.documents import JSON_SUFFIXES, PLAIN_SUFFIXES, find_text_files
from sigattn.shapes import Int


def load_text(path: Path | None = None) -> bytes:
    """Read a text file, or all ``*.txt``, ``*.md``, ``*.rst`` and ``*.py`` files below a folder, sorted by path.

    None reads the language reference that comes with CPython (``pydoc_data.topics``). Raises DataError if the path does
    not exist, cannot be read, contains no text, or is a .jsonl, .jsonl.gz, .json.gz, .parquet or .bin file.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise DataError(
                "this Python comes without its documentation (pydoc_data.topics): name a text file to read instead"
            ) from error
        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    files = find_text_files(path, PLAIN_SUFFIXES)
    if files == [path] and path.name.endswith((*JSON_SUFFIXES, ".parquet", ".bin")):
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


class TextData(Data):
    """Windows of a text as tokens; its last part is held out for validation.

    Training windows are random; held-out windows are spread evenly.

    Args:
        tokens: (N,) integers; DataError is raised if a part is too short for one window and the next token.
        seq_len: tokens per window.
        fingerprint: identity of the tokens.
        held_out: number of held-out windows.
        held_out_fraction: fraction of the tokens that is held out.
        vocab_size: number of tokens in the vocabulary; a window with another token raises ``DataError``.
    """

    def __init__(
        self, tokens: Int[Tensor, " tokens"], seq_len: int, fingerprint: str, *, held_out: int = 64,
        held_out_fraction: float = 0.1, vocab_size: int = 256,
    ) -> None:  # fmt: skip
        cut = len(tokens) - int(held_out_fraction * len(tokens))
        if min(cut, len(tokens) - cut) <= seq_len:
            smaller = min(held_out_fraction, 1 - held_out_fraction)
            raise DataError(
                f"the text has {len(tokens)} tokens, of which {len(tokens) - cut} are held out: too short for a "
                f"context of {seq_len} (at least {int((seq_len + 1) / smaller) + 1} tokens are needed)"
            )
        self.tokens = tokens
        self.training_tokens: Tensor = tokens[:cut]
        self.held_out_tokens: Tensor = tokens[cut:]
        self.seq_len, self.held_out, self.vocab_size, self._fingerprint = seq_len, held_out, vocab_size, fingerprint

    @classmethod
    def from_bytes(cls, text: bytes, seq_len: int, *, held_out: int = 64) -> "TextData":
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        return cls(tokens, seq_len, hashlib.sha256(text).hexdigest(), held_out=held_out)

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return tokens and the tokens that follow them, (B, seq_len) each."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training_tokens) - self.seq_len, (size,), generator=generator)
        tokens, targets = self._windows(self.training_tokens, starts)
        return tokens[shard[0] :: shard[1]], targets[shard[0] :: shard[1]]

    def validation(self, size: int) -> Iterable[Batch]:
        """Return tokens and the tokens that follow them from the held-out part, (B, seq_len) each."""
        last = len(self.held_out_tokens) - self.seq_len - 1
        starts = torch.linspace(0, last, self.held_out).long().clamp(max=last)  # float32 rounds above 2²⁴, also upwards
        tokens, targets = self._windows(self.held_out_tokens, starts)
        return list(zip(tokens.split(size), targets.split(size), strict=True))

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def _windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        windows = tokens[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return _tokens_and_targets(windows, self.vocab_size)


@dataclass(eq=False)
class StreamedText(Data):
    """Windows of a text in order of reading; the first ones are held out.

    The windows of a step depend on its number only, so a run can be resumed: the text is then read and encoded again up
    to that step. Where this takes too long, use ``sigattn pack`` first. After its last document the text is repeated.

    Attributes:
        documents: returns an iterator over all documents, from the first.
        name: identity of the text.
        encode: returns the tokens of a document, including its end token.
        seq_len: tokens per window.
        held_out: number of held-out windows.
        vocab_size: number of tokens in the vocabulary.
    """

    documents: Callable[[], Iterator[str]]
    name: str
    encode: Callable[[str], list[int]]
    seq_len: int
    held_out: int = 64
    vocab_size: int = 256

    def batches(self, first_step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Iterate over batches from ``first_step`` on: tokens and the tokens that follow them, (B, seq_len) each."""
        windows = itertools.islice(self._training(), first_step * size, None)
        while True:
            yield self._batch(list(itertools.islice(windows, size))[shard[0] :: shard[1]])

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return the batch of one step. Reads the text from its start; use ``batches`` for consecutive steps."""
        return next(self.batches(step, size, seed, shard))

    @functools.cached_property
    def _held(self) -> list[list[int]]:
        return list(itertools.islice(self._windows(), self.held_out))

    def validation(self, size: int) -> Iterable[Batch]:
        """Return the first windows; all of them if the text has fewer."""
        return [self._batch(self._held[i : i + size]) for i in range(0, len(self._held), size)]

    @property
    def fingerprint(self) -> str:
        return f"{self.name}, windows of {self.seq_len}, {self.held_out} held out"

    def _batch(self, rows: list[list[int]]) -> Batch:
        return _tokens_and_targets(torch.tensor(rows, dtype=torch.int64), self.vocab_size)

    def _windows(self) -> Iterator[list[int]]:
        """Iterate once over the text in windows of seq_len + 1 tokens; neighbouring windows share one token."""
        tokens: list[int] = []
        for document in self.documents():
            tokens += self.encode(document)
            start = 0
            while start + self.seq_len < len(tokens):
                yield tokens[start : start + self.seq_len + 1]
                start += self.seq_len
            tokens = tokens[start:]

    def _training(self) -> Iterator[list[int]]:
        """Iterate over the training windows without end, one pass over the text after another."""
        while True:
            count = 0
            for window in itertools.islice(self._windows(), self.held_out, None):
                yield window
                count += 1
            if not count:
                raise DataError(
                    f"{self.name} is too short: the {self.held_out} held-out windows of {self.seq_len} tokens leave "
                    "none to train on"
                )


def _tokens_and_targets(windows: Int[Tensor, "batch length"], vocab_size: int) -> Batch:
    """Return windows without their last and without their first token; raise if a token is not in the vocabulary."""
    low, high = (int(t) for t in windows.aminmax())
    if low < 0 or high >= vocab_size:
        token = low if low < 0 else high
        raise DataError(f"the text holds token {token}, and the model has a vocabulary of {vocab_size}")
    return windows[:, :-1], windows[:, 1:]
