"""Text as the tokens of a vocabulary (Hugging Face's ``tokenizers``), trained here or loaded from a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sigattn.data.dataset import DataError
from sigattn.data.text import ByteText

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
END = "<|end|>"  # between documents


def documents(path: Path) -> Iterator[str]:
    """The documents of a file or a folder: text files, and the "text" of each line of .jsonl files, in order of names.

    Raises:
        DataError: if there are none, or a line is no JSON with a text.
    """
    if not path.exists():
        raise DataError(f"no such text file or folder: {path}")
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise DataError(f"looked for {', '.join(SUFFIXES)} files in {path} and found none")
    for file in files:
        if file.suffix != ".jsonl":
            yield file.read_text(errors="replace")
            continue
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)["text"]
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise DataError(f'{file}, line {number}: expected JSON with a "text", got {line[:60]!r}') from error


def load_tokenizer(path: Path) -> Any:
    """A tokenizer saved as JSON by ``tokenizers``.

    Raises:
        DataError: if it is not there, or ``tokenizers`` is missing.
    """
    tokenizers = _tokenizers()
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"cannot read the tokenizer {path}: {error}") from error


def train_tokenizer(path: Path, vocabulary: int, save: Path) -> Any:
    """A byte-level BPE tokenizer of so many tokens, learned from a text and saved."""
    tokenizers = _tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents(path), trainer)
    save.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(save))
    return tokenizer


def encode(path: Path, tokenizer: Any, vocabulary: int, context: int, held_out: float = 0.05) -> ByteText:
    """All documents as one row of tokens, an end token after each where the tokenizer has one; the last part held out.

    Raises:
        DataError: if the tokenizer has more tokens than the model, or the text is too short.
    """
    if tokenizer.get_vocab_size() > vocabulary:
        raise DataError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, and the model {vocabulary}")
    end = tokenizer.token_to_id(END)
    parts = []
    for text in documents(path):
        ids = tokenizer.encode(text).ids
        parts.append(torch.tensor(ids if end is None else [*ids, end], dtype=torch.int32))
    tokens = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)
    return ByteText.split_tokens(tokens.long(), context, held_out, hashlib.sha256(tokens.numpy().tobytes()).hexdigest())


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise DataError("vocabularies need tokenizers: pip install 'sigattn[text]'") from error
    return tokenizers
