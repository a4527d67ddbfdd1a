"""Learned biases in transformers' models: kept when saved, and what is refused. (Outputs: test_transformers.py.)"""

import copy
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: E402

from sigattn import convert  # noqa: E402
from sigattn.nn.bias import LearnableBias  # noqa: E402
from sigattn.nn.fitted_bias import VisibleKeysLinearBias  # noqa: E402
from tests.integrations.small_models import (  # noqa: E402
    TEXT,
    inputs_of,
    model_of,
    sigmoid_model,
    with_biases,
    with_random_biases,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def converted():
    return sigmoid_model("llama", "learned")


def test_layers_that_keep_softmax(tmp_path):
    """A decoder stays softmax, with its cross-attention, when it is trained, saved, loaded and generates."""
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

    def test_a_part_of_a_composite_model(self, tmp_path):
        """A part's own configuration lists its layers, whether the part or the whole was saved."""
        model = model_of("clip")
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


def unchanged(model):
    has_bias = hasattr(model.config, "sigmoid_bias") or any("sigmoid_bias" in n for n, _ in model.named_modules())
    return model.config._attn_implementation == "sdpa" and not has_bias


def test_biases_that_cannot_be_saved_are_refused():
    model = model_of()
    with pytest.raises(ValueError, match="LearnableBias cannot be saved in a configuration"):
        convert(model, bias=LearnableBias(-3.0))
    assert unchanged(model)
    model._tied_weights_keys = {r"model.layers.1.self_attn.\w+": r"model.layers.0.self_attn.\w+"}
    model.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="share their weights"):
        with_random_biases(model)
    assert unchanged(model)


def test_settings_that_contradict_learned_biases_are_refused():
    model = converted()
    with pytest.raises(ValueError, match="LlamaForCausalLM has sigmoid attention already"):
        convert(model)
    listed, model.config.sigmoid_bias = model.config.sigmoid_bias, -4.0
    with pytest.raises(ValueError, match=r"sigmoid_bias is -4.0, but this layer has a learned bias"):
        model(**inputs_of())
    model.config.sigmoid_bias = listed
    del model.model.layers[1].self_attn.sigmoid_bias
    with pytest.raises(ValueError, match="lists learned biases, but this layer has none"):
        model(**inputs_of())
    for entry in ({"kind": "Unknown"}, {"kind": "VisibleKeysLinearBias", "rank": 2}, -3.0):
        config = AutoConfig.for_model("llama", **TEXT, sigmoid_bias={"layers.0.self_attn": entry})
        with pytest.raises(ValueError, match="no bias of this version of sigattn"):
            AutoModelForCausalLM.from_config(config)


def test_half_precision_is_sharded_as_it_is_loaded(tmp_path):
    """The biases have the dtype of the weights, as FSDP requires; rounding them changes less than rounding weights."""
    model = converted()
    ids = torch.randint(3, 50, (2, 24))
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


def test_biases_of_more_heads_than_the_call_has():
    """As where a plan of tensor parallelism splits the heads."""
    model = converted()
    layer = model.model.layers[0].self_attn
    layer.sigmoid_bias = VisibleKeysLinearBias(2 * model.config.num_attention_heads)
    with pytest.raises(ValueError, match="tensor parallelism"):
        model(torch.randint(3, 50, (1, 7)))
