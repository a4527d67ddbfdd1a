"""Saved sigmoid models are loaded as sigmoid models, in new processes, for any architecture and Auto class."""

import copy
import json
import math
import os
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from sigattn import convert  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from tests.integrations.small_models import SIZES, TEXT, inputs_of, model_of, replaced, sigmoid_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
MODELS = {  # name: kind, Auto class, bias, settings
    "llama": ("llama", "AutoModelForCausalLM", -math.log(64), {}),
    "base": ("llama", "AutoModel", "log_visible", {}),
    "classifier": ("llama", "AutoModelForSequenceClassification", "learned", {"num_labels": 3}),
    "gemma3": ("gemma3", "AutoModelForImageTextToText", "log_visible", {}),
    "t5gemma": ("t5gemma", "AutoModelForSeq2SeqLM", "learned", {}),
}
SAVED = "sigmoid (import sigattn.integrations.transformers)"
NEW_PROCESS = """
import sys, torch, transformers
saved = list(zip(sys.argv[2::2], sys.argv[3::2]))
early = transformers.AutoConfig.from_pretrained(saved[0][0])
for folder, auto in saved:
    try:
        getattr(transformers, auto).from_pretrained(folder)
    except ValueError as error:
        assert '"sigmoid (import sigattn.integrations.transformers)"` is not supported' in str(error), error
    else:
        raise SystemExit(f"{folder} was loaded without sigattn")

model, inputs, expected = torch.load(sys.argv[1], weights_only=False)  # imports the integration, which registers
with torch.no_grad():
    assert torch.equal(model(**inputs).logits, expected)
from sigattn.integrations import transformers as sigmoid
transformers.AutoConfig.for_model("sigattn")  # of exported models
assert early.to_dict() == transformers.AutoConfig.from_pretrained(saved[0][0]).to_dict()
assert transformers.AutoModelForCausalLM.from_config(early).config._attn_implementation == "sigmoid"
for folder, auto in saved:
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    inputs = torch.load(folder + "/inputs.pt")
    with torch.no_grad():
        torch.save(model(**inputs)[0], folder + "/again.pt")
    sigmoid.check(model, **inputs)
"""


