"""``python -m benchmarks``: its help, its results and its mistakes."""

import dataclasses
import re
import typing

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from tests.test_mistakes import DATA, USAGE, mistake


@pytest.mark.parametrize(("command", "expected"), [("", "NAME --help"), ("cpu", " options ")])
def test_help(command, expected, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert expected in said
    assert not re.search("(options|config)[. ](training )?options", said)  # the name of a parameter


@pytest.mark.parametrize("arguments", [[], ["cpuu"]])
def test_invalid_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--isa", "sse"], "isa must be one of avx2, avx512, got 'sse'"),
        (["cpu", "--lengths", "0"], "lengths must be at least 1, got 0"),
        (["cpu", "--dtypes", "float8"], "dtypes must be one of float32, bfloat16, got 'float8'"),
        (["decode", "--num-heads", "3", "--num-kv-heads", "2"], "num_heads must be a multiple of num_kv_heads, got 3"),
    ],
)
def test_settings(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(arguments, USAGE, message, capsys, main)
    assert not list(tmp_path.iterdir())


def test_results_are_checked_before_the_work(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a text")
    mistake(["cpu", "--results", tmp_path], USAGE, "name a file to write, got the folder", capsys, main)
    mistake(["steps", "--results", text / "steps.json"], DATA, "text.txt: is a file, so that", capsys, main)
    assert list(tmp_path.iterdir()) == [text]
    assert text.read_text() == "a text"


@pytest.mark.parametrize("command", BENCHMARKS.values(), ids=lambda command: command.__name__)
def test_benchmarks_do_not_overwrite_the_committed_results(command):
    (kind,) = (hint for hint in typing.get_type_hints(command).values() if dataclasses.is_dataclass(hint))
    assert kind().results.is_relative_to("runs/benchmarks")
