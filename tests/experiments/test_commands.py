"""``python -m experiments``: its mistakes and list, the comparison of all tasks, run files of the paper's tables."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import __main__ as command
from experiments import compare, language_ablations, speech_tables, vision_ablations
from experiments.compare import ComparisonConfig
from experiments.experiment import ExperimentError, Setting
from experiments.registry import EXPERIMENTS, find_experiment
from sigattn.cli import train
from sigattn.models.saving import build
from sigattn.recipes import find_recipe
from sigattn.train import loop
from tests.test_mistakes import DATA, USAGE, mistake

SETTINGS = [
    ("norms --num-layers 0", "num_layers must be at least 1, got 0"),
    ("norms --seconds nan", "seconds must be a finite number above 0, got nan"),
    ("norms --seconds 0.001", "seconds must be at least 0.01, one frame, got 0.001"),
    ("norms --embed-dim 10 --num-heads 3", "embed_dim must be a multiple of twice num_heads"),
    ("compare --only nosuch", "only='nosuch' is in the title of no row"),
    ("compare --seeds 0", "seeds must be at least 1, got 0"),
    ("compare --only CTC", "all selected rows need recordings of spoken digits (--speech)"),
    ("flops --seeds 0", "seeds must be at least 1, got 0"),
    ("nosuch", "no experiment is called 'nosuch'; python -m experiments --list lists them"),
    ("--scale paper", "name an experiment, list them, or run all of them (--list, --all)"),
    ("flops --all", "--all runs every experiment: leave out --all, or the name flops"),
    ("speech-bias", "this experiment needs recordings"),
    ("flops --judge . --scale smoke", "--judge judges stored data and runs nothing: leave out NAME, --scale"),
    ("--list --all", "--list lists the experiments: leave out --all"),
    ("tones --scale paper --longer 3", "longer=3 is for the scales"),
    ("--all --more-seeds mlp 5", "name it in place of --all"),
    ("--all --extend docs/results", "--extend is for one experiment: name it"),
    ("flops --seeds 5", "flops takes no --seeds: leave it out; it takes none of its kind"),
    ("vision-ablations --data . --speech .", "no --data, --speech: leave it out; it takes --seeds, --work"),
    ("conversion --extend .", "--extend is not for conversion, whose table needs all"),
    ("conversion --more-seeds mlp 5", "not for conversion, whose variants"),
    ("pair-repeat --more-seeds mlp 3", "'mlp' 3 adds none to --seeds 3"),
    ("pair-repeat --more-seeds mlp 4 mlp 5", "names 'mlp' more than once"),
    ("pair-repeat --more-seeds rnn 5", "names 'rnn', which"),
    ("lr-sensitivity --scale smoke --more-seeds rnn 5", "names 'rnn', which"),
    ("lm-stability --scale paper --more-seeds rnn 5", "names 'rnn', which"),
    ("causal-bias-larger --scale smoke --more-seeds GPT-2 5", "names 'GPT-2', which"),
    ("small-models --scale paper", "no such scale"),
    ("small-models --seeds 1", "--seeds 7, not 1"),
    ("position-ablation --scale paper", "C4's realnews"),
    ("bias-rules --scale paper", "C4's realnews"),
    ("dropped-keys --scale paper", "C4's realnews"),
    ("train-losses --scale paper", "run sigattn train"),
]
FILES = [
    ("flops --speech nosuch", "no such file or folder: nosuch"),
    ("train-losses --scale smoke --data nosuch", "no such file or folder: nosuch"),
    ("compare --speech nosuch --only RoPE --seeds 1", "no such file or folder: nosuch"),
    ("--judge nosuch", "no such folder: nosuch"),
    ("--judge .", "holds no page (NAME/page.json)"),
    ("pair-repeat --extend no", "no has no page of pair-repeat to extend"),
    ("flops --scale smoke --folder /dev/null", "/dev/null"),
]


@pytest.mark.parametrize(
    ("code", "arguments", "message"), [*((USAGE, *case) for case in SETTINGS), *((DATA, *case) for case in FILES)]
)
def test_mistakes_are_reported_before_the_work(code, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(shlex.split(arguments), code, message, capsys, command.main)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_this_process", "unchecked")
def test_comparison_is_done_once_for_its_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop.Trainer, "validate", lambda _: {})  # the table has the accuracy of a probe
    quick = ComparisonConfig(folder=tmp_path, seeds=1, steps=1, workers=1, only="SimCLR")
    table = compare.compare_activations(quick, print)
    assert "2 of 2" in capsys.readouterr().out
    assert "| digits, SimCLR and linear probe: top-1 |" in table
    assert "1 seeds, 1 steps. Data: scikit-learn's handwritten digits (" in table
    assert compare.compare_activations(quick, print) == table
    assert capsys.readouterr().out == ""
    compare.compare_activations(replace(quick, steps=2), print)
    assert "2 of 2" in capsys.readouterr().out
    assert [row["steps"] for row in json.loads((tmp_path / "results.json").read_text())] == [2, 2]
    table = compare.compare_activations(replace(quick, steps=2, normalize=True), print)
    assert "1 of 1" in capsys.readouterr().out  # softmax is trained already
    assert table.startswith("|   | softmax | normalized | normalized - softmax |")
    assert len(json.loads((tmp_path / "normalize.json").read_text())) == 2
    (settings,) = tmp_path.glob("*/runs/normalized/0/model/config.json")
    assert '"normalize": true' in settings.read_text()


def test_the_table_of_the_committed_results_is_in_the_page():
    root = Path(__file__).parents[2]
    for name in ("results", "normalize"):
        rows = json.loads((root / f"benchmarks/results/compare/{name}.json").read_text())
        body = compare.comparison_table(rows).partition("|---|")[2].partition("\n")[2]
        assert len(body.splitlines()) == len(compare.ENTRIES)
        assert body in (root / "docs/results.md").read_text()


def test_list(capsys):
    command.main(["--list"])
    said = capsys.readouterr().out
    assert all(f"{name}: {e.title}\n    {e.source}\n" in said for name, e in EXPERIMENTS.items())
    assert "None" not in said


def test_all_skips_experiments_that_cannot_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "EXPERIMENTS", {name: find_experiment(name) for name in ("speech-bias", "flops")})
    command.main(["--all", "--scale", "small", "--folder", str(tmp_path)])
    assert "left out: this experiment needs recordings" in capsys.readouterr().out
    assert (tmp_path / "small" / "flops" / "page.md").exists()


TABLES = {e.name: e for m in (language_ablations, speech_tables, vision_ablations) for e in m.EXPERIMENTS}


@pytest.mark.filterwarnings("ignore:.*Ramapuram")
def test_commands_parse_to_the_settings(tmp_path):
    """Of all commands, those with a flag and value that no command for a model of the same kind has before them."""
    known = set()
    for name in (name for name, e in TABLES.items() if e.run.trainings):
        with pytest.raises(ExperimentError, match="run sigattn train with the lines of"):
            EXPERIMENTS[name].run(Setting("paper", 2, tmp_path))
        lines = [line for line in (tmp_path / "runs.sh").read_text().splitlines() if not line.startswith("#")]
        expected = [(seed, *pair) for seed in range(2) for pair in EXPERIMENTS[name].run.trainings.values()]
        assert len(lines) == len(set(lines)) == len(expected)
        for line, (seed, recipe, changes) in zip(lines, expected, strict=True):
            program, command, recipe_name, *arguments = shlex.split(line)
            assert (program, command, recipe_name) == ("sigattn", "train", recipe)
            model = {k: v for k, v in changes.items() if not k.startswith("training.")}
            wanted = find_recipe(recipe).with_transformer(**model).model
            settings = {(type(wanted), *item) for item in (*changes.items(), ("seed", seed))}
            if settings <= known:
                continue
            known |= settings
            options = train._options(find_recipe(recipe), arguments)
            assert options.model == wanted, line
            build(find_recipe(recipe).with_transformer(**{**model, "num_layers": 1}).model, "meta")
            assert options.training.seed == seed
            batch_size = changes.get("training.batch_size", find_recipe(recipe).training.batch_size)
            assert options.training.batch_size == batch_size


@pytest.mark.filterwarnings("ignore:.*Ramapuram")
def test_every_claim_names_variants_and_the_smallest_scale_checks_one():
    """Table "lm_norm_ablations": 8 rows at 2,048 tokens and 8 at 4,096."""
    for experiment in TABLES.values():
        study = experiment.run
        smoke = set(study.smoke or study.variants)
        assert smoke <= study.variants.keys()
        assert all({claim.name, claim.baseline} <= study.variants.keys() for claim in study.claims)
        assert any({claim.name, claim.baseline} <= smoke for claim in study.claims)
    for table in (language_ablations.NORMS, language_ablations.LONG_NORMS):
        configs = {find_recipe("lm-1b-2k").with_transformer(**changes).model for changes in table.values()}
        assert len(configs) == len(table) == 8
