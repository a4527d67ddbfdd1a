"""Numbers of documents and tokens shown while a corpus is read."""

import io

import pytest
from rich.console import Console

from sigattn import cli
from sigattn.cli.progress import CorpusProgress
from sigattn.data.tokens import load_tokenizer, pack_corpus, train_tokenizer

pytest.importorskip("tokenizers")


@pytest.mark.parametrize("terminal", [False, True])
def test_numbers_are_shown(terminal, monkeypatch):
    monkeypatch.setattr(CorpusProgress, "SECONDS", 0.0)
    monkeypatch.setattr(CorpusProgress, "REFRESH", 0.0)
    out = io.StringIO()
    with CorpusProgress(Console(file=out, force_terminal=terminal, width=100), "pack", limit=4000) as display:
        display.show(1, 500)
        display.show(1200, 3500)
    assert "1,200 documents, 3,500 tokens" in out.getvalue()
    assert ("pack" in out.getvalue()) == terminal  # the bar's title


def test_lines_are_few(monkeypatch):
    out = io.StringIO()
    with CorpusProgress(Console(file=out, force_terminal=False), "pack") as display:
        for count in range(1000):
            display.show(count, 0)
    assert not out.getvalue().strip()  # ten seconds are not over


def test_both_commands_report_every_document(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text("the cat sat on the mat. " * 20)
    seen = []
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(tmp_path / "text", 300, tokenizer, lambda *numbers: seen.append(numbers))
    assert seen == [(1, 0), (2, 0), (3, 0)]
    seen.clear()
    count = pack_corpus(
        tmp_path / "text", load_tokenizer(tokenizer), tmp_path / "x.bin", None, lambda *n: seen.append(n)
    )
    assert [documents for documents, _ in seen] == [1, 2, 3]
    assert seen[-1][1] == count
    monkeypatch.setattr(CorpusProgress, "SECONDS", 0.0)
    arguments = ["--data", str(tmp_path / "text"), "--tokenizer", str(tokenizer), "--save", str(tmp_path / "y.bin")]
    cli.main(["pack", *arguments])
    assert f"3 documents, {count:,} tokens" in capsys.readouterr().out
