"""Learned biases in transformers' models: exact against the formula in float64, with caches, and kept when saved."""

import copy
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

from sigattn import convert  # noqa: E402
from sigattn.conversion.transformers import TransformersAdapter  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from sigattn.nn.bias import LearnableBias  # noqa: E402
from sigattn.nn.fitted_bias import VisibleKeysLinearBias  # noqa: E402
from tests.integrations.sizes import SMALL, TEXT, WHISPER  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
ONLY_WHISPER = ("num_mel_bins", "max_source_positions", "max_target_positions")
BART = {name: value for name, value in WHISPER.items() if name not in ONLY_WHISPER}
BART |= {"max_position_embeddings": 64, "forced_eos_token_id": None}
SIZES = {
    "llama": TEXT,
    "gemma3_text": {**TEXT, "sliding_window": 6},  # grouped heads, windows
    "whisper": WHISPER,  # cross-attention
}
DECODERS = ("llama", "gemma3_text")


def formula(module, query, key, value, attention_mask, scaling, **_):
    """σ(scale · Q Kᵀ + c + a · log visible) V, each row over its sum, in float64, with the parameters of the layer."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).double() for t in (key, value))
    constant, slope = (p.double().view(4, 1, 1) for p in module.sigmoid_bias.parameters())
    b = constant + slope * seen.sum(-1, keepdim=True).clamp(min=1).double().log()
    weights = torch.sigmoid(query.double() @ key.mT * scaling + b) * seen
    out = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ value
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def registered():
    sigmoid.register()
    AttentionInterface.register("formula", formula)
    AttentionMaskInterface.register("formula", lambda *a, **k: sdpa_mask(*a, **{**k, "allow_is_causal_skip": False}))


def softmax_model(kind="llama"):
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if kind in DECODERS else AutoModel
    return auto.from_config(AutoConfig.for_model(kind, **SIZES[kind])).eval()


def with_biases(model, make):
    """Give every attention layer of a softmax model a bias that ``make`` returns."""
    adapter = TransformersAdapter(model, None)
    biases = {name: make() for name in adapter.layers()}
    adapter.swap(biases, normalize=True)
    return biases


def converted(kind="llama"):
    return with_random_biases(softmax_model(kind))


def with_random_biases(model):
    for bias in with_biases(model, lambda: VisibleKeysLinearBias(4)).values():
        torch.nn.init.normal_(bias.constant, std=0.3)
        torch.nn.init.normal_(bias.slope, -0.7, 0.2)
    return model


def reference(model):
    other = copy.deepcopy(model)
    for config in (other.config, *(m.config for m in other.modules() if hasattr(m, "config"))):
        config._attn_implementation_internal = "formula"
    return other


def inputs_of(kind="llama"):
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    if kind == "whisper":
        return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids}
    return {"input_ids": ids, "attention_mask": mask.flip(1) if kind == "bert" else mask}


@pytest.mark.parametrize("kind", ["gemma3_text", "whisper"])
def test_exact(kind):
    """Outputs and all gradients, with gradient checkpointing too."""
    ours, inputs = converted(kind), inputs_of(kind)
    theirs = reference(ours)
    assert sigmoid.check(ours, **inputs) >= 2
    a, b = ours(**inputs)[0], theirs(**inputs)[0]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    a.square().mean().backward()
    b.square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
            continue
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad.abs().sum() > 0 for n, p in ours.named_parameters() if "sigmoid_bias" in n)
    expected = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    ours.zero_grad()
    ours.gradient_checkpointing_enable()
    ours.train()(**inputs, **({"use_cache": False} if kind in DECODERS else {}))[0].square().mean().backward()
    for name, p in ours.named_parameters() if kind in DECODERS else ():  # the others have dropout
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-6)


def test_generation():
    """Dynamic, static and no cache, and beams, padded on the left."""
    ours, inputs = converted("gemma3_text"), inputs_of("gemma3_text")
    theirs = reference(ours)
    common = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(**inputs, **common, use_cache=False)
    for how in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(ours.generate(**inputs, **common, **how), expected), how
    beams = {**common, "num_beams": 3}
    assert torch.equal(ours.generate(**inputs, **beams), theirs.generate(**inputs, **beams, use_cache=False))


def test_generation_of_an_encoder_and_a_decoder():
    """The cache holds keys of the decoder and, for cross-attention, of the encoder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bart", **BART)
    ours = with_random_biases(transformers.AutoModelForSeq2SeqLM.from_config(config).eval())
    theirs = reference(ours)
    inputs = inputs_of("bert")  # padded on the right
    common = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(**inputs, **common, use_cache=False)
    for how in ({}, {"use_cache": False}, {"num_beams": 3}):
        if "num_beams" in how:
            expected = theirs.generate(**inputs, **common, **how, use_cache=False)
        assert torch.equal(ours.generate(**inputs, **common, **how), expected), how


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    ours = converted()
    inputs = {"input_ids": inputs_of()["input_ids"], "use_cache": False}
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, ours(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["keep", "max_error"])
def test_layers_that_keep_softmax(by, tmp_path):
    """A decoder stays softmax, with its cross-attention, when it is trained, saved, loaded and generates."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **BART)).eval()
    for name, p in model.named_parameters():  # attention that is not uniform
        if "q_proj.weight" in name:
            torch.nn.init.normal_(p, std=1.0)
    softmax = copy.deepcopy(model)
    given = {"attention_mask": inputs_of("bert")["attention_mask"]}  # padded on the right
    batches = [{"input_ids": i, "decoder_input_ids": i[:, :7], **given} for i in torch.randint(3, 50, (5, 2, 9))]
    largest = max(layer.error for layer in convert(copy.deepcopy(model), batches).layers)
    options = {"keep": ["*decoder*"]} if by == "keep" else {"max_error": 0.99 * largest}
    report = convert(model, batches, **options)
    kept = {layer.name for layer in report.softmax if layer.outcome == "kept"}
    names = {name for name, _ in model.named_modules() if name.endswith("attn")}
    if by == "keep":
        assert kept == {name for name in names if "decoder" in name}
    else:
        assert kept == {layer.name for layer in report.layers if layer.error > 0.99 * largest}
        assert kept < names
        assert kept
    with torch.no_grad():
        expected = softmax(**batches[0]).logits
        torch.testing.assert_close(
            model(**batches[0]).logits, expected, rtol=0, atol=0.01 * float(expected.abs().max())
        )
    softmax.model.encoder = model.model.encoder  # now only the decoders differ, if they do
    if by == "keep":
        assert torch.equal(model(**batches[0]).logits, softmax(**batches[0]).logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)
    ids = batches[0]["input_ids"]
    generated = [m.generate(ids, max_new_tokens=5, num_beams=2) for m in (model, loaded)]
    assert torch.equal(*generated)
    loaded.train()(**batches[0]).logits.square().mean().backward()
    assert all(p.grad is not None for name, p in loaded.named_parameters() if "sigmoid_bias" in name)


class TestSaved:
    """Further cases of saving are in test_transformers_saving.py."""

    def test_the_configuration(self, tmp_path):
        converted().save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        entry = {"kind": "VisibleKeysLinearBias", "num_heads": 4}
        assert saved["sigmoid_bias"] == {f"layers.{i}.self_attn": entry for i in range(2)}
        assert saved["sigmoid_normalize"] is True
        assert saved["attn_implementation"] == "sigmoid (import sigattn.integrations.transformers)"
        assert saved["model_type"] == "llama"

    def test_auto_classes(self, tmp_path):
        """Base model and head model, in both directions, and a checkpoint of many files."""
        model, inputs = converted(), inputs_of()
        expected = model.model(**inputs)[0]
        model.save_pretrained(tmp_path / "head", max_shard_size="5KB")
        base = AutoModel.from_pretrained(tmp_path / "head")
        base.save_pretrained(tmp_path / "base")
        assert torch.equal(base(**inputs)[0], expected)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "base").model(**inputs)[0], expected)
        model.model.save_pretrained(tmp_path / "part")
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "part")(**inputs)[0], expected)

    def test_half_precision(self, tmp_path):
        """The biases stay float32, and so they are saved."""
        model = converted()
        model.save_pretrained(tmp_path / "float32")
        half = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16, device_map="cpu")
        half.save_pretrained(tmp_path / "bfloat16")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16")
        assert half.dtype == again.dtype == torch.bfloat16
        for name, parameter in model.named_parameters():
            if "sigmoid_bias" in name:
                assert torch.equal(again.get_parameter(name), parameter)
        inputs = inputs_of()
        assert torch.equal(again(**inputs).logits, half(**inputs).logits)

    def test_a_part_of_a_composite_model(self, tmp_path):
        """A part's own configuration lists its layers, whether the part or the whole was saved."""
        text = {**SMALL, "num_hidden_layers": 1, "vocab_size": 50, "max_position_embeddings": 32, "eos_token_id": 2}
        vision = {**SMALL, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
        config = AutoConfig.for_model("clip", text_config=text, vision_config=vision, projection_dim=16)
        model = AutoModel.from_config(config).eval()
        biases = with_biases(model, lambda: VisibleKeysLinearBias(4).requires_grad_(False))
        for i, bias in enumerate(biases.values()):
            bias.constant.fill_(i + 1.0)
        model.save_pretrained(tmp_path / "whole")
        model.text_model.save_pretrained(tmp_path / "part")
        ids = torch.randint(3, 50, (2, 9))
        expected = model.text_model(ids).last_hidden_state
        for folder in ("whole", "part"):
            loaded = type(model.text_model).from_pretrained(tmp_path / folder)
            torch.testing.assert_close(loaded(ids).last_hidden_state, expected)

    def test_weights_that_are_missing(self, tmp_path):
        """Biases that a checkpoint lacks are -log of the visible keys, as in a new model of the configuration."""
        converted().save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        kept = {name: w for name, w in weights.items() if "layers.1.self_attn.sigmoid_bias" not in name}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        name = "model.layers.0.self_attn.sigmoid_bias.constant"
        assert torch.equal(model.get_parameter(name), weights[name])
        for other in (model, AutoModelForCausalLM.from_config(model.config)):
            bias = other.model.layers[1].self_attn.sigmoid_bias
            assert bias.constant.tolist() == [0.0] * 4
            assert bias.slope.tolist() == [-1.0] * 4

    def test_initialised_again(self, tmp_path):
        """init_weights, which some methods of transformers call, leaves fitted and loaded biases as they are."""
        model = converted()
        model.save_pretrained(tmp_path)
        for other in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
            before = [p.clone() for n, p in other.named_parameters() if "sigmoid_bias" in n]
            other.init_weights()
            after = [p for n, p in other.named_parameters() if "sigmoid_bias" in n]
            assert all(map(torch.equal, before, after))


def test_weight_decay(tmp_path):
    """Trainer leaves the biases out of weight decay by their names."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    decayed = transformers.Trainer(model=converted(), args=arguments).get_decay_parameter_names(converted())
    assert not [name for name in decayed if "sigmoid_bias" in name]


class TestRefused:
    @pytest.fixture
    def model(self):
        return softmax_model()

    def unchanged(self, model):
        assert model.config._attn_implementation == "sdpa"
        assert not hasattr(model.config, "sigmoid_bias")
        assert not [name for name, _ in model.named_modules() if "sigmoid_bias" in name]

    def test_a_bias_that_cannot_be_saved(self, model):
        with pytest.raises(ValueError, match="LearnableBias cannot be saved in a configuration"):
            convert(model, bias=LearnableBias(-3.0))
        self.unchanged(model)

    def test_layers_that_share_weights(self, model):
        model._tied_weights_keys = {r"model.layers.1.self_attn.\w+": r"model.layers.0.self_attn.\w+"}
        model.config.tie_word_embeddings = True
        with pytest.raises(ValueError, match="share their weights"):
            with_biases(model, lambda: VisibleKeysLinearBias(4))
        self.unchanged(model)

    def test_converted_models(self):
        with pytest.raises(ValueError, match="LlamaForCausalLM has sigmoid attention already"):
            convert(converted())

    def test_a_number_for_a_converted_model(self):
        model = converted()
        model.config.sigmoid_bias = -4.0
        with pytest.raises(ValueError, match=r"sigmoid_bias is -4.0, but this layer has a learned bias"):
            model(**inputs_of())

    def test_a_layer_without_a_bias(self):
        model = converted()
        del model.model.layers[1].self_attn.sigmoid_bias
        with pytest.raises(ValueError, match="lists learned biases, but this layer has none"):
            model(**inputs_of())

    @pytest.mark.parametrize(
        "entry", [{"kind": "Unknown"}, {"kind": "VisibleKeysLinearBias", "rank": 2}, -3.0], ids=str
    )
    def test_entries_of_another_version(self, entry):
        config = AutoConfig.for_model("llama", **TEXT, sigmoid_bias={"layers.0.self_attn": entry})
        with pytest.raises(ValueError, match="no bias of this version of sigattn"):
            AutoModelForCausalLM.from_config(config)
