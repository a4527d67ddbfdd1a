"""Vocabularies: learned, saved, and what does not fit."""

import json

import pytest

from sigattn.data.dataset import DataError
from sigattn.data.tokens import END, documents, encode, load_tokenizer, train_tokenizer

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
