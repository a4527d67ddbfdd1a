"""Commands ``sigattn tokenizer`` and ``sigattn pack``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from sigattn.data.tokens import END, Progress, load_tokenizer, pack_corpus, train_tokenizer
from sigattn.validation import SettingsError, check_at_least


def make_tokenizer(data: Path, save: Path, vocab_size: int = 32_768) -> None:
    """Train a byte-level BPE tokenizer on a text.

    Args:
        data: a file or a folder of .txt, .md, .rst, .py, .jsonl, .jsonl.gz, .json.gz or .parquet; or
            hf:NAME:CONFIGURATION.
        save: the JSON file to write.
        vocab_size: number of tokens.
    """
    with _progress() as show:
        tokenizer = train_tokenizer(data, vocab_size, save, show)
    print(f"{tokenizer.get_vocab_size()} tokens: {save}; documents end with {tokenizer.token_to_id(END)}")


def pack_tokens(data: Path, tokenizer: Path, save: Path, limit: int | None = None) -> None:
    """Tokenize a corpus into one file, for training language models.

    Args:
        data: a file or a folder of .txt, .md, .rst, .py, .jsonl, .jsonl.gz, .json.gz or .parquet; or
            hf:NAME:CONFIGURATION.
        tokenizer: JSON file written by sigattn tokenizer, or by Hugging Face's tokenizers.
        save: the file to write, ending in .bin.
        limit: number of tokens after which to stop, at the end of a document.
    """
    check_at_least(1, {"limit": limit})
    if save.suffix != ".bin":
        raise SettingsError(f"name a file that ends in .bin, got {save}")
    with _progress() as show:
        count = pack_corpus(data, load_tokenizer(tokenizer), save, limit, show)
    print(f"{count:,} tokens: {save}")


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show the numbers of documents and tokens read so far, if the output is a terminal."""
    with Console().status("reading") as status:

        def show(documents: int, tokens: int) -> None:
            if documents % 100 == 0:
                status.update(f"{documents:,} documents" + (f", {tokens:,} tokens" if tokens else ""))

        yield show
