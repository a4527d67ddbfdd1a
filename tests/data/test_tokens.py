"""Vocabularies: learned, saved, and what does not fit."""

import gzip
import json
import os
import sys

import pytest
import torch

from sigattn.data.dataset import DataError
from sigattn.data.text import TextData, TokenText
from sigattn.data.tokens import END, documents, encode, load_tokenizer, pack, packed, packed_tokenizer, train_tokenizer

pytest.importorskip("tokenizers")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat. " * 40)
    lines = [json.dumps({"text": "the dog sat ö too. " * 20}), json.dumps({"text": "a third one"})]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_documents_and_tokens(corpus, tmp_path):
    assert len(list(documents(corpus))) == 3
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "new" / "tokenizer.json")
    again = load_tokenizer(tmp_path / "new" / "tokenizer.json")
    text = encode(corpus, again, 300, context=8, held_out=0.1)
    everything = [*text.training.tolist(), *text.validation.tolist()]
    end = tokenizer.token_to_id(END)
    assert everything.count(end) == 3
    assert tokenizer.decode(everything) == "".join(documents(corpus))
    assert len(everything) < 500  # 1,311 characters


def test_a_packed_corpus_is_read_in_place(corpus, tmp_path):
    with gzip.open(corpus / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "zipped up"}) + "\n")
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "tokenizer.json")
    count = pack(corpus, tokenizer, tmp_path / "new" / "corpus.bin")
    text = packed(tmp_path / "new" / "corpus.bin", 300, context=8, held_out=0.1)
    everything = [*text.training.tolist(), *text.validation.tolist()]
    assert len(everything) == count
    assert tokenizer.decode(everything) == "".join(documents(corpus))
    data = TextData(text, 8)
    tokens, targets = data.batch(3, 4, seed=0)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    with pytest.raises(DataError, match=r"the tokenizer has .* tokens, and the model 256"):
        packed(tmp_path / "new" / "corpus.bin", 256, context=8)
    with (tmp_path / "new" / "corpus.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="should hold"):
        packed(tmp_path / "new" / "corpus.bin", 300, context=8)
    with pytest.raises(DataError, match="was not written by sigattn pack"):
        packed(tmp_path / "tokenizer.json", 300, context=8)
    (corpus / "d.jsonl.gz").write_bytes(b"not zipped")
    with pytest.raises(DataError, match=r"cannot read .*d\.jsonl\.gz"):
        list(documents(corpus))


def test_text_that_is_not_utf_8(tmp_path):
    """Bytes that are replaced by other characters would change a corpus silently."""
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*latin\.txt as UTF-8 text"):
        list(documents(tmp_path))


def test_a_training_part_that_is_too_short():
    with pytest.raises(DataError, match="at least 91 tokens are needed"):
        TokenText.split_tokens(torch.arange(60), 8, 0.9, "")
    assert len(TokenText.split_tokens(torch.arange(91), 8, 0.9, "").training) == 10


@pytest.fixture
def stored(corpus, tmp_path):
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "tokenizer.json")
    pack(corpus, tokenizer, tmp_path / "corpus.bin")
    return tmp_path / "corpus.bin"


def test_a_packed_file_that_changed_at_equal_size_is_refused(stored):
    content = stored.read_bytes()
    times = stored.stat()
    changed = content[:400] + content[404:408] + content[404:]
    assert len(changed) == len(content)
    assert changed != content
    stored.write_bytes(changed)
    with pytest.raises(DataError, match=r"corpus\.bin has changed since sigattn pack wrote it"):
        packed(stored, 300, context=8, held_out=0.1)
    stored.write_bytes(content)  # the same content again, at another time
    os.utime(stored, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    assert len(packed(stored, 300, context=8, held_out=0.1).training)


def test_the_tokenizer_of_a_packed_file(stored, corpus, tmp_path):
    own = packed_tokenizer(stored)
    assert own == tmp_path / "corpus.bin.tokenizer.json"
    assert load_tokenizer(own).to_str() == load_tokenizer(tmp_path / "tokenizer.json").to_str()
    (tmp_path / "compact.json").write_text(json.dumps(json.loads((tmp_path / "tokenizer.json").read_text())))
    assert packed_tokenizer(stored, tmp_path / "compact.json") == own  # the same, written otherwise
    train_tokenizer(corpus, 280, tmp_path / "other.json")
    with pytest.raises(DataError, match=r"packed with another tokenizer than .*: use .*, or name none"):
        packed_tokenizer(stored, tmp_path / "other.json")
    about = json.loads((tmp_path / "corpus.bin.json").read_text())
    old = {name: about[name] for name in ("tokens", "vocabulary", "sha256")}
    (tmp_path / "corpus.bin.json").write_text(json.dumps(old))
    assert packed_tokenizer(stored) is None
    assert packed_tokenizer(stored, tmp_path / "tokenizer.json") == tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"other\.json has 280 tokens"):
        packed_tokenizer(stored, tmp_path / "other.json")
    (tmp_path / "corpus.bin.json").write_text("{}")
    with pytest.raises(DataError, match=r"corpus\.bin\.json lacks sha256, tokens, vocabulary"):
        packed_tokenizer(stored)


def test_parquet(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs pyarrow: pip install"):
        list(documents(tmp_path))
    monkeypatch.undo()
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert list(documents(tmp_path)) == ["one", "two"]
    parquet.write_table(arrow.table({"words": ["one"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match='no column "text", but words'):
        list(documents(tmp_path))


def test_what_does_not_fit(corpus, tmp_path):
    tokenizer = train_tokenizer(corpus, 300, tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="the tokenizer has 282 tokens, and the model 256"):
        encode(corpus, tokenizer, 256, context=8)
    with pytest.raises(DataError, match=r"tokens, of which .* are held out: too short"):
        encode(corpus, tokenizer, 300, context=80)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "missing.json")
    with pytest.raises(DataError, match="no such text"):
        list(documents(tmp_path / "nowhere"))
    (corpus / "c.jsonl").write_text('{"words": 1}\n')
    with pytest.raises(DataError, match=r'c\.jsonl, line 1: expected JSON with a "text"'):
        list(documents(corpus))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"looked for \.txt"):
        list(documents(empty))
