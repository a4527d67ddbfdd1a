"""``python -m benchmarks.compatibility``: what it stores. The comparisons are tested in tests/integrations."""

import pytest

from benchmarks.compatibility import __main__ as command
from benchmarks.compatibility import page
from tests.test_mistakes import USAGE, mistake

PAGE = "# Page\n\n<!-- library: generated -->\nold\n<!-- library: end -->\n"


def row(architecture, status="exact", why=""):
    return {"architecture": architecture, "status": status, "why": why}


def test_results_replace_those_of_the_same_architectures_or_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    (tmp_path / "compatibility").mkdir()
    (tmp_path / "compatibility/library.json").write_text('{"library": "library 1", "results": []}')
    page.PAGE.write_text(PAGE)

    def stored(code, *rows, **options):
        with pytest.raises(SystemExit) as stop:
            command._report("library", "library 2", iter(rows), write=True, **options)
        assert stop.value.code == code
        assert page.section_of_page("library") == page.table("library")
        assert page.PAGE.read_text() == PAGE.replace("old", page.table("library"))
        return {name: row["status"] for name, row in page.results("library").items()}

    assert stored(0, row("b"), row("a"), complete=True) == {"a": "exact", "b": "exact"}
    missing = row("b", "not built", "ImportError: torchvision")
    assert stored(1, row("a", "wrong", "error 1"), missing, complete=False) == {"a": "wrong", "b": "exact"}
    assert stored(0, row("c", "refused"), missing, complete=True) == {"b": "exact", "c": "refused"}
    assert stored(1, row("a", "failed"), complete=True) == {"a": "failed"}
    assert "a                                wrong               error 1" in capsys.readouterr().out


def test_conversions_have_no_table(capsys):
    mistake(["transformers", "--write", "--convert"], USAGE, "has no table of conversions", capsys, command.main)
