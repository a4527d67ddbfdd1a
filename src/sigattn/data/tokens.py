"""Tokenised text: tokenizers (Hugging Face's ``tokenizers``), and files of tokens packed from a corpus.

A corpus of any size is packed once into a file of tokens, which is then memory-mapped. Seed and step determine the
windows drawn from it, so that a run can be resumed exactly.
"""

import array
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sigattn.data.dataset import DataError
from sigattn.data.documents import iter_documents
from sigattn.data.text import TextData
from sigattn.files import FileFormatError, add_path_to_errors, file_sha256, read_json_object, replacing, write_text
from sigattn.optional import require
from sigattn.validation import check_at_least, check_output_file

END = "<|end|>"  # between documents
MIN_VOCAB_SIZE = 257  # 256 bytes and END


def load_tokenizer(path: Path) -> Any:
    """Load a tokenizer saved as JSON by ``tokenizers``; truncation and padding, if it has any, are turned off.

    Raises DataError if the file cannot be read, MissingPackageError if ``tokenizers`` is missing.
    """
    tokenizers = require("tokenizers", "vocabularies", "'sigattn[text]'")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"cannot read the tokenizer {path}: {error}") from error
    tokenizer.no_truncation()  # it would silently cut documents, e.g. at the 512 tokens of an encoder
    tokenizer.no_padding()
    return tokenizer


def make_byte_tokenizer() -> Any:
    """Create the tokenizer of a language model without one: a token for each byte of UTF-8, whose number it is."""
    tokenizers = require("tokenizers", "vocabularies", "'sigattn[text]'")
    # ByteLevel writes a byte as a character: those of Latin-1 that are printable as themselves, others from 256 on
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    tokens = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


Progress = Callable[[int, int], None]  # called with the numbers of documents read and of tokens written so far


def train_tokenizer(path: Path, vocab_size: int, save: Path, on_progress: Progress = lambda *_: None) -> Any:
    """Train a byte-level BPE tokenizer on a text and save it as JSON.

    Raises DataError if the text cannot be read, SettingsError if ``vocab_size`` is below ``MIN_VOCAB_SIZE`` or ``save``
    is a folder or the text.
    """
    check_at_least(MIN_VOCAB_SIZE, {"vocab_size": vocab_size})
    check_output_file(save, path)
    tokenizers = require("tokenizers", "vocabularies", "'sigattn[text]'")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )

    def documents() -> Iterator[str]:
        for count, text in enumerate(iter_documents(path), 1):
            on_progress(count, 0)
            yield text

    tokenizer.train_from_iterator(documents(), trainer)
    save.parent.mkdir(parents=True, exist_ok=True)
    write_text(save, tokenizer.to_str(pretty=True))
    return tokenizer


def tokenize_corpus(path: Path, tokenizer: Path, vocab_size: int, seq_len: int) -> TextData:
    """Tokenise all documents into one row in memory, and hold out its last twentieth.

    Each document is followed by the end token if the tokenizer has one. Raises DataError if the tokenizer has more
    tokens than the model, or the text is too short.
    """
    encode = document_encoder(tokenizer, vocab_size)
    tokens = torch.cat([torch.tensor(encode(text), dtype=torch.int32) for text in iter_documents(path)])
    fingerprint = f"{hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}, tokenizer {file_sha256(tokenizer)}"
    return TextData(tokens, seq_len, fingerprint, held_out_fraction=0.05, vocab_size=vocab_size)


def document_encoder(tokenizer: Path, vocab_size: int) -> Callable[[str], list[int]]:
    """Return a function from a document to its tokens, including the end token if the tokenizer has one."""
    loaded = load_tokenizer(tokenizer)
    _check_vocabulary(loaded.get_vocab_size(), vocab_size)
    return functools.partial(_encode, loaded, loaded.token_to_id(END))


def _check_vocabulary(tokens: int, vocab_size: int) -> None:
    if tokens > vocab_size:
        raise DataError(
            f"the tokenizer has {tokens} tokens, and the model {vocab_size}: set model.vocab_size to {tokens} or more"
        )


def _encode(tokenizer: Any, end: int | None, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text).ids
    return ids if end is None else [*ids, end]


