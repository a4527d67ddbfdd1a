"""Conversion of every family of models, which are restored and saved."""

import contextlib
import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from sigattn import models
from sigattn.conversion import ConversionError, convert, restore
from sigattn.models.transformer import Transformer
from sigattn.nn import Attention, SigmoidMultiheadAttention
from tests.conversion.layers import Attend, Both, X, language, refused, replace

SMALL = {"activation": "softmax", "num_layers": 2, "embed_dim": 16, "num_heads": 4}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 2, "channels": 1}


def tokens(*shape):
    return torch.randint(32, (6, *shape))


def multihead():
    return nn.MultiheadAttention(16, 4, batch_first=True), [(x, x, x) for x in X]


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    hidden = torch.arange(7) >= torch.tensor([[7], [5]])
    return nn.TransformerEncoder(layer, 2), [{"src": x, "src_key_padding_mask": hidden} for x in X]


def transformer():
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return nn.Transformer(16, 4, 1, 1, 32, batch_first=True), [{"src": x, "tgt": x, "tgt_mask": mask} for x in X]


def speech(**changes):
    batches = [(torch.randn(2, 30, 8), torch.tensor([30, 18])) for _ in range(6)]
    return models.SpeechModel(models.SpeechModelConfig(**SMALL, num_mel_bins=8, **changes)), batches


def autoencoder():
    config = models.MaskedAutoencoderConfig(
        encoder=models.ViTConfig(**IMAGE, num_classes=0),
        decoder_num_layers=1,
        decoder_embed_dim=16,
        decoder_num_heads=2,
    )
    return models.MaskedAutoencoder(config), list(torch.randn(6, 2, 1, 8, 8))


def cross():
    layer = Attention(16, 4, activation="softmax", attention_bias=None, kv_embed_dim=12)
    return layer, [(x, torch.randn(2, 5, 12)) for x in X]


FAMILIES = {
    "rope": lambda: (language(), list(tokens(2, 20))),
    "alibi": lambda: (language(position="alibi", num_kv_heads=2), list(tokens(2, 20))),
    "temperature": lambda: (language(temperature=0.5), list(tokens(2, 20))),
    "vision": lambda: (models.ViT(models.ViTConfig(**IMAGE, num_classes=3)), list(torch.randn(6, 2, 1, 8, 8))),
    "speech": lambda: speech(position="alibi"),
    "conformer": lambda: speech(block_kind="conformer", conformer_kernel_size=3),
    "cross": cross,
    "autoencoder": autoencoder,
    "multihead": multihead,
    "encoder": encoder,
    "transformer": transformer,
}
ATTENTION = (Attention, SigmoidMultiheadAttention)


def output_of(model, batch):
    torch.manual_seed(1)
    out = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """Return the name of a family, its model in training mode, and the model converted, with batches and report."""
    torch.manual_seed(0)
    model, batches = FAMILIES[request.param]()
    softmax = copy.deepcopy(model.train())
    report = convert(model, batches)
    return request.param, softmax, model, batches, report


def test_every_attention_is_converted_and_its_bias_learns(family):
    _, softmax, model, batches, report = family
    state, layers = softmax.state_dict(), {n: m for n, m in model.named_modules() if isinstance(m, ATTENTION)}
    assert [layer.name for layer in report.layers] == list(layers)
    assert all(m.training for m in model.modules())
    for name, value in state.items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert all(layer.error < 0.01 for layer in report.layers), report
    copied = pickle.loads(pickle.dumps(model))
    expected = output_of(copied.eval(), batches[0])
    torch.testing.assert_close(output_of(copy.deepcopy(model).eval(), batches[0]), expected)
    expected.square().sum().backward()
    learned = {n: p for n, p in copied.named_parameters() if n not in state}
    assert len(learned) == 2 * len(layers)
    assert all(p.grad.abs().sum() > 0 for p in learned.values()), learned


