"""Conversion of transformers' models: statistics against float64, losses against the model's own, and refusals."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

from sigattn.conversion import ConversionError, convert  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from tests.conversion.layers import least_squares  # noqa: E402
from tests.integrations.small_models import SIZES as COMMON  # noqa: E402
from tests.integrations.small_models import TEXT, inputs_of  # noqa: E402
from tests.integrations.small_models import model_of as small_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "pad_token_id": 0}
SIZES = {
    "llama": TEXT,
    "bert": COMMON["bert"],
    "gemma2": {**TEXT, "sliding_window": 6, "attn_logit_softcapping": 2.0},  # windows, and logits that are capped
    "t5": {**T5, "decoder_start_token_id": 0},  # position biases, and cross-attention
}


def model_of(kind, implementation="eager"):
    torch.manual_seed(0)
    auto = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    config = AutoConfig.for_model(kind, **SIZES[kind])
    model = auto.get(kind, AutoModelForCausalLM).from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def batches_of(kind, count=6):
    """Batches whose second sample is padded, on the side that the model has."""
    found = []
    for _ in range(count):
        ids, mask = torch.randint(3, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
        mask[1, slice(None, 3) if kind in ("llama", "gemma2") else slice(9, None)] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[1, 3] = -100  # what a row of padding predicts is not defined
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def recorded_rows(model, batches):
    """Return log of the visible keys and lse of each layer's rows, (2, heads, rows), computed in float64."""
    rows = {}
    names = {layer: name for name, layer in model.named_modules()}

    def attention(module, query, key, value, attention_mask, scaling=None, position_bias=None, softcap=None, **_):
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        s = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s if position_bias is None else s + position_bias
        if attention_mask is not None:
            s = s.masked_fill(~attention_mask, -torch.inf) if attention_mask.dtype is torch.bool else s + attention_mask
        visible = (s > -1e4).sum(-1)
        some = (visible > 0)[:, 0]
        pair = torch.stack([visible.log(), s.masked_fill(s < -1e4, -torch.inf).logsumexp(-1)])
        rows.setdefault(names[module], []).append(pair.transpose(1, 2)[:, :, some])  # (2, heads, rows)
        weights = torch.where(some[:, None, :, None], s.softmax(-1), 0)
        return (weights.nan_to_num().to(value.dtype) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("recorder", attention)
    AttentionMaskInterface.register("recorder", lambda *a, **k: sdpa_mask(*a, **{**k, "allow_is_causal_skip": False}))
    model.set_attn_implementation("recorder")
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    return {name: torch.cat(parts, -1) for name, parts in rows.items()}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "t5"])
def test_fit_and_losses(kind):
    """c and a of every layer are numpy's least squares; the losses are those of the model before and after."""
    model, batches = model_of(kind), batches_of(kind)
    rows = recorded_rows(model_of(kind), batches[:5])
    with torch.no_grad():
        before = float(model(**batches[-1]).loss)
    report = convert(model, batches)
    with torch.no_grad():
        after = float(model(**batches[-1]).loss)
    assert (report.loss_softmax, report.loss) == pytest.approx((before, after), rel=1e-4)
    assert abs(after - before) < 0.01 * before
    assert sigmoid.check(model, **batches[0]) == len(report.layers) == len(rows)
    for layer in report.layers:
        for head, (log_visible, lse) in zip(layer.heads, rows[layer.name].unbind(1), strict=True):
            expected = least_squares(log_visible.numpy(), -lse.numpy())
            assert (head.constant, head.slope) == pytest.approx(expected, abs=1e-3), layer.name


class Classifier(nn.Module):
    """A model of transformers within another module, as in sentence-transformers."""

    def __init__(self, own_attention):
        super().__init__()
        self.encoder = AutoModel.from_config(AutoConfig.for_model("bert", **SIZES["bert"]))
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


def test_a_part_of_a_composite_model(tmp_path):
    """Converted while the whole runs; the whole is loaded with one part sigmoid and the other softmax."""
    model, inputs = small_model("clip"), inputs_of("clip")
    before = model(**inputs)
    report = convert(model.text_model, [inputs] * 2, loss=lambda _, batch: model(**batch).logits_per_text.mean())
    assert len(report.layers) == 1
    after = model(**inputs)
    assert torch.equal(after.image_embeds, before.image_embeds)
    assert not torch.allclose(after.text_embeds, before.text_embeds)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).logits_per_text, after.logits_per_text)
    with pytest.raises(ValueError, match="vision_model"):
        sigmoid.check(loaded, **inputs)


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


def refused(model, batches, message, **options):
    """Expect an error with this message, and a model that is as before."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    chosen = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    with pytest.raises(ConversionError, match=message):
        convert(model, batches, **options)
    assert [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")] == chosen
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


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
        (lambda: small_model("clip"), IDS.unbind(), r"do not reach the attention of 'vision_model",
         {"loss": features_of_text}),
        (lambda: model_of("llama", "sdpa"), [{"input_ids": torch.tensor([[99]])}], "does not run on batch 0", {}),
        (lambda: model_of("llama", "sdpa"), EMBEDDINGS, "layers.0.self_attn' are not finite", {}),
        (resnet, [torch.randn(1, 3, 32, 32)], "attention", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_and_unchanged(make, batches, message, options):
    refused(make(), batches, message, **options)


def test_a_converted_model_is_refused():
    model, batches = model_of("llama", "sdpa"), batches_of("llama")
    convert(model, batches)
    refused(model, batches, "LlamaForCausalLM has sigmoid attention already")
