"""Run files of the paper's tables: every command parses to the intended settings, and every variant trains."""

import shlex
from dataclasses import replace

import pytest
import torch

from experiments import language_ablations, speech_tables, vision_ablations
from experiments.experiment import ExperimentError, Setting
from experiments.registry import EXPERIMENTS
from sigattn.cli import train
from sigattn.models.language import LanguageModel
from sigattn.models.speech import SpeechModel
from sigattn.models.vision import ViT
from sigattn.recipes import find_recipe
from sigattn.tasks import CTC, Classification

pytestmark = pytest.mark.filterwarnings("ignore:.*Ramapuram", "ignore:.*Deprec")
TABLES = {e.name: e for m in (language_ablations, speech_tables, vision_ablations) for e in m.EXPERIMENTS}
SPEECH = (speech_tables.STABILITY, speech_tables.HYBRIDS, speech_tables.POSTS, speech_tables.STRUCTURES)
LANGUAGE = (language_ablations.NORMS, language_ablations.LONG_NORMS, language_ablations.STABILITY)


@pytest.mark.parametrize("name", [name for name, e in TABLES.items() if e.run.trainings])
def test_commands_parse_to_the_settings(name, tmp_path):
    """Of all commands, those with a flag and value that no command before them has."""
    with pytest.raises(ExperimentError, match="run sigattn train with the lines of"):
        EXPERIMENTS[name].run(Setting("paper", 2, tmp_path))
    lines = [line for line in (tmp_path / "runs.sh").read_text().splitlines() if not line.startswith("#")]
    expected = [pair for _ in range(2) for pair in EXPERIMENTS[name].run.trainings.values()]
    assert len(lines) == len(set(lines)) == len(expected)
    known = set()
    for i, (line, (recipe, changes)) in enumerate(zip(lines, expected, strict=True)):
        if set(changes.items()) <= known:
            continue
        known |= set(changes.items())
        program, command, recipe_name, *arguments = shlex.split(line)
        assert (program, command, recipe_name) == ("sigattn", "train", recipe)
        options = train._options(find_recipe(recipe), arguments)
        model = {k: v for k, v in changes.items() if not k.startswith("training.")}
        assert options.model == find_recipe(recipe).with_transformer(**model).model
        assert options.training.seed == i // (len(lines) // 2)
        assert options.training.batch_size == changes.get(
            "training.batch_size", find_recipe(recipe).training.batch_size
        )


@pytest.mark.parametrize(
    ("name", "words", "fields"),
    [
        ("speech-stability", "Division by n", {"length_power"}),
        ("speech-structure", "b = -log n", {"activation"}),
        ("speech-structure", "b = 0", {"activation", "attention_bias"}),
        ("length-power", "n^-", {"attention_bias", "length_power"}),
        ("norm-structure", "With RoPE", {"attention_bias"}),
    ],
)
def test_variants_of_a_claim_differ_in_what_it_names(name, words, fields):
    table = EXPERIMENTS[name].run
    claims = [c for c in table.claims if c.text.startswith(words)]
    assert claims
    for claim in claims:
        first, second = (table.variants[n] for n in (claim.name, claim.baseline))
        assert {k for k in first | second if first.get(k) != second.get(k)} == fields


def speech_loss(changes):
    small = {"embed_dim": 16, "num_heads": 2, "num_mel_bins": 8, "num_layers": 1, "conformer_kernel_size": 5}
    model = SpeechModel(find_recipe("asr-ls960-tiny").with_transformer(**{**changes, **small}).model)
    targets = torch.tensor([[3, 4], [5, 6]]), torch.tensor([2, 1])
    return model, CTC().loss(model, (torch.randn(2, 40, 8), torch.tensor([40, 31]), *targets))


def language_loss(changes):
    config = find_recipe("lm-1b-2k-tiny").with_transformer(**changes).model
    model = LanguageModel(replace(config, embed_dim=16, num_heads=2, num_layers=1, max_seq_len=12))
    tokens = torch.randint(256, (2, 13))
    return model, model.loss(tokens[:, :-1], tokens[:, 1:])


def vision_loss(changes):
    config = find_recipe("vit-supervised-tiny").with_transformer(**changes, embed_dim=16, num_heads=2).model
    model = ViT(config)
    return model, Classification().loss(model, (*config.example_inputs(), torch.tensor([0, 1])))


VARIANTS = [
    *((speech_loss, variants) for variants in SPEECH),
    *((language_loss, variants) for variants in LANGUAGE),
    *((vision_loss, e.run.variants) for e in vision_ablations.EXPERIMENTS),
]


@pytest.mark.parametrize(("make", "variants"), VARIANTS)
def test_every_variant_trains(make, variants):
    for changes in variants.values():
        model, loss = make(changes)
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_all_rows_of_the_papers_language_table():
    """Table "lm_norm_ablations": 8 rows at 2,048 tokens and 8 at 4,096."""
    for table in (language_ablations.NORMS, language_ablations.LONG_NORMS):
        configs = {find_recipe("lm-1b-2k").with_transformer(**changes).model for changes in table.values()}
        assert len(configs) == len(table) == 8


def test_every_claim_names_variants_and_the_smallest_scale_checks_one():
    for experiment in TABLES.values():
        study = experiment.run
        assert all({claim.name, claim.baseline} <= study.variants.keys() for claim in study.claims)
        smoke = set(study.smoke or study.variants)
        assert smoke <= study.variants.keys()
        assert any({claim.name, claim.baseline} <= smoke for claim in study.claims)