def test_a_converted_model_is_restored_and_loaded(family, tmp_path):
    """By ``restore`` into a new model; and models of this library from a folder."""
    name, softmax, model, batches, _ = family
    new = copy.deepcopy(softmax)
    restore(new, model.state_dict())
    others = [new]
    if isinstance(model, Transformer):
        models.saving.save(model, tmp_path)
        others.append(models.saving.load(tmp_path))
        assert others[1].config == new.config == model.config
        assert str(model.config).count("activation='sigmoid'") == 1
    expected = output_of(copy.deepcopy(model).eval(), batches[0])
    for other in others:
        assert Counter(map(type, other.modules())) == Counter(map(type, model.modules()))
        assert other.state_dict().keys() == model.state_dict().keys()
        torch.testing.assert_close(output_of(other.eval(), batches[0]), expected)
    if name == "alibi":  # generation with a cache and padding is exact
        prompts = [torch.randint(32, (n,)) for n in (3, 6)]
        for prompt, row in zip(prompts, others[1].generate(prompts, 4, temperature=0.0), strict=True):
            for n in range(len(prompt), len(row)):
                assert others[1](row[None, :n])[0, -1].argmax() == row[n]


def test_a_shared_layer_is_restored():
    model, new = (nn.Sequential(*[Attend()] * 2) for _ in range(2))
    convert(model, list(X))
    restore(new, model.state_dict())
    assert new[0] is new[1]
    torch.testing.assert_close(new(X[0]), model(X[0]))


@pytest.mark.usefixtures("unchecked")
def test_another_state_dict_is_not_restored():
    model, _ = multihead()
    with pytest.raises(ConversionError, match=r"^restore: the state dict has no fitted biases"):
        restore(model, model.state_dict())
    state = {**model.state_dict(), "sigmoid_bias.constant": torch.zeros(4)}
    with pytest.raises(ConversionError, match="the parameters constant, which is no VisibleKeysLinearBias"):
        restore(model, state)
    with pytest.raises(TypeError, match=r"state must be a state dict .*, got 'weights\.pt'"):
        restore(model, "weights.pt")
    assert type(model) is nn.MultiheadAttention
    attention = Both(Attend())
    convert(attention, list(X))
    with pytest.raises(ConversionError, match=r"^restore: Linear has no softmax attention"):
        restore(nn.Linear(2, 2), attention.state_dict())
    with pytest.raises(ConversionError, match=r"for 'second', where Both has no softmax .* \(it has in 'first'\)"):
        restore(Both(nn.Linear(16, 16)), attention.state_dict())


