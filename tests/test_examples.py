"""The scripts in examples/ run, at a small size."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        found = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return found, capsys.readouterr().out

    return run_example


@pytest.mark.parametrize("attention", ["sigmoid", "softmax"])
def test_nanogpt(run, attention):
    _, printed = run("nanogpt.py", "--steps", "51", "--width", "32", "--length", "64", "--attention", attention)
    first, last = (float(x) for x in re.findall(r"([\d.]+) bits per byte", printed)[:: len(printed.splitlines()) - 1])
    assert 7.5 < first < 9
    assert last < 6


def test_vit_digits(run):
    _, printed = run("vit_digits.py", "--epochs", "2")
    accuracies = [float(x) for x in re.findall(r"accuracy ([\d.]+) %", printed)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 30


@pytest.mark.parametrize(("name", "lines"), [("packed_sequences.py", 4), ("decoding.py", 1)])
def test_comparisons(run, name, lines):
    assert run(name)[1].count("largest difference") == lines


def test_learnable_bias(run):
    _, printed = run("learnable_bias.py", "--steps", "150")
    biases = [float(x) for x in re.findall(r"-?[\d.]+", printed.splitlines()[-1].split("biases")[1])]
    assert biases == pytest.approx([-6, -5, -4, -3], abs=0.2)


@pytest.mark.usefixtures("unchecked")  # symbolic sizes are no int
@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
@pytest.mark.parametrize("only", ["export", "onnx"])  # ahead of time: tests/models/test_export.py
def test_export_model(run, only):
    if only == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    assert "equal the model's" in run("export_model.py", "--only", only)[1]


def test_context_parallel():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, EXAMPLES / "context_parallel.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest difference") == 2


def test_every_example_is_tested_and_described():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text())) | {"convert_transformers.py"}
    assert names == tested
    page = (EXAMPLES.parent / "docs/start.md").read_text()
    assert [name for name in sorted(names) if name not in page] == []
