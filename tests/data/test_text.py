"""Text: sources, splits, batches and errors; tokenizers, packed files and streams."""

import gzip
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from sigattn.data.dataset import DataError
from sigattn.data.documents import hub_documents, iter_documents
from sigattn.data.text import StreamedText, TextData, load_text
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
from sigattn.recipes import find_recipe, load_dataset


def test_text_of_cpython_a_file_and_a_folder(tmp_path):
    text = load_text()
    assert len(text) > 300_000
    assert b'The "assert" statement' in text
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"no text")
    assert load_text(tmp_path) == b"first\nsecond"
    assert load_text(tmp_path / "b.txt") == b"second"


def test_unusable_text(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "folder").mkdir()
    for name in ("a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet", "a.bin"):
        (tmp_path / name).write_bytes(b"its bytes are not its text")
    for path, message in (
        *((file, "is no plain text") for file in tmp_path.glob("a.*")),
        (tmp_path / "missing", "no such text file or folder"),
        (tmp_path / "empty.txt", "is empty"),
        (tmp_path / "folder", "looked for .txt, .md, .rst, .py files"),
    ):
        with pytest.raises(DataError, match=re.escape(message)) as error:
            load_text(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fraction", "least"), [(0.1, 91), (0.9, 91), (0.5, 19)])
def test_the_end_is_held_out_and_no_part_is_shorter_than_the_context(fraction, least):
    with pytest.raises(DataError, match=f"too short for a context of 8 .at least {least} tokens are needed"):
        TextData(torch.arange(least * 2 // 3), 8, "", held_out_fraction=fraction)
    data = TextData(torch.arange(least), 8, "", held_out_fraction=fraction)
    assert len(data.held_out_tokens) == int(fraction * least)
    assert torch.equal(torch.cat([data.training_tokens, data.held_out_tokens]), torch.arange(least))


def test_the_last_held_out_window_ends_with_the_text():
    """Also where float32 rounds its start up, to a number past the end."""
    for last in (1000, 2**24 + 3, 2**26 - 1):
        tokens = torch.zeros(1, dtype=torch.int64).expand(2 * (last + 9))  # takes no memory
        ((windows, _),) = TextData(tokens, 8, "hash", held_out=5, held_out_fraction=0.5).validation(5)
        assert windows.shape == (5, 8)


def test_batches_are_windows_and_depend_on_seed_and_step_alone():
    text = TextData.from_bytes(bytes(range(250)), 8)
    assert text.fingerprint == hashlib.sha256(bytes(range(250))).hexdigest()
    tokens, targets = text.batch(3, 5, seed=0)
    assert tokens.shape == (5, 8)
    assert torch.equal(targets, tokens + 1)
    torch.manual_seed(99)
    assert torch.equal(text.batch(3, 5, seed=0)[0], tokens)
    others = [text.batch(step, 5, seed)[0] for step, seed in ((4, 0), (3, 1), (2, 1))]
    assert not any(torch.equal(other, tokens) for other in others)  # nor does it depend on their sum
    seen = {int(t) for step in range(200) for batch in text.batch(step, 8, seed=0) for t in batch.flatten()}
    assert seen == set(range(225))  # every training byte, and none that is held out


@pytest.fixture
def corpus(tmp_path):
    pytest.importorskip("tokenizers")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat. " * 400)
    lines = [json.dumps({"text": "the dog sat ö too. " * 20}), json.dumps({"text": "a third one"})]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("c.jsonl.gz", "c4-train.00000-of-01024.json.gz"):
        with gzip.open(folder / name, "wt") as file:
            file.write(json.dumps({"text": "zipped up"}) + "\n")
    return folder


def test_a_corpus_is_tokenised_or_packed_and_memory_mapped(corpus, tmp_path):
    documents, file, packed = list(iter_documents(corpus)), tmp_path / "new" / "t.json", tmp_path / "packed" / "x.bin"
    assert len(documents) == 5
    tokenizer = train_tokenizer(corpus, 300, file)
    count = pack_corpus(corpus, load_tokenizer(file), packed)
    for text in (tokenize_corpus(corpus, file, 300, seq_len=8), load_packed(packed, 300, seq_len=8)):
        tokens = [*text.training_tokens.tolist(), *text.held_out_tokens.tolist()]
        assert tokens.count(tokenizer.token_to_id(END)) == 5
        assert tokenizer.decode(tokens) == "".join(documents)
        assert len(tokens) == count < len("".join(documents)) / 2
        tokens, targets = text.batch(3, 4, seed=0)
        assert tokens.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for load, source in ((tokenize_corpus, corpus), (load_packed, packed)):
        more = (file,) if load is tokenize_corpus else ()
        with pytest.raises(DataError, match=r"the tokenizer has .* tokens, and the model 256: set model.vocab_size to"):
            load(source, *more, 256, 8)
        with pytest.raises(DataError, match=r"tokens, of which .* are held out: too short"):
            load(source, *more, 300, 8000)
    with pytest.raises(DataError, match="was not written by sigattn pack"):
        load_packed(file, 300, seq_len=8)
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


def test_a_packed_file_or_its_tokenizer_that_has_changed_raises(corpus, tmp_path):
    stored, tokenizer = tmp_path / "corpus.bin", tmp_path / "tokenizer.json"
    pack_corpus(corpus, train_tokenizer(corpus, 300, tokenizer), stored)
    content, times = stored.read_bytes(), stored.stat()
    stored.write_bytes(content[:400] + content[404:408] + content[404:])
    with pytest.raises(DataError, match=r"corpus\.bin has changed since sigattn pack wrote it"):
        load_packed(stored, 300, seq_len=8)
    stored.write_bytes(content)  # the same content again, at another time
    os.utime(stored, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    assert len(load_packed(stored, 300, seq_len=8).training_tokens)
    own = find_packed_tokenizer(stored)
    assert own == tmp_path / "corpus.bin.tokenizer.json"
    assert load_tokenizer(own).to_str() == load_tokenizer(tokenizer).to_str()
    (tmp_path / "compact.json").write_text(json.dumps(json.loads(tokenizer.read_text())))
    assert find_packed_tokenizer(stored, tmp_path / "compact.json") == own  # the same, written otherwise
    train_tokenizer(corpus, 280, tmp_path / "other.json")
    with pytest.raises(DataError, match=r"packed with another tokenizer than .*: use .*, or name none"):
        load_packed(stored, 300, 8, tmp_path / "other.json")
    (tmp_path / "corpus.bin.json").write_text("{}")
    with pytest.raises(DataError, match=r"corpus\.bin\.json lacks sha256, tokenizer, tokenizer_sha256"):
        find_packed_tokenizer(stored)


def test_invalid_utf_8_is_not_replaced(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*latin\.txt as UTF-8 text"):
        list(iter_documents(tmp_path))


def test_parquet(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match="need pyarrow: pip install"):
        list(iter_documents(tmp_path))
    monkeypatch.undo()
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert list(iter_documents(tmp_path)) == ["one", "two"]


DOCUMENTS = [f"document {i}: " + "abc " * (i % 5) for i in range(60)]


def codes(text):
    return [ord(c) for c in text]


def stream(held_out=4):
    return StreamedText(lambda: iter(DOCUMENTS), "test", codes, seq_len=16, held_out=held_out)


def test_windows_of_a_stream_follow_the_text_and_a_resumed_stream_continues():
    data, row = stream(), codes("".join(DOCUMENTS))
    held = torch.cat([tokens for tokens, _ in data.validation(3)])
    assert held.flatten().tolist() == row[: 4 * 16]
    windows = (len(row) - 1) // 16 - 4
    steps = list(itertools.islice(data.batches(0, 3, seed=0), windows))  # three times round
    seen = torch.cat([tokens for tokens, _ in steps])
    assert seen[:windows].flatten().tolist() == row[4 * 16 :][: windows * 16]
    assert torch.equal(seen[:windows], seen[windows : 2 * windows])
    assert all(torch.equal(tokens[:, 1:], targets[:, :-1]) for tokens, targets in steps)
    for step in (0, 1, 7, windows - 1):
        for shard in ((0, 1), (0, 2), (1, 2)):
            found = next(data.batches(step, 3, seed=0, shard=shard))
            for part, whole in zip(found, steps[step], strict=True):
                assert torch.equal(part, whole[shard[0] :: shard[1]])


def test_fewer_windows_than_are_held_out():
    """Such a text can be evaluated, in batches of any size, and does not train."""
    count = (len("".join(DOCUMENTS)) - 1) // 16
    for size in (3, count, 1000):
        assert sum(len(tokens) for tokens, _ in stream(held_out=1000).validation(size)) == count
    with pytest.raises(DataError, match="test is too short"):
        stream(held_out=1000).batch(0, 1, seed=0)


def test_data_set_of_the_hub(tmp_path, monkeypatch):
    """In a folder, as the Hub lays it out."""
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_OFFLINE", True)
    train = tmp_path / "hub" / "train.jsonl"
    train.parent.mkdir()
    train.write_text("\n".join(json.dumps({"text": d}) for d in DOCUMENTS))
    hub, vocabulary = Path(f"hf:{tmp_path / 'hub'}"), tmp_path / "t.json"
    assert list(iter_documents(hub)) == DOCUMENTS
    tokenizer = train_tokenizer(hub, 280, vocabulary)
    assert pack_corpus(hub, tokenizer, tmp_path / "p.bin", limit=100) < 130
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=16)
    data = load_dataset(recipe, hub)
    assert data.batch(0, 2, seed=0)[0].shape == (2, 16)
    assert bytes(next(iter(data.validation(1)))[0][0].tolist()).decode() == (DOCUMENTS[0] + "\n\n" + DOCUMENTS[1])[:16]
    data = load_dataset(recipe.with_transformer(vocab_size=280), hub, tokenizer=vocabulary)
    whole = [t for tokens, _ in data.validation(64) for t in tokens.flatten().tolist()]
    assert tokenizer.decode(whole).startswith(DOCUMENTS[0] + DOCUMENTS[1])
    assert tokenizer.token_to_id(END) in whole
    with pytest.raises(DataError, match="the tokenizer has 280 tokens, and the model 256"):
        load_dataset(recipe, hub, tokenizer=vocabulary)
    for name in ("hf:missing/missing", f"{hub}:nosuch"):
        with pytest.raises(DataError, match=f"cannot read the data set {name}"):
            list(hub_documents(Path(name)))
    train.write_text(json.dumps({"content": "x"}))
    with pytest.raises(DataError, match='no "text", but content'):
        list(hub_documents(hub))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sigattn\[text\]'"):
        list(hub_documents(hub))