def test_the_mode_of_each_layer_is_restored_by_its_own_method():
    """As in layers that merge a low-rank update in evaluation, and in frozen normalisation layers."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Attend(), Merging(16, 16), nn.BatchNorm1d(7).eval())
    for run in (lambda: replace(model, (X[0],), keep=["2*"]), lambda: convert(model, list(X))):
        with contextlib.suppress(ValueError):  # the pattern matches nothing: refused after the run
            run()
        assert [m.training for m in model] == [True, True, False]
        assert not model[1].merged


@pytest.mark.parametrize(
    ("change", "value", "initial"),
    [(torch.set_default_dtype, torch.bfloat16, torch.float32), (torch.set_default_device, "meta", None)],
)
def test_biases_are_float32_and_on_the_device_of_the_model(change, value, initial):
    """Whatever the defaults are; sums of the fit stay on the CPU."""
    model = Attend()
    change(value)
    try:
        convert(model, list(X))
    finally:
        change(initial)
    assert {(t.dtype, t.device.type) for t in model.state_dict().values()} == {(torch.float32, "cpu")}


class Encoder(nn.Module):
    """Encoder of texts that takes one mapping and writes into it, as a ``SentenceTransformer`` does."""

    def __init__(self):
        super().__init__()
        self.attend = Attend()

    def forward(self, inputs, **_):
        assert "output" not in inputs
        inputs["x"] += 0  # in place
        inputs["output"] = self.attend(inputs["x"])
        inputs["x"].zero_()
        return inputs

    def encode(self, texts, show_progress_bar=True, convert_to_tensor=False):
        """Call ``forward`` as ``SentenceTransformer`` does: without hooks."""
        assert isinstance(texts, list)
        assert not show_progress_bar
        output = self.forward({"x": X[len(texts[0])].clone()})["output"].mean(1)
        return output if convert_to_tensor else output.numpy()


@pytest.mark.parametrize("form", ["mapping", "tuple", "list", "texts", "tuples of texts"])
def test_batches_that_the_model_writes_into(form):
    batches = {
        "mapping": [{"x": x.clone()} for x in X],
        "tuple": [({"x": x.clone()},) for x in X],
        "list": [[{"x": x.clone()}] for x in X],
        "texts": [["a" * i, "b"] for i in range(6)],
        "tuples of texts": [("a" * i, "b") for i in range(6)],
    }[form]
    model, alone = Encoder(), Attend()
    alone.load_state_dict(model.attend.state_dict())
    softmax = copy.deepcopy(model)
    report = convert(model, batches)
    if "texts" in form:
        assert report.num_held_out == 1
        options = {"show_progress_bar": False, "convert_to_tensor": True}
        with torch.no_grad():
            before, after = (m.encode(list(batches[5]), **options) for m in (softmax, model))
        assert report.change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    assert 0 < report.change < 0.01
    convert(alone, list(X))
    assert torch.equal(model.attend.sigmoid_bias.constant, alone.sigmoid_bias.constant)


@pytest.mark.parametrize("kind", [Encoder, Attend])
@pytest.mark.parametrize("batches", [["a", "b"], ("a", "b"), [["a"], {"x": X[0]}]])
def test_texts_that_are_no_batches(kind, batches):
    refused(kind(), r"if every batch is a list of them: \[texts\[:8\], texts\[8:16\], …\]", batches=batches)


def test_the_error_of_a_layer_whose_output_is_zero_at_first():
    layer, batches = multihead()
    nn.init.zeros_(layer.out_proj.weight)
    assert convert(layer, batches).layers[0].error == 0


class Gated(Attend):
    def forward(self, x):
        return super().forward(x) * x.softmax(-1)


class Experts(nn.Linear):
    """A softmax that is no attention, in a layer that multiplies matrices."""

    def forward(self, x):
        return x * super().forward(x).softmax(-1) @ self.weight


class Inside(Attend):
    def __init__(self):
        super().__init__()
        self.experts = Experts(16, 16)

    def forward(self, x):
        return self.experts(super().forward(x))


@pytest.mark.parametrize("kind", [lambda: Both(Experts(16, 16)), Gated, Inside])
def test_a_softmax_that_is_no_attention_stays_and_the_rest_is_restored_with_an_example(kind):
    model, new, by_code = kind(), kind(), kind()
    report = convert(model, list(X))
    assert [layer.name for layer in report.layers] == ["first" if isinstance(model, Both) else ""]
    if isinstance(model, Both):
        torch.testing.assert_close(model(X[0]), model.second(model.first(X[0])))
    restore(new, model.state_dict(), (X[0],))
    torch.testing.assert_close(new(X[0]), model(X[0]))
    if kind is Gated:
        with pytest.raises(RuntimeError, match="with example="):
            (restore(by_code, model.state_dict()), by_code(X[0]))
    else:
        restore(by_code, model.state_dict())
        torch.testing.assert_close(by_code(X[0]), model(X[0]))


class Unreplaceable(nn.Module):
    def forward(self, x):
        return torch.ops.aten._softmax(x @ x.mT, -1, False) @ x


@pytest.mark.parametrize("example", [None, (X[0],)])
def test_a_layer_that_was_kept_stays(example):
    """Also one that could not have been converted, which a code search alone finds, too."""
    model, new = Both(Unreplaceable()), Both(Unreplaceable())
    convert(model, list(X), keep=["second"])
    restore(new, model.state_dict(), example)
    torch.testing.assert_close(new(X[0]), model(X[0]))
