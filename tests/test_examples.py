"""The scripts and notebooks in examples/ run, at a small size."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from sigattn.models import load

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run_example(name, *arguments):
        """Return what a script prints."""
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def numbers(pattern, printed):
    return [float(number) for number in re.findall(pattern, printed)]


@pytest.mark.parametrize(("attention", "steps", "bits"), [("sigmoid", 1, 9), ("normalized", 30, 6), ("softmax", 1, 9)])
def test_nanogpt(run, attention, steps, bits):
    printed = run("nanogpt.py", "--steps", f"{steps}", "--width", "32", "--length", "32", "--attention", attention)
    first, last = numbers(r"([\d.]+) bits per byte", printed)
    assert 7.5 < first < 9
    assert last < bits


def test_vit_digits(run):
    first, last = numbers(r"accuracy ([\d.]+) %", run("vit_digits.py", "--epochs", "2"))
    assert last > max(first, 30)


def test_text_classifier(run, tmp_path):
    """A model of one's own is trained, saved and loaded, and padding does not affect its result."""
    printed = run("text_classifier.py", "--steps", "8", "--folder", str(tmp_path))
    assert numbers(r"accuracy ([\d.]+) %", printed)[-1] > 15  # 12.5 by chance
    model = load(tmp_path / "model")
    assert repr(model) in printed
    tokens, lengths = torch.randint(256, (2, 20)), torch.tensor([20, 11])
    logits = model(tokens, lengths)
    torch.testing.assert_close(model(torch.cat([tokens, tokens], 1), lengths), logits)
    torch.testing.assert_close(model(tokens[1:, :11], lengths[1:]), logits[1:])


@pytest.mark.parametrize(("name", "lines"), [("packed_sequences.py", 4), ("decoding.py", 1)])
def test_comparisons(run, name, lines):
    assert run(name).count("largest difference") == lines


def test_universal_approximation(run):
    """Errors fall with δ and as λ grows."""
    lines = run("universal_approximation.py").splitlines()
    *by_grid, by_steepness = (numbers(r"[\d.]+", line.partition("errors ")[2]) for line in lines)
    assert len(by_grid) == 4
    for coarse, middle, fine in by_grid:
        assert fine < 0.6 * middle < 0.6 * 0.6 * coarse
    assert by_steepness == sorted(by_steepness, reverse=True)
    assert by_steepness[-1] < 0.4 * by_steepness[0]


def test_learnable_bias(run):
    printed = run("learnable_bias.py", "--steps", "150")
    assert numbers(r"-?[\d.]+", printed.rpartition("biases")[2]) == pytest.approx([-6, -5, -4, -3], abs=0.2)


@pytest.mark.usefixtures("unchecked")  # symbolic sizes are no int
@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
def test_export_model(run):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    forms = ("export", "onnx", *(["aot"] if shutil.which("g++") else []))
    fast = {"compile_wrapper_opt_level": "O0", "precompile_headers": False}  # 26 seconds instead of 40
    fast = {f"aot_inductor.{name}": value for name, value in fast.items()} | {"cpp.vec_isa_ok": True}
    with torch._inductor.config.patch(fast):
        printed = run("export_model.py", "--only", *forms)
    assert printed.count("equal the model's") == len(forms)


@pytest.mark.parametrize("name", ["softmax_and_sigmoid.ipynb", "convert_a_model.ipynb"])
def test_notebooks(name, tmp_path, capsys, monkeypatch):
    """Their code runs, and they are committed as executed from top to bottom, without errors and local paths."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = (EXAMPLES / name).read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for cell in cells for output in cell["outputs"]} == {"stream", "display_data"}
    assert not re.search(r"/(home|tmp|work|Users)/", text)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code, replaced = re.subn("(?<=LENGTH = ).*", lambda sizes: "3, " * sizes[0].count(",") + "32", code)
    assert replaced == 1
    (tmp_path / "script").write_text(code)
    with matplotlib.rc_context():
        runpy.run_path(str(tmp_path / "script"))
    assert "bits per byte" in capsys.readouterr().out


def test_every_example_is_tested_and_described():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}}
    elsewhere = {"convert_transformers.py", "convert_embeddings.py", "context_parallel.py"}  # conversion, distributed
    assert names == elsewhere | set(re.findall(r'"(\w+\.(?:py|ipynb))"', Path(__file__).read_text()))
    page = (EXAMPLES.parent / "docs/start.md").read_text()
    assert [name for name in sorted(names) if name not in page] == []
