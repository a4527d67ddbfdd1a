"""``sigattn convert``: from a softmax run to a converted, fine-tuned run that the other commands use."""

import argparse
import json
import signal

import pytest
import torch

from sigattn import cli
from sigattn.cli.progress import TrainingProgress
from sigattn.cli.runs import read_run, write_run
from sigattn.models import LanguageModel, LanguageModelConfig, saving
from sigattn.train import metrics
from tests.test_cli import failure

QUICK = ["--training.max-steps", "4", "--training.batch-size", "4", "--training.validate-every", "4"]
QUICK += ["--model.max-seq-len", "32", "--training.eval-batch-size", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "softmax"
    cli.main(["train", "lm-1b-2k", "--tiny", "--softmax", "--folder", str(folder), *QUICK])
    recipe, _, _ = read_run(folder)
    recipe = recipe.with_training(tensor_parallel=2)  # as if trained on two processes
    write_run(folder, recipe, "lm-1b-2k-tiny-softmax", argparse.Namespace(data=None, tokenizer=None))
    return folder


def test_a_run_is_converted_and_fine_tuned(run, capsys):
    cli.main(["convert", str(run), "--steps", "3", "--batches", "4"])
    said = capsys.readouterr().out
    folder = run.with_name("softmax-sigmoid")
    model = saving.load(folder / "model")
    assert model.config.activation == "sigmoid"
    report = json.loads((folder / "conversion.json").read_text())
    assert [layer["name"] for layer in report["layers"]] == ["blocks.0.attention", "blocks.1.attention"]
    rows = metrics.read_metrics(folder / "metrics.jsonl")
    assert len(rows) == 3
    assert rows[0]["loss"] == pytest.approx(report["loss"], rel=0.1)  # it starts from the converted weights
    assert all(f"{name}: loss" in said for name in ("softmax", "converted", "fine-tuned, 3 steps"))
    cli.main(["evaluate", str(folder)])
    found = capsys.readouterr().out.split()
    assert float(found[found.index("bits") + 1]) == pytest.approx(rows[-1]["validation_bits"], rel=1e-4)
    cli.main(["generate", str(folder), "--prompt", "A ", "--max-new-tokens", "5"])
    code, message = failure(["convert", str(run), "--steps", "3"], capsys)
    assert code == 2
    assert "holds a run already" in message
    code, message = failure(["convert", str(folder), "--folder", str(folder / "again")], capsys)
    assert code == 2
    assert "holds a model with activation='sigmoid': only softmax is converted" in message


def test_interrupted_and_resumed_with_distillation(run, tmp_path, capsys, monkeypatch):
    steps = ["convert", str(run), "--steps", "4", "--batches", "2", "--distil", "1"]
    cli.main([*steps, "--folder", str(tmp_path / "whole"), "--resume"])
    assert f"nothing to resume in {tmp_path / 'whole'}: starting" in capsys.readouterr().out

    class Interrupting(TrainingProgress):
        def show(self, name, row):
            super().show(name, row)
            if row["step"] == 1:
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("sigattn.cli.convert.TrainingProgress", Interrupting)
        with pytest.raises(SystemExit) as stopped:
            cli.main([*steps, "--folder", str(tmp_path / "parts")])
    assert stopped.value.code == 130
    assert "stopped after 2 of 4 steps" in capsys.readouterr().out
    # another loss, without the divergence
    code, message = failure([*steps[:-2], "--folder", str(tmp_path / "parts"), "--resume"], capsys)
    assert code == 1
    assert "task" in message
    cli.main([*steps, "--folder", str(tmp_path / "parts"), "--resume"])
    whole, parts = (saving.load(tmp_path / name / "model").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = metrics.read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_a_model_folder_without_a_run(tmp_path, capsys):
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=16, max_seq_len=16))
    saving.save(model, tmp_path / "model")
    cli.main(
        ["convert", str(tmp_path / "model"), "--folder", str(tmp_path / "new"), "--batches", "2", "--batch-size", "2"]
    )
    assert "converted: loss" in capsys.readouterr().out
    assert saving.load(tmp_path / "new" / "model").config.normalize


def test_what_it_refuses(tmp_path, capsys):
    code, message = failure(["convert", str(tmp_path)], capsys)
    assert code == 1
    assert "holds neither a run (run.json) nor a model" in message
    _, message = failure(["convert", str(tmp_path), "--learning-rate", "0"], capsys)
    assert "learning_rate must be a finite number above 0" in message


def test_a_folder_of_transformers_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    code, message = failure(["convert", str(tmp_path)], capsys)
    assert code == 1
    assert "holds a model of transformers (model_type 'llama')" in message
    assert "load it in Python with transformers; sigattn.convert converts it there" in message


def test_options_of_the_fine_tuning_need_steps(tmp_path, capsys):
    for option in (["--distil", "1"], ["--learning-rate", "5"], ["--resume"]):
        code, message = failure(["convert", str(tmp_path), *option], capsys)
        assert code == 2
        assert "applies to the fine-tuning only: pass steps too (--steps)" in message


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("steps", ["0", "2"])
def test_a_converted_model_is_not_overwritten(tmp_path, capsys, steps):
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=16, max_seq_len=16))
    saving.save(model, tmp_path / "model")
    folder = tmp_path / "new"
    arguments = ["convert", str(tmp_path / "model"), "--folder", str(folder), "--batch-size", "2"]
    cli.main([*arguments, "--batches", "2", "--steps", steps])
    before = contents(folder)
    capsys.readouterr()
    code, message = failure([*arguments, "--batches", "3"], capsys)
    assert code == 2
    assert "already" in message
    if steps != "0":
        code, message = failure([*arguments, "--batches", "3", "--steps", "5", "--resume"], capsys)
        assert code == 1
        assert "differs in max_steps" in message
    assert contents(folder) == before
