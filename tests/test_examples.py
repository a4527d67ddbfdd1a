"""The scripts and notebooks in examples/ run, at a small size."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigattn.models import load

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        found = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return found, capsys.readouterr().out

    return run_example


@pytest.mark.parametrize("attention", ["sigmoid", "normalized", "softmax"])
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


def test_text_classifier(run, tmp_path):
    """A model of one's own is trained, saved and loaded, and padding does not affect its result."""
    _, printed = run("text_classifier.py", "--steps", "16", "--folder", str(tmp_path))
    assert float(re.findall(r"accuracy ([\d.]+) %", printed)[-1]) > 15  # 12.5 by chance
    model = load(tmp_path / "model")
    assert repr(model) in printed
    tokens, lengths = torch.randint(256, (2, 20)), torch.tensor([20, 11])
    logits = model(tokens, lengths)
    torch.testing.assert_close(model(torch.cat([tokens, tokens], 1), lengths), logits)
    torch.testing.assert_close(model(tokens[1:, :11], lengths[1:]), logits[1:])


@pytest.mark.parametrize(("name", "lines"), [("packed_sequences.py", 4), ("decoding.py", 1)])
def test_comparisons(run, name, lines):
    assert run(name)[1].count("largest difference") == lines


def test_universal_approximation(run):
    """Errors fall with δ and as λ grows."""
    *by_grid, by_steepness = (
        [float(x) for x in line.partition("errors ")[2].split(", ")]
        for line in run("universal_approximation.py")[1].splitlines()
    )
    assert len(by_grid) == 4
    for coarse, middle, fine in by_grid:
        assert fine < 0.6 * middle < 0.6 * 0.6 * coarse
    assert by_steepness == sorted(by_steepness, reverse=True)
    assert by_steepness[-1] < 0.4 * by_steepness[0]


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


NOTEBOOKS = {  # a line of each notebook, and the line that replaces it here
    "softmax_and_sigmoid.ipynb": ("STEPS, LENGTH = 200, 128", "STEPS, LENGTH = 21, 32"),
    "convert_a_model.ipynb": (
        "STEPS, TUNING_STEPS, LENGTH = 300, 30, 128",
        "STEPS, TUNING_STEPS, LENGTH = 9, 2, 32",
    ),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks(name, tmp_path, capsys, monkeypatch):
    """Their code runs, and they are committed as executed from top to bottom, without errors and local paths."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = (EXAMPLES / name).read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}
    assert not re.search(r"/(home|tmp|work|Users)/", text)
    long, short = NOTEBOOKS[name]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert long in code
    (tmp_path / "script").write_text(code.replace(long, short))
    with matplotlib.rc_context():
        runpy.run_path(str(tmp_path / "script"))
    assert "bits per byte" in capsys.readouterr().out


def test_every_example_is_tested_and_described():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}}
    elsewhere = {"convert_transformers.py", "convert_embeddings.py"}  # tests/conversion
    tested = set(re.findall(r'"(\w+\.(?:py|ipynb))"', Path(__file__).read_text()))
    assert names == tested | elsewhere
    page = (EXAMPLES.parent / "docs/start.md").read_text()
    assert [name for name in sorted(names) if name not in page] == []
