"""``python -m experiments``: its arguments, the comparison of all tasks, and norms at initialisation."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import compare
from experiments.__main__ import main
from experiments.compare import ComparisonConfig
from experiments.registry import EXPERIMENTS, find_experiment
from tests.test_mistakes import DATA, USAGE, mistake

SETTINGS = [
    (["norms", "--num-layers", "0"], "num_layers must be at least 1, got 0"),
    (["norms", "--seconds", "nan"], "seconds must be a finite number above 0, got nan"),
    (["norms", "--seconds", "0.001"], "seconds must be at least 0.01, one frame, got 0.001"),
    (["norms", "--embed-dim", "10", "--num-heads", "3"], "embed_dim must be a multiple of twice num_heads"),
    (["compare", "--only", "nosuch"], "only='nosuch' is in the title of no row"),
    (["compare", "--seeds", "0"], "seeds must be at least 1, got 0"),
    (["compare", "--only", "CTC"], "all selected rows need recordings of spoken digits (--speech)"),
    (["flops", "--seeds", "0"], "seeds must be at least 1, got 0"),
    (["nosuch"], "no experiment is called 'nosuch'; python -m experiments --list lists them"),
    (["--scale", "paper"], "name an experiment, list them, or run all of them (--list, --all)"),
    (["flops", "--all"], "--all runs every experiment: leave out --all, or the name flops"),
    (["speech-bias"], "this experiment needs recordings"),
    (
        ["flops", "--judge", ".", "--scale", "smoke"],
        "--judge judges stored data and runs nothing: leave out NAME, --scale",
    ),
    (["--list", "--all"], "--list lists the experiments: leave out --all"),
    (["tones", "--scale", "paper", "--longer", "3"], "longer=3 is for the scales"),
    (["--all", "--more-seeds", "mlp", "5"], "name it in place of --all"),
    (["--all", "--extend", "docs/results"], "--extend is for one experiment: name it"),
    (["flops", "--seeds", "5"], "flops takes no --seeds: leave it out; it takes none of its kind"),
    (
        ["vision-ablations", "--data", ".", "--speech", ".", "--longer", "2"],
        "vision-ablations takes no --data, --speech: leave it out; it takes --seeds, --workers, --longer",
    ),
    (["conversion", "--extend", "."], "--extend is not for conversion, whose table needs all"),
    (["conversion", "--more-seeds", "mlp", "5"], "not for conversion, whose variants"),
    (["pair-repeat", "--more-seeds", "mlp", "3"], "'mlp' 3 adds none to --seeds 3"),
    (["pair-repeat", "--more-seeds", "mlp", "4", "mlp", "5"], "names 'mlp' more than once"),
    (["pair-repeat", "--more-seeds", "rnn", "5"], "names 'rnn', which"),
]


@pytest.mark.parametrize(("arguments", "message"), SETTINGS)
def test_settings(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(arguments, USAGE, message, capsys, main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flops", "--speech", "nosuch"], "no such file or folder: nosuch"),
        (["train-losses", "--scale", "smoke", "--data", "nosuch"], "no such file or folder: nosuch"),
        (["compare", "--speech", "nosuch", "--only", "RoPE", "--seeds", "1"], "no such file or folder: nosuch"),
        (["--judge", "nosuch"], "no such folder: nosuch"),
        (["--judge", "."], "holds no page (NAME/page.json)"),
        (["pair-repeat", "--extend", "no"], "no has no page of pair-repeat to extend"),
    ],
)
def test_files_of_experiments(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(arguments, DATA, message, capsys, main)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    mistake(["flops", "--scale", "smoke", "--folder", tmp_path / "file"], DATA, f"{tmp_path / 'file'}", capsys, main)


def test_norms_are_the_paper_s_in_kind(capsys):
    """App. ASR: without a bias CAPE > RoPE > ALiBi ≫ softmax; with b = -log n near softmax."""
    main(["norms", "--num-layers", "2", "--embed-dim", "256", "--seconds", "6"])
    out = capsys.readouterr().out
    rows = {
        line.split()[0]: line.split()[1:]
        for line in out.splitlines()
        if line.split()[:1] in (["cape"], ["rope"], ["alibi"])
    }
    norms = {p: [float(c.replace(",", "")) for c in cells] for p, cells in rows.items()}
    without = {p: v[1] for p, v in norms.items()}
    assert without["cape"] > without["rope"] > without["alibi"]
    for softmax, bare, biased in norms.values():
        assert bare > 20 * softmax
        assert softmax / 8 < biased < 8 * softmax


class TestCompare:
    @pytest.mark.usefixtures("in_this_process", "unchecked")
    def test_the_table(self, tmp_path, capsys):
        quick = ComparisonConfig(folder=tmp_path, seeds=1, steps=2, workers=1, only="SimCLR")
        table = compare.compare_activations(quick, print)
        assert "2 of 2" in capsys.readouterr().out
        assert "| digits, SimCLR and linear probe: top-1 |" in table
        assert "1 seeds, 2 steps. Data: scikit-learn's handwritten digits (" in table
        assert len(json.loads((tmp_path / "results.json").read_text())) == 2
        assert compare.compare_activations(quick, print) == table  # nothing is done twice
        assert capsys.readouterr().out == ""
        compare.compare_activations(replace(quick, steps=3), print)
        assert "2 of 2" in capsys.readouterr().out  # what was done with other settings is done again
        assert {r["steps"] for r in json.loads((tmp_path / "results.json").read_text())} == {3}

    def test_the_table_of_the_committed_results(self):
        """docs/results.md shows the means, intervals and stars of benchmarks/results/compare."""
        root = Path(__file__).parents[2]
        rows = json.loads((root / "benchmarks/results/compare/results.json").read_text())
        body = compare.comparison_table(rows).partition("|---|")[2].partition("\n")[2]
        assert len(body.splitlines()) == len(compare.ENTRIES) == 9
        assert body in (root / "docs/results.md").read_text()


class TestCommand:
    def test_list(self, capsys):
        main(["--list"])
        said = capsys.readouterr().out
        assert all(f"{name}: {e.title}\n    {e.source}\n" in said for name, e in EXPERIMENTS.items())
        assert "None" not in said

    def test_all_skips_experiments_that_cannot_run(self, capsys, tmp_path, monkeypatch):
        command = importlib.import_module("experiments.__main__")
        monkeypatch.setattr(command, "EXPERIMENTS", {name: find_experiment(name) for name in ("speech-bias", "flops")})
        main(["--all", "--scale", "small", "--folder", str(tmp_path)])
        said = capsys.readouterr().out
        assert "left out: this experiment needs recordings" in said
        assert (tmp_path / "small" / "flops" / "page.md").exists()
