"""Tokenizers and packed files."""

import gzip
import json
import os
import sys

import pytest
import torch

from sigattn.data.dataset import DataError
from sigattn.data.documents import iter_documents
from sigattn.data.text import TextData
from sigattn.data.tokens import (
    END,
    find_packed_tokenizer,
    load_packed,
    load_tokenizer,
    pack_corpus,
    tokenize_corpus,
    train_tokenizer,
)
from sigattn.optional import MissingPackageError

pytest.importorskip("tokenizers")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat. " * 40)
    lines = [json.dumps({"text": "the dog sat ö too. " * 20}), json.dumps({"text": "a third one"})]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def every_token(text):
    return [*text.training_tokens.tolist(), *text.held_out_tokens.tolist()]


def test_documents_and_tokens(corpus, tmp_path):
    assert len(list(iter_documents(corpus))) == 3
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "new" / "tokenizer.json")
    again = load_tokenizer(tmp_path / "new" / "tokenizer.json")
    tokens = every_token(tokenize_corpus(corpus, again, 300, seq_len=8, held_out_fraction=0.1))
    assert tokens.count(tokenizer.token_to_id(END)) == 3
    assert tokenizer.decode(tokens) == "".join(iter_documents(corpus))
    assert len(tokens) < 500  # 1,311 characters
    with pytest.raises(DataError, match="the tokenizer has 282 tokens, and the model 256"):
        tokenize_corpus(corpus, tokenizer, 256, seq_len=8)
    with pytest.raises(DataError, match=r"tokens, of which .* are held out: too short"):
        tokenize_corpus(corpus, tokenizer, 300, seq_len=80)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "missing.json")


def test_tokenizer_neither_cuts_nor_pads_documents(corpus, tmp_path):
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "tokenizer.json")
    wanted = tokenizer.encode("the cat sat").ids
    for limit in (1, 50):
        tokenizer.enable_truncation(limit)
        tokenizer.enable_padding(length=limit)
        tokenizer.save(str(tmp_path / "limited.json"))
        assert load_tokenizer(tmp_path / "limited.json").encode("the cat sat").ids == wanted


def test_packed_corpus_is_memory_mapped(corpus, tmp_path):
    for name in ("c.jsonl.gz", "c4-train.00000-of-01024.json.gz"):
        with gzip.open(corpus / name, "wt") as file:
            file.write(json.dumps({"text": "zipped up"}) + "\n")
    assert len(list(iter_documents(corpus))) == 5
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "tokenizer.json")
    count = pack_corpus(corpus, tokenizer, tmp_path / "new" / "corpus.bin")
    text = load_packed(tmp_path / "new" / "corpus.bin", 300, seq_len=8, held_out_fraction=0.1)
    assert len(every_token(text)) == count
    assert tokenizer.decode(every_token(text)) == "".join(iter_documents(corpus))
    tokens, targets = text.batch(3, 4, seed=0)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    with pytest.raises(DataError, match=r"the tokenizer has .* tokens, and the model 256: set model.vocab_size to"):
        load_packed(tmp_path / "new" / "corpus.bin", 256, seq_len=8)
    with pytest.raises(DataError, match="was not written by sigattn pack"):
        load_packed(tmp_path / "tokenizer.json", 300, seq_len=8)


def test_invalid_utf_8(tmp_path):
    """Bytes that are replaced by other characters would change a corpus silently."""
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*latin\.txt as UTF-8 text"):
        list(iter_documents(tmp_path))


def test_too_short_training_part():
    with pytest.raises(DataError, match="at least 91 tokens are needed"):
        TextData(torch.arange(60), 8, "", held_out_fraction=0.9)
    assert len(TextData(torch.arange(91), 8, "", held_out_fraction=0.9).training_tokens) == 10


@pytest.fixture
def stored(corpus, tmp_path):
    pack_corpus(corpus, train_tokenizer(corpus, 300, tmp_path / "tokenizer.json"), tmp_path / "corpus.bin")
    return tmp_path / "corpus.bin"


def test_changed_packed_file_raises(stored):
    content = stored.read_bytes()
    times = stored.stat()
    changed = content[:400] + content[404:408] + content[404:]
    assert len(changed) == len(content)
    assert changed != content
    stored.write_bytes(changed)
    with pytest.raises(DataError, match=r"corpus\.bin has changed since sigattn pack wrote it"):
        load_packed(stored, 300, seq_len=8, held_out_fraction=0.1)
    stored.write_bytes(content)  # the same content again, at another time
    os.utime(stored, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    assert len(load_packed(stored, 300, seq_len=8, held_out_fraction=0.1).training_tokens)


def test_find_packed_tokenizer(stored, corpus, tmp_path):
    own = find_packed_tokenizer(stored)
    assert own == tmp_path / "corpus.bin.tokenizer.json"
    assert load_tokenizer(own).to_str() == load_tokenizer(tmp_path / "tokenizer.json").to_str()
    (tmp_path / "compact.json").write_text(json.dumps(json.loads((tmp_path / "tokenizer.json").read_text())))
    assert find_packed_tokenizer(stored, tmp_path / "compact.json") == own  # the same, written otherwise
    train_tokenizer(corpus, 280, tmp_path / "other.json")
    with pytest.raises(DataError, match=r"packed with another tokenizer than .*: use .*, or name none"):
        find_packed_tokenizer(stored, tmp_path / "other.json")
    (tmp_path / "corpus.bin.json").write_text("{}")
    with pytest.raises(DataError, match=r"corpus\.bin\.json lacks sha256, tokenizer, tokenizer_sha256"):
        find_packed_tokenizer(stored)


def test_parquet(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match="need pyarrow: pip install"):
        list(iter_documents(tmp_path))
    monkeypatch.undo()
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert list(iter_documents(tmp_path)) == ["one", "two"]
