"""Commands ``sigattn tokenizer`` and ``sigattn pack``."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sigattn.data.tokens import END, load_tokenizer, pack_corpus, train_tokenizer
from sigattn.validation import SettingsError, check_at_least


def make_tokenizer(data: Path, save: Path, vocab_size: int = 32_768) -> None:
    """Train a byte-level BPE tokenizer on a text.

    Args:
        data: a file or a folder of .txt, .md, .rst, .py, .jsonl, .jsonl.gz or .parquet; or hf:NAME:CONFIGURATION.
        save: the JSON file to write.
        vocab_size: number of tokens.
    """
    with CorpusProgress(Console(), "tokenizer") as display:
        tokenizer = train_tokenizer(data, vocab_size, save, display.update)
    print(f"{tokenizer.get_vocab_size()} tokens: {save}; documents end with {tokenizer.token_to_id(END)}")


def pack_tokens(data: Path, tokenizer: Path, save: Path, limit: int | None = None) -> None:
    """Tokenize a corpus into one file, for training language models.

    Args:
        data: a file or a folder of .txt, .md, .rst, .py, .jsonl, .jsonl.gz or .parquet; or hf:NAME:CONFIGURATION.
        tokenizer: JSON file written by sigattn tokenizer, or by Hugging Face's tokenizers.
        save: the file to write, ending in .bin.
        limit: number of tokens after which to stop, at the end of a document.
    """
    check_at_least(1, {"limit": limit})
    if save.suffix != ".bin":
        raise SettingsError(f"name a file that ends in .bin, got {save}")
    with CorpusProgress(Console(), "pack", limit) as display:
        count = pack_corpus(data, load_tokenizer(tokenizer), save, limit, display.update)
    print(f"{count:,} tokens: {save}")


class CorpusProgress:
    """Display of the documents and tokens read so far: a progress bar on a terminal, else a line every 10 seconds.

    Args:
        console: where to print. title: of the bar. limit: number of tokens at which the bar is full; None if unknown.
    """

    SECONDS = 10.0  # between lines
    REFRESH = 0.1  # seconds between updates of the bar

    def __init__(self, console: Console, title: str, limit: int | None = None) -> None:
        self.console = console
        self.interval: float = self.REFRESH if console.is_terminal else self.SECONDS
        self.progress: Progress = Progress(
            TextColumn(title), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
        )
        self.task: TaskID = self.progress.add_task("", total=limit)
        self.shown: float = time.monotonic()

    def __enter__(self) -> CorpusProgress:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, documents: int, tokens: int) -> None:
        """Show new numbers, unless the last ones were shown less than ``interval`` seconds ago."""
        now = time.monotonic()
        if now - self.shown < self.interval:
            return
        self.shown = now
        text = f"{documents:,} documents" + (f", {tokens:,} tokens" if tokens else "")
        self.progress.update(self.task, completed=tokens, description=text)
        if not self.console.is_terminal:
            self.console.print(text, soft_wrap=True, highlight=False)
