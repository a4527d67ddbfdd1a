"""Training: it learns, it stops and goes on to the same numbers, it says what does not fit."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sigattn.data.text import ByteText, load_text
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.train import checkpoint, metrics
from sigattn.train.interrupt import CtrlC
from sigattn.train.loop import Interrupted, TrainConfig, train
from sigattn.train.optimizer import adamw
from sigattn.train.schedule import cosine_with_warmup

MODEL = LanguageModelConfig(context=32, layers=2, width=32, heads=2)
TRAIN = TrainConfig(steps=12, batch=4, warmup_steps=3, validate_every=5, validation_batch=8, checkpoint_every=4, seed=3)


@pytest.fixture(scope="module")
def text():
    return ByteText.split(load_text()[:40_000], 32)


def numbers(folder):
    return [
        {k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics.read(folder / "metrics.jsonl")
    ]


def test_it_learns_and_leaves_its_results(tmp_path, text):
    train(MODEL, replace(TRAIN, steps=60), text, tmp_path)
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(60))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert [r["step"] for r in rows if "validation_bits_per_byte" in r] == [*range(4, 60, 5)]
    assert {"loss", "bits_per_byte", "attention_norm", "gradient_norm", "learning_rate"} <= rows[0].keys()
    assert list(tmp_path.glob("events.out.tfevents*"))
    names = load_file(tmp_path / "checkpoint.safetensors").keys()
    assert {"model.embedding.weight", "optimizer.embedding.weight.exp_avg", "random_state"} <= set(names)


@pytest.mark.parametrize("stop_after", [2, 4, 7])
def test_stopped_and_resumed_is_as_never_stopped(tmp_path, text, stop_after):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(MODEL, TRAIN, text, whole)

    def press_ctrl_c(row):
        if row["step"] == stop_after:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match=f"stopped after {stop_after + 1} of 12 steps"):
        train(MODEL, TRAIN, text, parts, on_row=press_ctrl_c)
    train(MODEL, TRAIN, text, parts, resume=True)
    assert numbers(parts) == numbers(whole)
    ours, theirs = (load_file(folder / "checkpoint.safetensors") for folder in (parts, whole))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, text):
    """Rows that were written after the checkpoint are written again, once."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(MODEL, TRAIN, text, whole)

    def die(row):
        if row["step"] == 6:
            raise SystemExit

    with pytest.raises(SystemExit):
        train(MODEL, TRAIN, text, parts, on_row=die)
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "los')  # cut short
    train(MODEL, TRAIN, text, parts, resume=True)
    assert numbers(parts) == numbers(whole)


def test_resuming_a_finished_run_changes_nothing(tmp_path, text):
    train(MODEL, TRAIN, text, tmp_path)
    before = numbers(tmp_path)
    model = train(MODEL, TRAIN, text, tmp_path, resume=True)
    assert numbers(tmp_path) == before
    saved = load_file(tmp_path / "checkpoint.safetensors")
    assert torch.equal(model.state_dict()["norm.weight"], saved["model.norm.weight"])


def test_a_checkpoint_of_another_run_is_refused(tmp_path, text):
    train(MODEL, TRAIN, text, tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="differs in batch, width;"):
        train(replace(MODEL, width=16), replace(TRAIN, batch=2), text, tmp_path, resume=True)


def test_a_broken_checkpoint_is_refused(tmp_path, text):
    (tmp_path / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(checkpoint.CheckpointError, match="cannot read the checkpoint"):
        train(MODEL, TRAIN, text, tmp_path, resume=True)


def test_rows_are_json_lines(tmp_path, text):
    train(MODEL, replace(TRAIN, steps=2), text, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_schedule():
    def factor(step):
        return cosine_with_warmup(step, steps=100, warmup_steps=10, final=0.1)

    assert [factor(s) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert factor(10) == 1.0
    assert abs(factor(99) - 0.1) < 1e-12
    assert all(factor(s) > factor(s + 1) for s in range(10, 99))


def test_only_matrices_decay():
    model = LanguageModel(MODEL)
    groups = adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1).param_groups
    assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups] == [(0.1, {2}), (0.0, {1})]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_ctrl_c_in_the_midst_of_a_step_finishes_it(tmp_path, text, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(MODEL, TRAIN, text, whole)
    loss = LanguageModel.loss

    def interrupted(self, tokens, targets):
        if self.training and len(numbers(parts)) == 2:
            signal.raise_signal(signal.SIGINT)
        return loss(self, tokens, targets)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "loss", interrupted)
        with pytest.raises(Interrupted, match="stopped after 3 of 12"):
            train(MODEL, TRAIN, text, parts)
    assert len(numbers(parts)) == 3
    train(MODEL, TRAIN, text, parts, resume=True)
    assert numbers(parts) == numbers(whole)


def test_a_second_ctrl_c_does_not_wait():
    previous = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == previous