def model_named(name):
    kind, auto, bias, settings = MODELS[name]
    return sigmoid_model(kind, bias, auto=getattr(transformers, auto), **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """All models saved, with inputs and outputs."""
    root = tmp_path_factory.mktemp("saved")
    for name, (kind, *_) in MODELS.items():
        model, inputs = model_named(name), inputs_of(kind)
        sigmoid.check(model, **inputs)
        model.save_pretrained(root / name)
        torch.save(inputs, root / name / "inputs.pt")
        with torch.no_grad():
            torch.save(model(**inputs)[0], root / name / "before.pt")
    return root


def test_new_process(folders, tmp_path):
    """Refused by transformers alone; after the import the same outputs, bit for bit. A pickled model imports."""
    model, inputs = model_named("llama"), inputs_of("llama")
    model.config.sigmoid_bias = -3.0
    with torch.no_grad():
        torch.save((model, inputs, model(**inputs).logits), tmp_path / "pickled.pt")
    arguments = [a for name, (_, auto, *_) in MODELS.items() for a in (str(folders / name), auto)]
    command = [sys.executable, "-c", NEW_PROCESS, str(tmp_path / "pickled.pt"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    for name in MODELS:
        before, again = (torch.load(folders / name / file) for file in ("before.pt", "again.pt"))
        assert before.isfinite().all(), name
        assert torch.equal(before, again), name


def test_the_configuration_names_the_model_and_its_biases(folders):
    entry = {"kind": "VisibleKeysLinearBias", "num_heads": 4}
    learned = {f"layers.{i}.self_attn": entry for i in range(2)}
    for name, expected in (
        ("llama", ["llama", SAVED, -math.log(64), None]),
        ("base", ["llama", SAVED, "log_visible", None]),
        ("classifier", ["llama", SAVED, learned, True]),
    ):
        saved = json.loads((folders / name / "config.json").read_text())
        keys = ("model_type", "attn_implementation", "sigmoid_bias", "sigmoid_normalize")
        assert [saved.get(key) for key in keys] == expected


def test_bias_without_implementation(tmp_path):
    """A configuration with sigmoid_bias selects sigmoid attention if no implementation is asked for."""
    AutoConfig.for_model("llama", **TEXT, sigmoid_bias=-1.0).save_pretrained(tmp_path / "config")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "config"))
    assert sigmoid.check(model, **inputs_of("llama")) == 2
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    written = json.loads(path.read_text())
    del written["attn_implementation"]  # as written by hand
    path.write_text(json.dumps(written))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sigmoid.check(again, **inputs_of("llama")) == 2


@pytest.mark.filterwarnings("default:.*ignores sigmoid_bias")
def test_another_implementation_is_followed_with_a_warning_and_stays(folders, tmp_path):
    with pytest.warns(UserWarning, match=r'"sdpa" ignores sigmoid_bias = -4.15\d* of LlamaConfig'):
        model = AutoModelForCausalLM.from_pretrained(folders / "llama", attn_implementation="sdpa")
    inputs = inputs_of("llama")
    with pytest.raises(ValueError, match="compute a softmax"):
        sigmoid.check(model, **inputs)
    model.set_attn_implementation("sigmoid")
    assert sigmoid.check(model, **inputs) == 2
    with pytest.warns(UserWarning, match='attn_implementation="eager" ignores sigmoid_bias'):
        model.set_attn_implementation("eager")
    plain = model_of("llama", "sdpa")
    for name, softmax in (("switched", model), ("plain", plain)):
        softmax.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(again(**inputs).logits, softmax(**inputs).logits)
        with pytest.raises(ValueError, match="compute a softmax"):
            sigmoid.check(again, **inputs)
    assert "attn_implementation" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_trainer(tmp_path):
    """Checkpoints and the final model of Trainer, and resuming."""
    pytest.importorskip("accelerate")
    rows = [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)}] * 8

    def trainer(model, steps):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_steps=1, logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        return transformers.Trainer(model=model, args=arguments, train_dataset=rows)

    trainer(model_of("llama", "sigmoid"), 1).train()
    resumed = trainer(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1"), 2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed.save_model(str(tmp_path / "final"))
    model, inputs = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval(), inputs_of("llama")
    assert torch.equal(model(**inputs).logits, resumed.model.eval()(**inputs).logits)
    assert sigmoid.check(model, **inputs) == 2


def test_configurations(tmp_path):
    """Configurations of all kinds and their parts keep the choice: a sample, or all with SIGATTN_SWEEP=all (25 s)."""
    for kind in sorted(CONFIG_MAPPING.keys())[:: 1 if os.environ.get("SIGATTN_SWEEP") == "all" else 40]:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # of two kinds whose defaults do not validate
            continue
        config._attn_implementation = "sigmoid"
        config.to_json_file(tmp_path / "config.json")
        again = type(config).from_json_file(tmp_path / "config.json")
        assert implementations(again) == implementations(config), kind
        assert again._attn_implementation == "sigmoid", kind


def implementations(config, name=""):
    """Return the implementations of a configuration and its parts by name."""
    chosen = {name: config._attn_implementation}
    for key, part in vars(config).items():
        if isinstance(part, transformers.PretrainedConfig):
            chosen |= implementations(part, f"{name}.{key}")
    return chosen


class OwnConfig(transformers.PretrainedConfig):
    """As remote code has it: a field called attn_implementation that transformers does not see."""

    model_type = "own"

    def __init__(self, attn_implementation="eager", **kwargs):
        super().__init__(**kwargs)
        self.attn_implementation = attn_implementation


def test_a_field_called_attn_implementation_is_saved(tmp_path):
    config = OwnConfig(attn_implementation="flash_attention_2")
    assert config.to_dict()["attn_implementation"] == "flash_attention_2"
    config._attn_implementation = "sigmoid"
    config.save_pretrained(tmp_path)
    again = OwnConfig.from_pretrained(tmp_path)
    assert (again.attn_implementation, again._attn_implementation) == ("flash_attention_2", "sigmoid")
    assert again.sigmoid_bias == "log_visible"


def outputs_of_clip(model):
    out = model(**inputs_of("clip"))
    return out.text_embeds, out.image_embeds


class TestCompositeModels:
    """sigmoid_bias of the outermost configuration holds where a part has none of its own."""

    @staticmethod
    def clip(text=None, **biases):
        parts = {} if text is None else {"text_config": {**SIZES["clip"]["text_config"], "sigmoid_bias": text}}
        return model_of("clip", "sigmoid", **parts, **biases)

    def test_a_bias_is_inherited_unless_the_part_has_its_own(self):
        low, default, both = self.clip(sigmoid_bias=-9.0), self.clip(), self.clip(text=-9.0)
        for a, b in zip(outputs_of_clip(low), outputs_of_clip(default), strict=True):
            assert not torch.equal(a, b)
        assert torch.equal(outputs_of_clip(low)[0], outputs_of_clip(both)[0])
        assert torch.equal(outputs_of_clip(default)[1], outputs_of_clip(both)[1])
        own = outputs_of_clip(self.clip(sigmoid_bias=-9.0, text=-2.0))
        assert not torch.equal(own[0], outputs_of_clip(low)[0])
        assert torch.equal(own[1], outputs_of_clip(low)[1])
        default.config.sigmoid_bias = -9.0  # read at each call
        assert all(map(torch.equal, outputs_of_clip(low), outputs_of_clip(default)))

    def test_saved_whole_and_in_part(self, tmp_path):
        model, ids = self.clip(sigmoid_bias=-9.0), inputs_of("clip")["input_ids"]
        model.text_model.save_pretrained(tmp_path / "part")
        part = type(model.text_model).from_pretrained(tmp_path / "part")
        torch.testing.assert_close(part(ids).last_hidden_state, model.text_model(ids).last_hidden_state)
        assert model.text_model.config.to_dict().get("sigmoid_bias") != -9.0  # only what was saved has the value
        model.save_pretrained(tmp_path / "whole")
        loaded = AutoModel.from_pretrained(tmp_path / "whole")
        assert all(map(torch.equal, outputs_of_clip(model), outputs_of_clip(loaded)))
        loaded.config.sigmoid_bias = -2.0  # the parts were saved without a value of their own
        assert not torch.equal(outputs_of_clip(model)[0], outputs_of_clip(loaded)[0])

    def test_a_part_that_was_converted(self, tmp_path):
        """While the whole runs; the whole is loaded with one part sigmoid and the other softmax."""
        model, inputs = model_of("clip"), inputs_of("clip")
        before = outputs_of_clip(model)
        report = convert(model.text_model, [inputs] * 2, loss=lambda _, batch: model(**batch).logits_per_text.mean())
        assert len(report.layers) == 1
        after = outputs_of_clip(model)
        assert torch.equal(after[1], before[1])
        assert not torch.allclose(after[0], before[0])
        model.save_pretrained(tmp_path / "whole")
        loaded = AutoModel.from_pretrained(tmp_path / "whole")
        assert all(map(torch.equal, outputs_of_clip(loaded), after))
        with pytest.raises(ValueError, match="vision_model"):
            sigmoid.check(loaded, **inputs)

    def test_learned_biases_are_those_of_the_parts(self, tmp_path):
        """A part's own configuration lists its layers, whether the part or the whole was saved."""
        model, ids = sigmoid_model("clip", "learned"), inputs_of("clip")["input_ids"]
        model.save_pretrained(tmp_path / "whole")
        model.text_model.save_pretrained(tmp_path / "part")
        for folder in ("whole", "part"):
            part = type(model.text_model).from_pretrained(tmp_path / folder)
            torch.testing.assert_close(part(ids).last_hidden_state, model.text_model(ids).last_hidden_state)

    def test_parts_with_their_own_implementation_or_bias(self, tmp_path):
        """Each part is loaded with the implementation that it was saved with; a bias of None is the default."""
        model = model_of("gemma3", {"": "sigmoid", "text_config": "sigmoid", "vision_config": "eager"})
        model.config.sigmoid_bias = None
        model.save_pretrained(tmp_path / "gemma3")
        again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "gemma3")
        parts = again.config, again.config.text_config, again.config.vision_config
        assert [c._attn_implementation for c in parts] == ["sigmoid", "sigmoid", "eager"]
        inputs = inputs_of("gemma3")
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
        sizes = SIZES["clip"]["text_config"]
        encoder, decoder = (
            transformers.BertModel(transformers.BertConfig(**sizes, sigmoid_bias=-1.0), add_pooling_layer=False),
            transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)),
        )
        for part in (encoder, decoder):
            part.eval().set_attn_implementation("sigmoid")
        ids = inputs_of("bert")["input_ids"]
        alone = encoder(ids).last_hidden_state
        whole = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        out = whole(input_ids=ids, decoder_input_ids=ids)
        assert torch.equal(out.encoder_last_hidden_state, alone)
        whole.save_pretrained(tmp_path / "bert")
        again = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "bert").eval()
        assert torch.equal(again(input_ids=ids, decoder_input_ids=ids).logits, out.logits)


