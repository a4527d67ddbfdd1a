"""Text that is read as it is needed and never held: Hugging Face's ``datasets``, by name or from a folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sigattn.data.dataset import Batch, Data, DataError
from sigattn.data.text import check_tokens

HUB = "hf:"


def is_streamed(path: Path | None) -> bool:
    """Whether a path names a data set of Hugging Face: ``hf:NAME``, ``hf:NAME:CONFIGURATION``."""
    return path is not None and str(path).startswith(HUB)


def hub_documents(path: Path) -> Iterator[str]:
    """The "text" of each sample of a data set's "train" split, streamed.

    Args:
        path: ``hf:allenai/c4:realnewslike``, say; or ``hf:`` and a folder of .jsonl or .parquet files.

    Raises:
        DataError: if it cannot be reached, has no such split or no "text", or ``datasets`` is missing.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(f"{path} is read by Hugging Face's datasets: pip install 'sigattn[text]'") from error
    name, _, configuration = str(path).removeprefix(HUB).partition(":")
    try:
        samples: Iterable[dict[str, Any]] = datasets.load_dataset(
            name, configuration or None, split="train", streaming=True
        )
        for sample in samples:
            if not isinstance(sample.get("text"), str):
                raise DataError(f'the samples of {path} have no "text", but {", ".join(sample)}')
            yield sample["text"]
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's own errors are among them
        reason = " ".join(str(error).split())
        raise DataError(f"cannot read the data set {path}: {type(error).__name__}: {reason}") from error


class StreamedText(Data):
    """Windows of a text in the order in which it comes; the first ones are held out.

    A step's windows depend on its number alone, so a run can be resumed: the text is then read again up to there, which
    takes as long as encoding it. ``sigattn pack`` first, where that is too long. At its end the text begins anew.

    Args:
        documents: starts reading from the first document. name: tells this text from others.
        encode: a document's tokens, with whatever ends it.
        context: tokens of a window. held_out: number of windows held out. vocabulary: number of tokens that there are.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[str]],
        name: str,
        encode: Callable[[str], list[int]],
        context: int,
        held_out: int = 64,
        vocabulary: int = 256,
    ) -> None:
        self.documents, self.name, self.encode, self.vocabulary = documents, name, encode, vocabulary
        self.context, self.held_out = context, held_out

    def batches(self, first_step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Tokens and the tokens that follow them, (B, context) each."""
        windows = itertools.islice(self._training(), first_step * size, None)
        while True:
            rows = list(itertools.islice(windows, size))[shard[0] :: shard[1]]
            yield self._batch(rows)

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """One of them."""
        return next(self.batches(step, size, seed, shard))

    @cached_property
    def _held(self) -> list[list[int]]:
        return list(itertools.islice(self._windows(), self.held_out))

    def validation(self, size: int) -> Iterable[Batch]:
        """The first windows."""
        return [self._batch(self._held[i : i + size]) for i in range(0, self.held_out, size)]

    @property
    def fingerprint(self) -> str:
        """Its name."""
        return f"{self.name}, windows of {self.context}, {self.held_out} held out"

    def _batch(self, rows: list[list[int]]) -> Batch:
        windows = torch.tensor(rows, dtype=torch.int64)
        if len(windows):
            check_tokens(windows, self.vocabulary)
        return windows[:, :-1], windows[:, 1:]

    def _windows(self) -> Iterator[list[int]]:
        """Of context + 1 tokens each, of which the last is the first of the next: one pass over the text."""
        kept: list[int] = []
        for document in self.documents():
            kept += self.encode(document)
            start = 0
            while start + self.context < len(kept):
                yield kept[start : start + self.context + 1]
                start += self.context
            kept = kept[start:]

    def _training(self) -> Iterator[list[int]]:
        """Pass after pass, without what is held out."""
        while True:
            made = 0
            for window in itertools.islice(self._windows(), self.held_out, None):
                yield window
                made += 1
            if not made:
                raise DataError(
                    f"{self.name} is too short: it has not more than the {self.held_out} windows of {self.context} "
                    "tokens that are held out"
                )
