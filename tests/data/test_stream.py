"""Streamed text: order of windows, resuming, held-out windows, unreadable data sets."""

import itertools
import json
import sys

import pytest
import torch

from sigattn.data.dataset import DataError
from sigattn.data.documents import hub_documents, iter_documents
from sigattn.data.text import StreamedText
from sigattn.data.tokens import END, pack_corpus, train_tokenizer
from sigattn.optional import MissingPackageError
from sigattn.recipes import datasets, find_recipe

pytest.importorskip("datasets")
DOCUMENTS = [f"document {i}: " + "abc " * (i % 5) for i in range(60)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set as the Hub lays it out, in a folder."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in DOCUMENTS))
    return f"hf:{folder}"


def codes(text):
    return [ord(c) for c in text]


def stream(held_out=4):
    return StreamedText(lambda: iter(DOCUMENTS), "test", codes, seq_len=16, held_out=held_out)


def test_windows_in_order_and_held_out_windows():
    data = stream()
    row = codes("".join(DOCUMENTS))
    held = torch.cat([tokens for tokens, _ in data.validation(3)])
    assert held.flatten().tolist() == row[: 4 * 16]
    batches = itertools.islice(data.batches(0, 2, seed=0), 5)
    for i, (tokens, targets) in enumerate(batches):
        start = (4 + 2 * i) * 16
        assert tokens.flatten().tolist() == row[start : start + 32]
        assert targets.flatten().tolist() == row[start + 1 : start + 33]


def test_resumed_stream_continues():
    data = stream()
    windows = (len("".join(DOCUMENTS)) - 1) // 16 - 4
    steps = list(itertools.islice(data.batches(0, 3, seed=0), windows))  # three times round
    for step in (0, 1, 7, windows - 1):
        for shard in ((0, 1), (0, 2), (1, 2)):
            found = next(data.batches(step, 3, seed=0, shard=shard))
            for part, whole in zip(found, steps[step], strict=True):
                assert torch.equal(part, whole[shard[0] :: shard[1]])
    first, again = steps[0][0][0], torch.cat([tokens for tokens, _ in steps])[windows]
    assert torch.equal(first, again)
    held = {tuple(row.tolist()) for tokens, _ in data.validation(4) for row in tokens}
    assert not any(tuple(row.tolist()) in held for tokens, _ in steps for row in tokens)


def test_fewer_windows_than_are_held_out():
    """Such a text can be evaluated, in batches of any size, and does not train."""
    count = (len("".join(DOCUMENTS)) - 1) // 16
    for size in (3, count, 1000):
        assert sum(len(tokens) for tokens, _ in stream(held_out=1000).validation(size)) == count
    with pytest.raises(DataError, match="test is too short"):
        stream(held_out=1000).batch(0, 1, seed=0)


def test_data_set_of_the_hub(hub, tmp_path):
    hub_path = datasets.Path(hub)
    assert list(iter_documents(hub_path)) == DOCUMENTS
    tokenizer = train_tokenizer(hub_path, 280, tmp_path / "t.json")
    assert pack_corpus(hub_path, tokenizer, tmp_path / "p.bin", limit=100) < 130
    recipe = find_recipe("lm-1b-2k-tiny").with_transformer(max_seq_len=16)
    data = datasets.load_dataset(recipe, hub_path)
    tokens, _ = data.batch(0, 2, seed=0)
    assert bytes(next(iter(data.validation(1)))[0][0].tolist()).decode() == (DOCUMENTS[0] + "\n\n" + DOCUMENTS[1])[:16]
    assert tokens.shape == (2, 16)
    wide = recipe.with_transformer(vocab_size=280)
    data = datasets.load_dataset(wide, hub_path, tokenizer=tmp_path / "t.json")
    whole = [t for tokens, _ in data.validation(64) for t in tokens.flatten().tolist()]
    assert tokenizer.decode(whole).startswith(DOCUMENTS[0] + DOCUMENTS[1])
    assert tokenizer.token_to_id(END) in whole
    with pytest.raises(DataError, match="the tokenizer has 280 tokens, and the model 256"):
        datasets.load_dataset(recipe, hub_path, tokenizer=tmp_path / "t.json")


def test_unreadable_data_sets_raise(hub, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="cannot read the data set hf:missing/missing"):
        list(hub_documents(datasets.Path("hf:missing/missing")))
    with pytest.raises(DataError, match="cannot read the data set"):
        list(hub_documents(datasets.Path(hub + ":nosuch")))
    (tmp_path / "hub" / "train.jsonl").write_text(json.dumps({"content": "x"}))
    with pytest.raises(DataError, match='no "text", but content'):
        list(hub_documents(datasets.Path(hub)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sigattn\[text\]'"):
        list(hub_documents(datasets.Path(hub)))
