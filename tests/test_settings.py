"""Numeric settings of the command line: senseless values are refused by name, all others mean something."""

import dataclasses
import hashlib
import inspect
import math
import re
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS
from experiments import __main__ as experiments
from experiments.compare import ComparisonConfig
from sigattn.cli import COMMANDS
from sigattn.files import file_sha256
from sigattn.models.generation import SamplingConfig
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn import ConvolutionModule, LayerNorm
from sigattn.recipes import RECIPES
from sigattn.train.metrics import count_spikes
from sigattn.validation import SettingsError

EVERY_COMMAND = (*COMMANDS.values(), *BENCHMARKS.values(), *experiments.COMMANDS.values(), experiments.run_experiment)
ACCEPTED = {  # infinity and NaN mean nothing anywhere; 0 means "none", "never" or the first of:
    "AttentionNormsConfig": "seed",
    "BYOL": "momentum",  # the teacher is the student
    "Classification": "label_smoothing mixup",
    "ConvertConfig": "distil steps",
    "CpuBenchmark": "max_naive_gib",
    "KernelBenchmark": "max_graph_length",
    "LanguageModelling": "end_token",
    "SamplingConfig": "stop_tokens temperature",
    "SpeechModelConfig": "layer_drop",
    "TrainConfig": "betas decay_start final_learning_rate learning_rate log_attention_every seed statistics_every "
    "warmup_steps weight_decay",
    "ViTConfig": "num_classes",  # features
}
EVERY_BENCHMARK = {"round_seconds": {0}}  # as short as one call
EVERY_TRANSFORMER = {
    "attention_bias": {0, -1},
    "dropout": {0},
    "drop_path": {0},
    "init_values": {0},  # branches start closed
    "length_power": {0, -1},  # no factor; the factor n
    "temperature": {0, -1},  # e^t is 1, or 1 / e
}


def configurations():
    """Return every dataclass that a command, a benchmark or a recipe hands to the command line."""
    kinds = {SamplingConfig}
    for command in EVERY_COMMAND:
        kinds.update(t for t in typing.get_type_hints(command).values() if dataclasses.is_dataclass(t))
    for base in RECIPES.values():
        for recipe in (base, base.tiny()):
            kinds.update(type(part) for part in (recipe.model, recipe.task, recipe.training))
    return sorted(kinds, key=lambda kind: kind.__name__)


def numbers_in(hint):
    """Return the numeric types within a field's type."""
    if hint in (int, float):
        return {hint}
    return set().union(*(numbers_in(part) for part in typing.get_args(hint))) if typing.get_args(hint) else set()


def cases():
    for kind in configurations():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            for number in sorted(numbers_in(hints[field.name]), key=str):
                values = (0, -1) if number is int else (0.0, -1.0, math.nan, math.inf, -math.inf)
                yield from ((kind, field.name, value) for value in values)


def changed(kind, name, value):
    default = kind()
    old = getattr(default, name)
    if isinstance(old, tuple):
        value = (*old[:-1], value) if old else (value,)
    return dataclasses.replace(default, **{name: value})


def is_accepted(kind, name, value):
    if name in EVERY_TRANSFORMER and hasattr(kind, "DEFAULT_BIAS"):
        return value in EVERY_TRANSFORMER[name]
    if name in EVERY_BENCHMARK and kind.__name__.endswith("Benchmark"):
        return value in EVERY_BENCHMARK[name]
    return value == 0 and name in ACCEPTED.get(kind.__name__, "").split()


def test_a_number_means_something_or_is_refused_by_name():
    faults = []
    for kind, name, value in cases():
        try:
            changed(kind, name, value)
            right = is_accepted(kind, name, value)
        except SettingsError as error:
            message = str(error)
            refused_by_name = name in message and str(value) in message and "\n" not in message
            right = refused_by_name and not is_accepted(kind, name, value)
        faults += [] if right else [(kind.__name__, name, value)]
    assert not faults


def test_the_sweep_reaches_the_command_line_s_settings():
    names = {kind.__name__ for kind in configurations()}
    assert {"TrainConfig", "DemoConfig", "ComparisonConfig", "CpuBenchmark", "SpeechModelConfig", "BYOL"} <= names
    assert len(list(cases())) > 300
    known = {f"{kind.__name__}.{field.name}" for kind in configurations() for field in dataclasses.fields(kind)}
    assert {f"{kind}.{name}" for kind, fields in ACCEPTED.items() for name in fields.split()} <= known


@pytest.mark.filterwarnings("ignore:.*Ramapuram")
@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in EVERY_TRANSFORMER.items() for v in sorted(values)])
def test_what_is_accepted_of_a_transformer_gives_finite_numbers(name, value):
    small = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "max_seq_len": 8, "vocab_size": 16}
    model = LanguageModel(LanguageModelConfig(**{**small, name: float(value)}))
    logits = model(torch.arange(8)[None])
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def documented(function_or_class):
    """Names that a docstring explains, each on a line of its own: tyro shows no others with --help."""
    text = inspect.getdoc(function_or_class) or ""
    return set(re.findall(r"^ {4}(\w+): ", text, re.MULTILINE))


def test_every_setting_has_a_help_text():
    for kind in configurations():
        known = set().union(*(documented(parent) for parent in kind.__mro__ if dataclasses.is_dataclass(parent)))
        assert {field.name for field in dataclasses.fields(kind)} <= known, kind
    for command in EVERY_COMMAND:
        hints = {name: hint for name, hint in typing.get_type_hints(command).items() if name != "return"}
        assert {n for n, hint in hints.items() if not dataclasses.is_dataclass(hint)} <= documented(command), command


def test_help_shows_these_texts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        experiments.main(["compare", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in ("speech", "seeds", "steps", "workers", "only"):
        (text,) = re.findall(rf"^ {{4}}{name}: (.*)$", inspect.getdoc(ComparisonConfig), re.MULTILINE)
        assert text in said


CALLS = {
    "argument": lambda: count_spikes("values", 3.0),
    "result": lambda: file_sha256(Path(__file__)),
    "shape of an argument": lambda: ConvolutionModule(4, 3)(torch.randn(2, 4)),
    "shape of a result": lambda: LayerNorm(4)(torch.randn(2, 4)),
}


@pytest.mark.parametrize("call", CALLS)
def test_annotations_are_checked(call, monkeypatch):
    roar, jaxtyping = pytest.importorskip("beartype.roar"), pytest.importorskip("jaxtyping")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: mock.Mock(**{"hexdigest.return_value": 5}))
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda x, *_: x[0])
    with pytest.raises((roar.BeartypeCallHintViolation, jaxtyping.TypeCheckError)):
        CALLS[call]()