@torch.no_grad()
def test_layers_from_a_table_of_classes_are_loaded_as_they_were_converted(tmp_path):
    """SAM's class for SDPA has a dimension of heads, which that for eager attention merges with the samples."""
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config |= {"window_size": 2, "global_attn_indexes": [1], "output_channels": 8, "initializer_range": 0.3}
    model = transformers.SamVisionModel(transformers.SamVisionConfig(**config, num_pos_feats=4)).eval()
    images = torch.randn(3, 1, 3, 32, 32)
    convert(model, list(images))
    model.save_pretrained(tmp_path)
    loaded = transformers.SamVisionModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(images[0])[0], model(images[0])[0])


def test_normalize_is_computed_saved_and_inherited_by_parts(tmp_path):
    """Far below zero it is softmax, so that transformers' own attention is the truth."""
    tokens = inputs_of("llama")["input_ids"]
    model = model_of("llama", "sigmoid", sigmoid_bias=-60.0, sigmoid_normalize=True)
    expected = model(tokens).logits
    torch.testing.assert_close(expected, model_of("llama", "sdpa")(tokens).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(tokens).logits, expected)
    model.config.sigmoid_normalize = 1
    with pytest.raises(ValueError, match="sigmoid_normalize must be True or False, got 1"):
        model(tokens)
    part = model_of("gemma3", "sigmoid", sigmoid_bias=-60.0, sigmoid_normalize=True).model.language_model
    part.save_pretrained(tmp_path / "part")
    assert "sigmoid_normalize" not in vars(part.config)
    again = AutoModel.from_pretrained(tmp_path / "part").eval()
    torch.testing.assert_close(again(tokens).last_hidden_state, part(tokens).last_hidden_state)


