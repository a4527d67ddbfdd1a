"""Documents of a text file, a folder, or a data set of Hugging Face."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from sigattn.data.dataset import DataError
from sigattn.optional import require

PLAIN_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz")
SUFFIXES = (*PLAIN_SUFFIXES, *JSON_SUFFIXES, ".parquet")
HUB = "hf:"


def find_text_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a file itself, or the files below a folder with one of the suffixes by path; raise if there are none."""
    if not path.exists():
        raise DataError(f"no such text file or folder: {path}")
    files = sorted(p for p in path.rglob("*") if p.name.endswith(suffixes)) if path.is_dir() else [path]
    if not files:
        raise DataError(f"looked for {', '.join(suffixes)} files in {path} and found none")
    return files


def iter_documents(path: Path) -> Iterator[str]:
    """Iterate over the documents of a file, a folder (sorted by path) or a Hugging Face data set.

    A document is a text file, the "text" of a line of a .jsonl, .jsonl.gz or .json.gz file (the formats of C4 and
    RedPajama), the "text" of a row of a .parquet file, or a sample of a data set such as
    ``hf:allenai/c4:realnewslike``.

    Raises DataError if there are no files, a file cannot be read, a text is not UTF-8, or all documents are empty;
    MissingPackageError if pyarrow or ``datasets`` is missing, and needed.
    """
    is_empty = True
    if is_streamed(path):
        documents = hub_documents(path)
    else:
        documents = itertools.chain.from_iterable(map(_documents_of_file, find_text_files(path, SUFFIXES)))
    for document in documents:
        is_empty = is_empty and not document
        yield document
    if is_empty:
        raise DataError(f"{path} is empty")


def _documents_of_file(file: Path) -> Iterator[str]:
    if file.name.endswith(JSON_SUFFIXES):
        yield from _json_lines(file)
    elif file.suffix == ".parquet":
        yield from _parquet(file)
    else:
        try:
            yield file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {file} as UTF-8 text: {error}") from error


def _json_lines(file: Path) -> Iterator[str]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    text = None
                if not isinstance(text, str):
                    raise DataError(f'{file}, line {number}: expected JSON with a "text", got {line[:60]!r}')
                yield text
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"cannot read {file}: {error}") from error


def _parquet(file: Path) -> Iterator[str]:
    pyarrow = require("pyarrow", ".parquet files", "'sigattn[text]'")
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise DataError(f'{file} has no column "text", but {", ".join(table.schema_arrow.names)}')
        if (kind := str(table.schema_arrow.field("text").type)) not in ("string", "large_string", "string_view"):
            raise DataError(f'the column "text" of {file} must hold strings, got {kind}')
        for batch in table.iter_batches(columns=["text"]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error


def is_streamed(path: Path | None) -> bool:
    """Return True if a path names a Hugging Face data set: ``hf:NAME`` or ``hf:NAME:CONFIGURATION``."""
    return path is not None and str(path).startswith(HUB)


def hub_documents(path: Path) -> Iterator[str]:
    """Stream the "text" of each sample of a data set's "train" split, such as ``hf:allenai/c4:realnewslike``.

    After ``hf:`` may also be a folder of .jsonl or .parquet files. Raises DataError if the data set cannot be read.
    """
    datasets = require("datasets", "data sets of Hugging Face", "'sigattn[text]'")
    name, _, configuration = str(path).removeprefix(HUB).partition(":")
    if not name.strip("/"):
        raise DataError(f"{path} names no data set: write hf:NAME or hf:NAME:CONFIGURATION")
    try:
        for sample in datasets.load_dataset(name, configuration or None, split="train", streaming=True):
            if not isinstance(sample.get("text"), str):
                raise DataError(f'the samples of {path} have no "text", but {", ".join(sample)}')
            yield sample["text"]
    except (OSError, ValueError, RuntimeError) as error:  # includes the Hub's own errors
        reason = " ".join(str(error).split())
        raise DataError(f"cannot read the data set {path}: {type(error).__name__}: {reason}") from error
