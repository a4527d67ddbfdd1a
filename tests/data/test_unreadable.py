"""Unreadable files: the first are named, all are counted."""

import pytest

from sigattn.data.dataset import MAX_NAMED, DataError, UnreadableFiles


def test_many_unreadable_files_take_few_lines(capsys):
    files = UnreadableFiles("recording", 60_000)
    for number in range(25_001):
        files.add(f"{number}.flac", "broken")
        files.add(f"{number}.flac", "broken")  # again, in the next epoch
    said = capsys.readouterr().out.splitlines()
    assert said[:MAX_NAMED] == [f"unreadable recording {number}.flac: broken" for number in range(MAX_NAMED)]
    assert said[MAX_NAMED:] == ["further unreadable recordings are counted, and not named"]
    assert files.summary().startswith("25001 of 60,000 recordings could not be read and were left out: 0.flac, ")


def test_unreadable_majority_is_an_error():
    files = UnreadableFiles("image", 3)
    files.add("a", "broken")
    with pytest.raises(DataError, match="2 of 3 images cannot be read, the last b: broken"):
        files.add("b", "broken")
