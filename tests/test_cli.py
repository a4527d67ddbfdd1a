"""The command line: demo, info, and errors of one line."""

import json
import re
import signal
import subprocess
import sys

import pytest

import sigattn
from sigattn import cli
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


def test_demo(tmp_path, capsys, monkeypatch):
    """Interrupted and resumed it gives the numbers of a whole run, which writes a report."""
    folder = tmp_path / "run"
    arguments = ["demo", "--run-folder", str(folder), *SMALL]
    evaluate = LanguageModelling.evaluate

    def interrupted(*args):
        monkeypatch.setattr(LanguageModelling, "evaluate", evaluate)
        signal.raise_signal(signal.SIGINT)
        return evaluate(*args)

    monkeypatch.setattr(LanguageModelling, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 130
    said = capsys.readouterr().out
    assert "stopped after" in said
    assert "the same command with --resume" in said
    code, message = failure(arguments, capsys)
    assert code == 2
    assert "or name another folder (--resume, --run-folder)" in message
    cli.main([*arguments, "--resume"])
    whole = tmp_path / "whole"
    assert "nothing to resume" not in capsys.readouterr().out
    cli.main(["demo", "--run-folder", str(whole), *SMALL, "--resume"])
    said = capsys.readouterr().out
    assert f"nothing to resume in {whole}: starting" in said
    assert "report.html" in said.replace("\n", "")
    for name in ("softmax", "sigmoid-log-n", "sigmoid-no-bias"):
        rows = [read_metrics(path / name / "metrics.jsonl") for path in (folder, whole)]
        assert len(rows[0]) == 6
        for row in (*rows[0], *rows[1]):
            del row["samples_per_second"]
        assert rows[0] == rows[1]
        assert (whole / name / "model" / "model.safetensors").exists()
    config = json.loads((whole / "config.json").read_text())
    assert config["model"]["embed_dim"] == 16
    assert config["text"]["source"] == "pydoc_data.topics"
    page = (whole / "report.html").read_text()
    assert page.count("<svg") == 1
    addresses = {address.removeprefix("www.") for address in re.findall(r"http://([\w.]*)", page)}
    assert addresses <= {"w3.org", "purl.org", "creativecommons.org"}  # self-contained: names of XML dialects only
    for expected in ("sigmoid, b = 0", "held-out bits per byte", "torch", "sample of text"):
        assert expected in page


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such text file or folder"), ("", "is empty"), ("too short", "too short for a context of 32")],
)
def test_unusable_text(tmp_path, capsys, text, message):
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_text(text)
    code, said = failure(["demo", "--text", str(path), "--run-folder", str(tmp_path / "run"), *SMALL], capsys)
    assert code == 1
    assert message in said
    assert not (tmp_path / "run").exists()


def test_info(capsys):
    cli.main(["info"])
    said = capsys.readouterr().out
    for expected in ("sigattn 0.", "torch 2.", "on cpu:", "reference", "blocked", "(default)", "float64"):
        assert expected in said
    for dtype in ("float32", "bfloat16", "float16", "float64"):  # each has one default on each device
        assert said.count(f" {dtype} (default)") == said.count("\non ")


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"sigattn {sigattn.__version__}\n"


def test_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    said = capsys.readouterr().out
    assert " training options " in said
    assert not re.search("(options|config)[. ](training )?options", said)  # the name of a parameter


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["demo", "--max-steps", "many"]])
def test_invalid_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2


def test_imports_of_the_command_line():
    """Commands do not wait for what they do not need, and a missing extra names the command that installs it."""
    slow = ("matplotlib", "sympy", "torch.distributed.tensor", "torch.utils.tensorboard", "transformers")
    code = f"""
import sys
import torch, sigattn.cli
print([m for m in {slow!r} if m in sys.modules])
for package in ("tyro", "matplotlib"):
    for name in [m for m in sys.modules if m.startswith("sigattn.cli") or m.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None
    try:
        import sigattn.cli
    except SystemExit as stop:
        print(stop)
    del sys.modules[package]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    missing = "sigattn: the command line needs {}: pip install 'sigattn[train]'"
    assert done.stdout.splitlines() == ["[]", missing.format("tyro"), missing.format("matplotlib")]
