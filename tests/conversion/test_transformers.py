"""Conversion of transformers' models: losses, models within others, and refusals."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel  # noqa: E402

from sigattn.conversion import convert  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from tests.conversion.layers import refused  # noqa: E402
from tests.conversion.test_fit import of_transformers  # noqa: E402
from tests.integrations.small_models import model_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.mark.parametrize("kind", ["gemma2", "t5"])
def test_the_losses_are_those_of_the_model_before_and_after(kind):
    model, batches = of_transformers(kind)
    batches = [{name: batch[name] for name in ("input_ids", "labels")} for batch in batches]
    with torch.no_grad():
        before = float(model(**batches[-1]).loss)
        report = convert(model, batches)
        after = float(model(**batches[-1]).loss)
    assert (report.loss_softmax, report.loss) == pytest.approx((before, after), rel=1e-4)
    assert abs(after - before) < 0.01 * before
    listed = r": .*sigmoid_bias=\{learned biases of 2 layers\}" if kind == "gemma2" else ""  # T5's are its parts'
    refused(model, f"has sigmoid attention already{listed}", batches=batches)
    assert sigmoid.check(model, **batches[0]) == len(report.layers)


class Classifier(nn.Module):
    """A model of transformers within another module, as in sentence-transformers."""

    def __init__(self, own_attention):
        super().__init__()
        self.encoder = model_of("bert")
        self.pool = nn.MultiheadAttention(32, 4, batch_first=True) if own_attention else None
        self.head = nn.Linear(32, 3)

    def forward(self, ids):
        x = self.encoder(ids).last_hidden_state
        x = x if self.pool is None else self.pool(x, x, x)[0]
        return self.head(x.mean(1))


def test_a_model_within_another(tmp_path):
    model, ids = Classifier(False).eval(), IDS
    report = convert(model, ids.unbind())
    assert [layer.name for layer in report.layers] == [f"encoder.encoder.layer.{i}.attention.self" for i in range(2)]
    model.encoder.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids[0]).last_hidden_state, model.encoder(ids[0]).last_hidden_state)


def test_the_example(monkeypatch, capsys, tmp_path):
    pytest.importorskip("accelerate")
    sizes = {"steps": 2, "finetune-steps": 1, "distil": 1, "layers": 1, "width": 32, "length": 32, "batch-size": 2}
    monkeypatch.chdir(tmp_path)  # where it saves the model
    monkeypatch.setattr(sys, "argv", ["convert_transformers.py", *(f"--{name}={size}" for name, size in sizes.items())])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "convert_transformers.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    values = {
        line[:30].strip(): float(line[30:]) for line in lines[lines.index("bits per byte of held-out text") + 1 :]
    }
    assert list(values) == ["softmax", "sigmoid, converted", "sigmoid, 1 steps later", "softmax, 1 steps later"]
    assert all(4 < value < 9 for value in values.values())
    assert (tmp_path / "converted" / "model.safetensors").exists()


IDS = torch.randint(3, 50, (5, 2, 9), generator=torch.Generator().manual_seed(0))
EMBEDDINGS = [{"inputs_embeds": torch.randn(2, 9, 32)} for _ in range(5)]
EMBEDDINGS[4]["inputs_embeds"][0, 3] = torch.nan  # held out


def features_of_text(model, batch):
    return model.get_text_features(batch).pooler_output.mean()


def resnet():
    return AutoModel.from_config(AutoConfig.for_model("resnet", embedding_size=16, hidden_sizes=[16], depths=[1]))


@pytest.mark.parametrize(
    ("make", "batches", "message", "options"),
    [
        (lambda: Classifier(True), IDS.unbind(), "and other attention.*pool", {}),
        (lambda: model_of("clip"), IDS.unbind(), r"do not reach the attention of 'vision_model",
         {"loss": features_of_text}),
        (lambda: model_of("llama"), [{"input_ids": torch.tensor([[99]])}], "does not run on batch 0", {}),
        (lambda: model_of("llama"), EMBEDDINGS, "layers.0.self_attn' are not finite", {}),
        (resnet, [torch.randn(1, 3, 32, 32)], "attention", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_and_unchanged(make, batches, message, options):
    refused(make(), message, batches=batches, **options)
