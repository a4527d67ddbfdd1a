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
from tests.test_cli_train import said
from tests.test_mistakes import DATA, USAGE, mistake

QUICK = "--training.max-steps 4 --training.batch-size 4 --training.validate-every 4 --training.eval-batch-size 8"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "softmax"
    command = f"train lm-1b-2k --tiny --softmax --folder {folder} {QUICK} --model.max-seq-len 32"
    cli.main(command.split())
    recipe, _, _ = read_run(folder)
    recipe = recipe.with_training(tensor_parallel=2)  # as if trained on two processes
    write_run(folder, recipe, "lm-1b-2k-tiny-softmax", None, None)
    return folder


def test_a_run_is_converted_and_fine_tuned_once(run, capsys):
    command = f"convert {run} --batches 4 --steps 3"
    printed = said(capsys, command)
    folder = run.with_name("softmax-sigmoid")
    assert saving.load(folder / "model").config.activation == "sigmoid"
    report = json.loads((folder / "conversion.json").read_text())
    assert [layer["name"] for layer in report["layers"]] == ["blocks.0.attention", "blocks.1.attention"]
    rows = metrics.read_metrics(folder / "metrics.jsonl")
    assert len(rows) == 3
    assert rows[0]["loss"] == pytest.approx(report["loss"], rel=0.1)  # it starts from the converted weights
    assert all(f"{name}: loss" in printed for name in ("softmax", "converted", "fine-tuned, 3 steps"))
    evaluated = said(capsys, f"evaluate {folder}").split()
    bits = float(evaluated[evaluated.index("bits") + 1])
    assert bits == pytest.approx(rows[-1]["validation_bits"], rel=1e-4)
    assert said(capsys, f"generate {folder} --prompt A --max-new-tokens 5").startswith("A")
    before = contents(folder)
    mistake(command, USAGE, "holds a run already", capsys)
    mistake(f"convert {run} --batches 4 --steps 5 --resume", DATA, "differs in max_steps", capsys)
    message = "activation='sigmoid': only softmax is converted"
    mistake(f"convert {folder} --folder {folder / 'x'}", USAGE, message, capsys)
    assert contents(folder) == before


def test_interrupted_and_resumed_with_distillation(run, tmp_path, capsys, monkeypatch):
    command = f"convert {run} --steps 4 --batches 2"
    whole, parts = (f"{command} --distil 1 --folder {tmp_path / name}" for name in ("whole", "parts"))
    assert f"nothing to resume in {tmp_path / 'whole'}: starting" in said(capsys, f"{whole} --resume")

    class Interrupting(TrainingProgress):
        def show(self, name, row):
            super().show(name, row)
            if row["step"] == 1:
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("sigattn.cli.runs.TrainingProgress", Interrupting)
        with pytest.raises(SystemExit) as stopped:
            cli.main(parts.split())
    assert stopped.value.code == 130
    assert "stopped after 2 of 4 steps" in capsys.readouterr().out
    # another loss, without the divergence
    mistake(f"{command} --folder {tmp_path / 'parts'} --resume", DATA, "task", capsys)
    cli.main(f"{parts} --resume".split())
    weights, resumed = (saving.load(tmp_path / name / "model").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())
    rows = metrics.read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_a_model_folder_without_a_run_is_converted_once(tmp_path, capsys):
    model = LanguageModel(LanguageModelConfig(activation="softmax", num_layers=1, embed_dim=16, max_seq_len=16))
    saving.save(model, tmp_path / "model")
    command = f"convert {tmp_path / 'model'} --folder {tmp_path / 'new'} --batch-size 2"
    assert "converted: loss" in said(capsys, f"{command} --batches 2")
    assert saving.load(tmp_path / "new" / "model").config.normalize
    before = contents(tmp_path / "new")
    mistake(f"{command} --batches 3", USAGE, "holds a model already", capsys)
    assert contents(tmp_path / "new") == before
