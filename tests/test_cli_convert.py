"""``sigattn convert``: from a softmax run to a converted, fine-tuned run that the other commands use."""

import json
import signal

import pytest
import torch

from sigattn import cli
from sigattn.cli.runs import TrainingProgress, read_run, write_run
from sigattn.models import LanguageModel, LanguageModelConfig, saving
from sigattn.train import metrics
from tests.test_cli import contents
from tests.test_mistakes import DATA, USAGE, mistake

QUICK = ["--training.max-steps", "4", "--training.batch-size", "4", "--training.validate-every", "4"]
QUICK += ["--model.max-seq-len", "32", "--training.eval-batch-size", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "softmax"
    cli.main(["train", "lm-1b-2k", "--tiny", "--softmax", "--folder", str(folder), *QUICK])
    recipe, _, _ = read_run(folder)
    recipe = recipe.with_training(tensor_parallel=2)  # as if trained on two processes
    write_run(folder, recipe, "lm-1b-2k-tiny-softmax", None, None)
    return folder


def test_a_run_is_converted_and_fine_tuned_once(run, capsys):
    arguments = ["convert", str(run), "--batches", "4", "--steps", "3"]
    cli.main(arguments)
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
    capsys.readouterr()
    before = contents(folder)
    for options, code, message in (
        (arguments, USAGE, "holds a run already"),
        ([*arguments[:-1], "5", "--resume"], DATA, "differs in max_steps"),
        (["convert", folder, "--folder", folder / "x"], USAGE, "activation='sigmoid': only softmax is converted"),
    ):
        mistake(options, code, message, capsys)
    assert contents(folder) == before


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
        patch.setattr("sigattn.cli.runs.TrainingProgress", Interrupting)
        with pytest.raises(SystemExit) as stopped:
            cli.main([*steps, "--folder", str(tmp_path / "parts")])
    assert stopped.value.code == 130
    assert "stopped after 2 of 4 steps" in capsys.readouterr().out
    # another loss, without the divergence
    mistake([*steps[:-2], "--folder", tmp_path / "parts", "--resume"], DATA, "task", capsys)
    cli.main([*steps, "--folder", str(tmp_path / "parts"), "--resume"])
    whole, parts = (saving.load(tmp_path / name / "model").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = metrics.read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_a_model_folder_without_a_run_is_converted_once(tmp_path, capsys):
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=16, max_seq_len=16))
    saving.save(model, tmp_path / "model")
    arguments = ["convert", str(tmp_path / "model"), "--folder", str(tmp_path / "new"), "--batch-size", "2"]
    cli.main([*arguments, "--batches", "2"])
    assert "converted: loss" in capsys.readouterr().out
    assert saving.load(tmp_path / "new" / "model").config.normalize
    before = contents(tmp_path / "new")
    mistake([*arguments, "--batches", "3"], USAGE, "holds a model already", capsys)
    assert contents(tmp_path / "new") == before


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], DATA, "holds neither a run (run.json) nor a model"),
        (["--learning-rate", "0"], USAGE, "learning_rate must be a finite number above 0"),
        *((o, USAGE, "pass steps too (--steps)") for o in (["--distil", "1"], ["--learning-rate", "5"], ["--resume"])),
    ],
    ids=str,
)
def test_what_it_refuses(options, code, message, tmp_path, capsys):
    mistake(["convert", tmp_path, *options], code, message, capsys)


def test_a_folder_of_transformers_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    message = "holds a model of transformers (model_type 'llama'), which sigattn's commands do not read: load it in "
    mistake(["convert", tmp_path], DATA, f"{message}Python with transformers; sigattn.convert converts it", capsys)