# -- learned biases ---------------------------------------------------------------------------------------------------


class TestLearnedBiases:
    """Outputs: test_transformers.py."""

    def test_auto_classes(self, tmp_path):
        """Base model and head model, in both directions, and a checkpoint of many files."""
        model, inputs = sigmoid_model("llama", "learned"), inputs_of()
        expected = model.model(**inputs)[0]
        model.save_pretrained(tmp_path / "head", max_shard_size="5KB")
        base = AutoModel.from_pretrained(tmp_path / "head")
        base.save_pretrained(tmp_path / "base")
        assert torch.equal(base(**inputs)[0], expected)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "base").model(**inputs)[0], expected)
        model.model.save_pretrained(tmp_path / "part")
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "part")(**inputs)[0], expected)

    def test_those_that_are_missing_start_as_new_and_others_are_not_initialised_again(self, tmp_path):
        """-log of the visible keys, as in a new model; init_weights is called by some methods of transformers."""
        model = sigmoid_model("llama", "learned")
        model.save_pretrained(tmp_path)
        for other in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
            before = [p.clone() for n, p in other.named_parameters() if "sigmoid_bias" in n]
            other.init_weights()
            assert all(map(torch.equal, before, (p for n, p in other.named_parameters() if "sigmoid_bias" in n)))
        weights = load_file(tmp_path / "model.safetensors")
        there = {name: w for name, w in weights.items() if "layers.1.self_attn.sigmoid_bias" not in name}
        save_file(there, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        name = "model.layers.0.self_attn.sigmoid_bias.constant"
        assert torch.equal(model.get_parameter(name), weights[name])
        for other in (model, AutoModelForCausalLM.from_config(model.config)):
            bias = other.model.layers[1].self_attn.sigmoid_bias
            assert bias.constant.tolist() == [0.0] * 4
            assert bias.slope.tolist() == [-1.0] * 4

    def test_half_precision_is_sharded_as_it_is_loaded(self, tmp_path):
        """They have the dtype of the weights, as FSDP requires; rounding them changes less than rounding weights."""
        model, ids = sigmoid_model("llama", "learned"), torch.randint(3, 50, (2, 24))
        model.save_pretrained(tmp_path)
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        rounded = copy.deepcopy(half).float()  # computed in float32
        exact_biases = copy.deepcopy(rounded)
        exact_biases.load_state_dict({k: v for k, v in model.state_dict().items() if "sigmoid_bias" in k}, strict=False)
        weights_rounded, both = exact_biases(ids).logits, rounded(ids).logits
        assert (both - weights_rounded).norm() < 1e-3 * (weights_rounded - model(ids).logits).norm()

        expected = half(ids).logits
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            for part in (*half.model.layers, half):
                fully_shard(part, mesh=mesh)
            torch.testing.assert_close(half(ids).logits, expected)
            half(input_ids=ids, labels=ids).loss.backward()
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("by_batches", [True, False], ids=["batches", "number"])
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_a_kept_layer_stays_softmax_when_it_is_saved(kind, by_batches, tmp_path):
    pattern, layers = ("*h.1.*", "transformer.h") if kind == "bloom" else ("*layers.1.*", "model.layers")
    model, softmax = (model_of(kind, spread=0.2) for _ in range(2))
    inputs = inputs_of(kind)
    with torch.no_grad():
        before = softmax(**inputs).logits
        options = {"batches": [inputs] * 2} if by_batches else {"bias": -2.0, "normalize": False}
        report = convert(model, keep=[pattern], **options)
        assert [s.outcome for s in report.softmax] == ["materialised" if kind == "bloom" else "converted", "kept"]
        with pytest.raises(ValueError, match=rf"compute a softmax: {layers}\.1\.[a-z_]+$"):
            sigmoid.check(model, **inputs)
        expected = model(**inputs).logits
        seen = inputs["attention_mask"].bool()
        assert torch.allclose(expected[seen], before[seen], rtol=0.02, atol=0.05) == by_batches
        for dtype in (torch.float32, torch.float64):
            assert replaced(model) == (["transformer.h.0.self_attention"] if kind == "bloom" else [])
            model.save_pretrained(tmp_path)
            model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
            torch.testing.assert_close(model(**inputs).logits[seen].float(), expected[seen])
        if not by_batches:
            model.config.sigmoid_bias[""] = -1.0
            assert not torch.allclose(model(**inputs).logits[seen].float(), expected[seen])
        for other in (model.float(), softmax):
            other.set_attn_implementation("eager")
        assert torch.equal(model(**inputs).logits, softmax(**inputs).logits)


def test_a_kept_decoder_stays_softmax(tmp_path):
    """With its cross-attention, when it is trained, saved, loaded and generates."""
    model = model_of("bart")
    softmax = copy.deepcopy(model)
    batches = [{"input_ids": i, "decoder_input_ids": i[:, :7]} for i in torch.randint(3, 50, (3, 2, 9))]
    report = convert(model, batches, keep=["*decoder*"])
    names = {name for name, _ in model.named_modules() if name.endswith("attn")}
    assert {s.name for s in report.softmax if s.outcome == "kept"} == {name for name in names if "decoder" in name}
    softmax.model.encoder = model.model.encoder
    assert torch.equal(model(**batches[0]).logits, softmax(**batches[0]).logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)
    ids = batches[0]["input_ids"]
    assert torch.equal(*(m.generate(ids, max_new_tokens=5, num_beams=2) for m in (model, loaded)))
    loaded.train()(**batches[0]).logits.square().mean().backward()
    assert all(p.grad is not None for name, p in loaded.named_parameters() if "sigmoid_bias" in name)