def pack_corpus(
    path: Path, tokenizer: Any, save: Path, limit: int | None = None, on_progress: Progress = lambda *_: None
) -> int:
    """Tokenise all documents into one file of 32-bit integers and return the number of tokens.

    Each document is followed by the end token if the tokenizer has one. Two files are written next to ``save`` and
    needed to read it: NAME.json (sizes and hashes) and NAME.tokenizer.json.

    Args:
        path: the corpus, as in ``iter_documents``; DataError is raised if it cannot be read.
        tokenizer: the tokenizer.
        save: the file to write, NAME; usually ends in .bin. SettingsError is raised for a folder or the corpus.
        limit: stop after the document that reaches this number of tokens.
        on_progress: called after each document.
    """
    check_output_file(save, path)
    end, count, digest = tokenizer.token_to_id(END), 0, hashlib.sha256()
    save.parent.mkdir(parents=True, exist_ok=True)
    with replacing(save) as unfinished:
        with add_path_to_errors(unfinished), unfinished.open("wb") as file:
            for number, text in enumerate(iter_documents(path), 1):
                row = array.array("i", _encode(tokenizer, end, text)).tobytes()
                file.write(row)
                digest.update(row)
                count += len(row) // 4
                on_progress(number, count)
                if limit is not None and count >= limit:
                    break
        vocabulary = save.with_name(save.name + ".tokenizer.json")
        write_text(vocabulary, tokenizer.to_str(pretty=True))
        about = {
            "tokens": count,
            "vocab_size": tokenizer.get_vocab_size(),
            "sha256": digest.hexdigest(),
            "mtime_ns": unfinished.stat().st_mtime_ns,
            "tokenizer": vocabulary.name,
            "tokenizer_sha256": file_sha256(vocabulary),
        }
        write_text(save.with_name(save.name + ".json"), json.dumps(about) + "\n")
    return count


def load_packed(path: Path, vocab_size: int, seq_len: int, tokenizer: Path | None = None) -> TextData:
    """Return the memory-mapped text of a file that ``pack_corpus`` wrote, with its last 1/200 held out.

    If the file's modification time differs from the recorded one, its hash is compared. Raises DataError if the file
    was not written by ``pack_corpus`` or has changed since, its tokenizer is missing, has changed, has more tokens than
    the model or differs from ``tokenizer``, or the text is too short.
    """
    about = _about(path)
    tokenizer_sha256 = file_sha256(find_packed_tokenizer(path, tokenizer))
    status = path.stat()
    if status.st_size != 4 * about["tokens"]:
        raise DataError(f"{path} should hold {about['tokens']} tokens of 4 bytes, and has {status.st_size} bytes")
    _check_vocabulary(about["vocab_size"], vocab_size)
    if status.st_mtime_ns != about.get("mtime_ns") and file_sha256(path) != about["sha256"]:
        raise DataError(
            f"{path} has changed since sigattn pack wrote it (its SHA-256 is not that in {path.name}.json): pack again"
        )
    tokens = torch.from_file(str(path), shared=False, size=about["tokens"], dtype=torch.int32)
    fingerprint = f"{about['sha256']}, tokenizer {tokenizer_sha256}"
    return TextData(tokens, seq_len, fingerprint, held_out_fraction=0.005, vocab_size=vocab_size)


def find_packed_tokenizer(path: Path, expected: Path | None = None) -> Path:
    """Return the tokenizer of a packed file; raise DataError if it is missing, has changed or is not ``expected``."""
    about = _about(path)
    tokenizer = path.with_name(Path(about["tokenizer"]).name)
    if not tokenizer.exists() or file_sha256(tokenizer) != about["tokenizer_sha256"]:
        raise DataError(f"the tokenizer of {path}, {tokenizer}, is missing or has changed: pack again, or restore it")
    if expected is not None and load_tokenizer(expected).to_str() != load_tokenizer(tokenizer).to_str():
        raise DataError(f"{path} was packed with another tokenizer than {expected}: use {tokenizer}, or name none")
    return tokenizer


def _about(path: Path) -> dict[str, Any]:
    """Read the description that ``pack_corpus`` wrote next to a file."""
    kinds: dict[str, Any] = {"tokens": int, "vocab_size": int, "sha256": str, "tokenizer": str, "tokenizer_sha256": str}
    try:
        about = read_json_object(path.with_name(path.name + ".json"), **kinds)
        path.stat()
    except (OSError, FileFormatError) as error:
        raise DataError(f"{path} was not written by sigattn pack, or by another version: {error}") from error
    return about
