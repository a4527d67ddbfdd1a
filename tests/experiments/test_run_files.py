"""Run files of the paper's tables: every command parses to the intended settings, of a model that can be built."""

import shlex

import pytest

from experiments import language_ablations, speech_tables, vision_ablations
from experiments.experiment import ExperimentError, Setting
from experiments.registry import EXPERIMENTS
from sigattn.cli import train
from sigattn.models.saving import build
from sigattn.recipes import find_recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*Ramapuram")
TABLES = {e.name: e for m in (language_ablations, speech_tables, vision_ablations) for e in m.EXPERIMENTS}


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
