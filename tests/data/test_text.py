"""Text: sources, splits, batches and errors."""

import hashlib
import re

import pytest
import torch

from sigattn.data.dataset import DataError
from sigattn.data.text import TextData, load_text


def test_default_text_is_cpythons_documentation():
    text = load_text()
    assert len(text) > 300_000
    assert b'The "assert" statement' in text


def test_a_file_and_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"no text")
    assert load_text(tmp_path) == b"first\nsecond"
    assert load_text(tmp_path / "b.txt") == b"second"


def test_unusable_text(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "folder").mkdir()
    for name in ("a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet", "c.bin"):
        (tmp_path / name).write_bytes(b"its bytes are not its text")
    for path, message in (
        *((file, "is no plain text") for file in tmp_path.glob("a.*")),
        (tmp_path / "c.bin", "is a file of tokens (sigattn pack), and bytes are needed here"),
        (tmp_path / "missing", "no such text file or folder"),
        (tmp_path / "empty.txt", "is empty"),
        (tmp_path / "folder", "looked for .txt, .md, .rst, .py files"),
    ):
        with pytest.raises(DataError, match=re.escape(message)) as error:
            load_text(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_text_shorter_than_the_context():
    with pytest.raises(DataError, match="too short for a context of 256"):
        TextData.from_bytes(b"x" * 2000, 256)
    TextData.from_bytes(b"x" * 2600, 256)


def test_the_end_is_held_out_and_other_training_parts_have_other_fingerprints():
    """A run cannot be resumed with held-out text in its training part; default splits have the hash of the text."""
    text = bytes(range(200)) * 5
    default, half = (TextData.from_bytes(text, 8, held_out_fraction=fraction) for fraction in (0.1, 0.5))
    assert len(default.held_out_tokens) == 100
    assert bytes(default.training_tokens.tolist()) + bytes(default.held_out_tokens.tolist()) == text
    assert default.fingerprint == hashlib.sha256(text).hexdigest()
    assert half.fingerprint != default.fingerprint


def test_the_last_held_out_window_ends_with_the_text():
    """Also where float32 rounds its start up, to a number past the end."""
    for last in (1000, 2**24 + 3, 2**26 - 1):
        tokens = torch.zeros(1, dtype=torch.int64).expand(2 * (last + 9))  # takes no memory
        ((windows, _),) = TextData(tokens, 8, "hash", held_out=5, held_out_fraction=0.5).validation(5)
        assert windows.shape == (5, 8)


def test_batches_are_windows_and_depend_on_seed_and_step_alone():
    text = TextData.from_bytes(bytes(range(250)), 8)
    tokens, targets = text.batch(3, 5, seed=0)
    assert tokens.shape == (5, 8)
    assert torch.equal(targets, tokens + 1)
    assert targets.max() < len(text.training_tokens)
    torch.manual_seed(99)
    assert torch.equal(text.batch(3, 5, seed=0)[0], tokens)
    others = [text.batch(step, 5, seed)[0] for step, seed in ((4, 0), (3, 1), (2, 1))]
    assert not any(torch.equal(other, tokens) for other in others)  # nor does it depend on their sum


def test_every_training_byte_can_be_drawn():
    text = TextData.from_bytes(bytes(range(100)), 4)
    seen = {int(t) for step in range(200) for batch in text.batch(step, 8, seed=0) for t in batch.flatten()}
    assert seen == set(range(90))
