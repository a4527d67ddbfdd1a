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


def test_demo_writes_its_run_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    cli.main(["demo", "--run-folder", str(folder), *SMALL])
    said = capsys.readouterr().out
    assert "report.html" in said.replace("\n", "")
    assert "softmax" in said
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["embed_dim"] == 16
    assert config["text"]["source"] == "pydoc_data.topics"
    for name in ("softmax", "sigmoid-log-n", "sigmoid-no-bias"):
        assert (folder / name / "model" / "model.safetensors").exists()
        assert len((folder / name / "metrics.jsonl").read_text().splitlines()) == 6
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )  # self-contained: names of XML dialects are the only addresses
    for expected in ("sigmoid, b = 0", "held-out bits per byte", "torch", "sample of text"):
        assert expected in page


def test_demo_resumes(tmp_path, capsys, monkeypatch):
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
    assert f"nothing to resume in {whole}: starting" in capsys.readouterr().out
    for name in ("softmax", "sigmoid-log-n", "sigmoid-no-bias"):
        rows = [
            [
                {k: v for k, v in row.items() if k != "samples_per_second"}
                for row in read_metrics(path / name / "metrics.jsonl")
            ]
            for path in (folder, whole)
        ]
        assert rows[0] == rows[1]


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


def test_unwritable_run_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    code, said = failure(["demo", "--run-folder", str(tmp_path / "file" / "run"), *SMALL], capsys)
    assert code == 1
    assert "cannot write to the run folder" in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--num-heads", "3"], "embed_dim must be a multiple of num_heads, got embed_dim=16, num_heads=3"),
        (["--num-heads", "16"], "head_dim must be even, got 1"),
        (["--max-steps", "0"], "max_steps must be at least 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(tmp_path, capsys, wrong, message):
    code, said = failure(["demo", "--run-folder", str(tmp_path / "run"), *SMALL, *wrong], capsys)
    assert code == 2
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


def test_it_is_installed():
    done = subprocess.run([sys.executable, "-m", "sigattn", "info"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sigattn ")
