"""Saved sigmoid models are loaded as sigmoid models, in new processes, for any architecture and Auto class."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from sigattn.integrations import transformers as sigmoid  # noqa: E402
from tests.integrations.small_models import IMAGE, TEXT, with_random_biases  # noqa: E402

VISION = {**IMAGE, "vision_use_head": False}
GEMMA3 = {"text_config": {**TEXT, "sliding_window": 4}, "vision_config": VISION, "mm_tokens_per_image": 4}
GEMMA3 |= {"image_token_index": 49, "boi_token_index": 47, "eoi_token_index": 48}
MODULE = {**TEXT, "attn_logit_softcapping": None}
MODELS = {
    "llama": ("AutoModelForCausalLM", "llama", {**TEXT, "sigmoid_bias": -math.log(64)}),
    "llama_base": ("AutoModel", "llama", TEXT),
    "llama_classifier_converted": ("AutoModelForSequenceClassification", "llama", {**TEXT, "num_labels": 3}),
    "qwen2": ("AutoModelForCausalLM", "qwen2", TEXT),
    "gemma3": ("AutoModelForImageTextToText", "gemma3", GEMMA3),
    "t5gemma_converted": ("AutoModelForSeq2SeqLM", "t5gemma", {"encoder": MODULE, "decoder": MODULE, "vocab_size": 50}),
}
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


def config_of(kind, **more):
    _, model_type, settings = MODELS[kind]
    return AutoConfig.for_model(model_type, **settings, **more)


def model_of(kind, **options):
    torch.manual_seed(0)
    auto = getattr(transformers, MODELS[kind][0])
    if not kind.endswith("_converted"):
        return auto.from_config(config_of(kind), **{"attn_implementation": "sigmoid", **options}).eval()
    return with_random_biases(auto.from_config(config_of(kind)).eval())


def inputs_of(kind):
    torch.manual_seed(1)
    ids = torch.randint(3, 47, (2, 9))
    if kind == "gemma3":
        ids[:, 1:5] = 49
        types = torch.zeros_like(ids)
        types[:, 1:5] = 1
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": types}
    return {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "t5gemma_converted" else {})}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """All models saved, with inputs and outputs."""
    root = tmp_path_factory.mktemp("saved")
    for kind in MODELS:
        model, inputs = model_of(kind), inputs_of(kind)
        sigmoid.check(model, **inputs)
        model.save_pretrained(root / kind)
        torch.save(inputs, root / kind / "inputs.pt")
        with torch.no_grad():
            torch.save(model(**inputs)[0], root / kind / "before.pt")
    return root


def test_new_process(folders, tmp_path):
    """Refused by transformers alone; after the import the same outputs, bit for bit. A pickled model imports."""
    model, inputs = model_of("qwen2"), inputs_of("qwen2")
    model.config.sigmoid_bias = -3.0
    with torch.no_grad():
        torch.save((model, inputs, model(**inputs).logits), tmp_path / "pickled.pt")
    arguments = [a for kind, (auto, *_) in MODELS.items() for a in (str(folders / kind), auto)]
    command = [sys.executable, "-c", NEW_PROCESS, str(tmp_path / "pickled.pt"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    for kind in MODELS:
        before, again = (torch.load(folders / kind / name) for name in ("before.pt", "again.pt"))
        assert before.isfinite().all(), kind
        assert torch.equal(before, again), kind


def test_the_configuration_names_the_model_and_its_bias(folders):
    for kind, bias in (("llama", -math.log(64)), ("qwen2", "log_visible")):
        saved = json.loads((folders / kind / "config.json").read_text())
        names = [saved[name] for name in ("model_type", "attn_implementation", "sigmoid_bias")]
        assert names == [kind, "sigmoid (import sigattn.integrations.transformers)", bias]


def test_a_bias_of_none_is_the_default(tmp_path):
    model, inputs = model_of("gemma3"), inputs_of("gemma3")
    model.config.sigmoid_bias = None
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert sigmoid.check(again, **inputs) > 0
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)


def test_bias_without_implementation(tmp_path):
    """A configuration with sigmoid_bias selects sigmoid attention if no implementation is asked for."""
    config_of("llama").save_pretrained(tmp_path / "config")
    config = AutoConfig.from_pretrained(tmp_path / "config")
    model = AutoModelForCausalLM.from_config(config)
    assert sigmoid.check(model, **inputs_of("llama")) == 2
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    written = json.loads(path.read_text())
    del written["attn_implementation"]  # as written by hand
    path.write_text(json.dumps(written))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sigmoid.check(again, **inputs_of("llama")) == 2


def test_another_implementation_warns(folders):
    """An explicit choice is followed, with a warning that names it; saved again, it stays what it was."""
    with pytest.warns(UserWarning, match=r'"sdpa" ignores sigmoid_bias = -4.15\d* of LlamaConfig'):
        model = AutoModelForCausalLM.from_pretrained(folders / "llama", attn_implementation="sdpa")
    with pytest.raises(ValueError, match="compute a softmax"):
        sigmoid.check(model, **inputs_of("llama"))
    model.set_attn_implementation("sigmoid")
    assert sigmoid.check(model, **inputs_of("llama")) == 2
    with pytest.warns(UserWarning, match='attn_implementation="eager" ignores sigmoid_bias'):
        model.set_attn_implementation("eager")


@pytest.mark.filterwarnings("ignore:.*ignores sigmoid_bias")
def test_softmax_stays_softmax(folders, tmp_path):
    """Saved after another choice, or without sigmoid attention at all."""
    switched = AutoModelForCausalLM.from_pretrained(folders / "llama", attn_implementation="eager")
    switched.save_pretrained(tmp_path / "switched")
    plain = model_of("qwen2", attn_implementation="sdpa")
    plain.save_pretrained(tmp_path / "plain")
    assert "attn_implementation" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    for folder, model in (("switched", switched), ("plain", plain)):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        inputs = inputs_of("llama")
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
        with pytest.raises(ValueError, match="compute a softmax"):
            sigmoid.check(again, **inputs)


def test_parts_of_a_composite_model(tmp_path):
    """Each part is loaded with the implementation that it was saved with."""
    chosen = {"": "sigmoid", "text_config": "sigmoid", "vision_config": "eager"}
    model = model_of("gemma3", attn_implementation=chosen)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    parts = again.config, again.config.text_config, again.config.vision_config
    assert [c._attn_implementation for c in parts] == ["sigmoid", "sigmoid", "eager"]
    inputs = inputs_of("gemma3")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


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

    trainer(model_of("llama"), 1).train()
    resumed = trainer(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1"), 2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed.save_model(str(tmp_path / "final"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    inputs = inputs_of("llama")
    assert torch.equal(model(**inputs).logits, resumed.model.eval()(**inputs).logits)
    assert sigmoid.check(model, **inputs) == 2


def test_configurations(tmp_path):
    """Configurations of all kinds and their parts keep the choice: a sample, or all with SIGATTN_SWEEP=all (25 s)."""
    kinds = sorted(CONFIG_MAPPING.keys())[:: 1 if os.environ.get("SIGATTN_SWEEP") == "all" else 40]
    for kind in kinds:
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
    parts = [(key, part) for key, part in vars(config).items() if isinstance(part, transformers.PretrainedConfig)]
    found = {name: config._attn_implementation}
    for key, part in parts:
        found |= implementations(part, f"{name}.{key}")
    return found


@pytest.mark.filterwarnings("ignore")
def test_normalize_is_computed_saved_and_inherited_by_parts(tmp_path):
    """Far below zero it is softmax, so that transformers' own attention is the truth."""
    tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    config = CONFIG_MAPPING["llama"](**TEXT, sigmoid_bias=-60.0, sigmoid_normalize=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid").eval()
    softmax = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**TEXT), attn_implementation="sdpa").eval()
    softmax.load_state_dict(model.state_dict())
    expected = model(tokens).logits
    torch.testing.assert_close(expected, softmax(tokens).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(tokens).logits, expected)
    model.config.sigmoid_normalize = 1
    with pytest.raises(ValueError, match="sigmoid_normalize must be True or False, got 1"):
        model(tokens)
    config = CONFIG_MAPPING["gemma3"](**GEMMA3, sigmoid_bias=-60.0, sigmoid_normalize=True)
    whole = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sigmoid").eval()
    part = whole.model.language_model
    part.save_pretrained(tmp_path / "part")
    assert "sigmoid_normalize" not in vars(part.config)
    again = transformers.AutoModel.from_pretrained(tmp_path / "part").eval()
    torch.testing.assert_close(again(tokens).last_hidden_state, part(tokens).last_hidden_state)
