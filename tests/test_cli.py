"""The command line: demo, info, and errors of one line."""

import io
import re
import signal
import sys
from functools import partial

import pytest

import sigattn
from sigattn import cli
from sigattn.cli.errors import exit_on_errors
from sigattn.demo import training
from sigattn.recipes import RECIPES, Recipe
from sigattn.tasks.language import LanguageModelling
from sigattn.train.metrics import read_metrics

SMALL = [
    "--max-seq-len", "32", "--num-layers", "1", "--embed-dim", "16", "--num-heads", "2",
    "--max-steps", "6", "--batch-size", "2", "--validate-every", "3",
]  # fmt: skip


def failure(arguments, capsys, main=cli.main):
    """Exit code and what was said; it must be one line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1, said.err
    return stop.value.code, said.err


def contents(folder):
    """Return the bytes of every file."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_demo_is_resumed_and_writes_a_report(tmp_path, capsys, monkeypatch):
    folder, text = tmp_path / "run", tmp_path / "the.txt"
    text.write_text("the text of a demo. " * 200)
    arguments = ["demo", "--run-folder", str(folder), "--text", str(text), *SMALL]
    monkeypatch.setattr(training, "generate_sample", partial(training.generate_sample, length=5))
    evaluate = LanguageModelling.evaluate

    def interrupted(*args):
        monkeypatch.setattr(LanguageModelling, "evaluate", evaluate)
        signal.raise_signal(signal.SIGINT)
        return evaluate(*args)

    monkeypatch.setattr(LanguageModelling, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--resume"])
    assert stop.value.code == 130
    said = capsys.readouterr().out
    assert f"nothing to resume in {folder}: starting" in said
    assert "the same command with --resume" in said
    code, message = failure(arguments, capsys)
    assert code == 2
    assert "or name another folder (--resume, --run-folder)" in message
    cli.main([*arguments, "--resume"])
    said = capsys.readouterr().out
    assert "nothing to resume" not in said
    assert "report.html" in said.replace("\n", "")
    for name in ("softmax", "sigmoid-log-n", "sigmoid-no-bias"):
        assert [row["step"] for row in read_metrics(folder / name / "metrics.jsonl")] == [*range(6)]
        assert (folder / name / "model" / "model.safetensors").exists()
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 1
    addresses = {address.removeprefix("www.") for address in re.findall(r"http://([\w.]*)", page)}
    assert addresses <= {"w3.org", "purl.org", "creativecommons.org"}  # self-contained: names of XML dialects only
    settings = "<td>model: embed_dim</td><td>16</td>"
    for expected in ("sigmoid, b = 0", "held-out bits per byte", "torch", "sample of text", "the.txt", settings):
        assert expected in page
    before = contents(folder)
    failure([*arguments, "--learning-rate", "1", "--resume"], capsys)
    assert contents(folder) == before


def test_info(capsys):
    cli.main(["info"])
    said = capsys.readouterr().out
    for expected in ("sigattn 0.", "torch 2.", "on cpu:", "reference", "blocked", "(default)", "float64"):
        assert expected in said
    for dtype in ("float32", "bfloat16", "float16", "float64"):  # each has one default on each device
        assert said.count(f" {dtype} (default)") == said.count("\non ")


def test_a_terminal_without_unicode(monkeypatch):
    """Characters that it lacks are spelled in ASCII; they raised UnicodeEncodeError."""
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    with exit_on_errors("sigattn"):
        print("σ 1 ± 2 ≤ 3 …", flush=True)
    assert screen.getvalue() == b"sigma 1 +- 2 ? 3 ...\n"


@pytest.mark.parametrize("command", [*cli.COMMANDS, "train lm-1b-2k", ""])
def test_help_fits_a_terminal_of_80_columns(command, monkeypatch, capsys):
    """Lines are broken between words; a usage line is one word."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert stop.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("usage: ")]
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80


def test_recipes_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Recipe, "parameters", lambda _: 1_234_567_890)  # without building each
    cli.main(["recipes"])
    *lines, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f" {name} ") for line in lines) for name in RECIPES)


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"sigattn {sigattn.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["train"], ["demo", "--max-steps", "many"]])
def test_invalid_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
