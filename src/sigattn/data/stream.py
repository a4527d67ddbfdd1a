"""Training data from a stream of documents, which is never held in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch

from sigattn.data.dataset import Batch, Data, DataError
from sigattn.data.text import check_tokens


class StreamedText(Data):
    """Windows of a text in order of reading; the first ones are held out.

    The windows of a step depend on its number only, so a run can be resumed: the text is then read and encoded again up
    to that step. Where this takes too long, use ``sigattn pack`` first. After its last document the text is repeated.

    Args:
        documents: returns an iterator over all documents, from the first.
        name: identity of the text.
        encode: returns the tokens of a document, including its end token.
        seq_len: tokens per window.
        held_out: number of held-out windows.
        vocab_size: number of tokens in the vocabulary.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[str]],
        name: str,
        encode: Callable[[str], list[int]],
        seq_len: int,
        held_out: int = 64,
        vocab_size: int = 256,
    ) -> None:
        self.documents = documents
        self.name = name
        self.encode = encode
        self.seq_len = seq_len
        self.held_out = held_out
        self.vocab_size = vocab_size

    def batches(self, first_step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Iterate over batches from ``first_step`` on: tokens and the tokens that follow them, (B, seq_len) each."""
        windows = itertools.islice(self._training(), first_step * size, None)
        while True:
            rows = list(itertools.islice(windows, size))[shard[0] :: shard[1]]
            yield self._batch(rows)

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return the batch of one step. Reads the text from its start; use ``batches`` for consecutive steps."""
        return next(self.batches(step, size, seed, shard))

    @cached_property
    def _held(self) -> list[list[int]]:
        return list(itertools.islice(self._windows(), self.held_out))

    def validation(self, size: int) -> Iterable[Batch]:
        """Return the first windows; all of them if the text has fewer."""
        return [self._batch(self._held[i : i + size]) for i in range(0, len(self._held), size)]

    @property
    def fingerprint(self) -> str:
        """Name and sizes."""
        return f"{self.name}, windows of {self.seq_len}, {self.held_out} held out"

    def _batch(self, rows: list[list[int]]) -> Batch:
        windows = torch.tensor(rows, dtype=torch.int64)
        if len(windows):
            check_tokens(windows, self.vocab_size)
        return windows[:, :-1], windows[:, 1:]

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
