"""A model keeps the default bias of register() with which it was built, whatever is registered later."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from sigattn.conversion.transformers import TransformersAdapter  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from tests.integrations.small_models import CLIP, CLIP_TEXT, inputs_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
TEXT = {**CLIP_TEXT, "bos_token_id": 1}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
CONFIGS = {
    "llama": (AutoModelForCausalLM, TEXT),
    "clip": (AutoModel, CLIP),
    "t5": (AutoModel, T5),  # copies its configuration for encoder and decoder
}


@pytest.fixture(autouse=True)
def log_visible_afterwards():
    yield
    sigmoid.register()


def built(kind, bias, seed=0):
    auto, settings = CONFIGS[kind]
    sigmoid.register(bias)
    torch.manual_seed(seed)
    return auto.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="sigmoid").eval()


def outputs(model):
    inputs = inputs_of(model.config.model_type)
    if model.config.model_type == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        out = model(**inputs)
    return (out.text_embeds, out.image_embeds) if "image_embeds" in out else (out[0],)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
def test_another_default_is_for_models_that_are_built_later(kind, tmp_path):
    first = built(kind, -1.0)
    before = outputs(first)
    second = built(kind, -6.0)
    assert not any(torch.equal(a, b) for a, b in zip(outputs(second), before, strict=True))
    for model in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert same(outputs(model), before)
        assert model.config.to_dict()["sigmoid_bias"] == -1.0
    first.save_pretrained(tmp_path)
    assert same(outputs(CONFIGS[kind][0].from_pretrained(tmp_path).eval()), before)
    first.set_attn_implementation("eager")
    first.set_attn_implementation("sigmoid")
    assert same(outputs(first), before)


def test_a_value_of_the_configuration_is_still_read_at_each_call():
    model, other = built("clip", -1.0), built("clip", -6.0)
    model.config.sigmoid_bias = -6.0
    assert same(outputs(model), outputs(other))
    model.config.sigmoid_bias = None
    assert same(outputs(model), outputs(built("clip", -1.0)))


def test_parts_with_different_defaults_are_saved_with_them(tmp_path):
    encoder, decoder = (
        transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False),
        transformers.BertLMHeadModel(transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)),
    )
    ids = torch.randint(3, 50, (2, 9))
    for part, bias in ((encoder, -1.0), (decoder, -6.0)):
        sigmoid.register(bias)
        part.eval().set_attn_implementation("sigmoid")
    alone = encoder(ids).last_hidden_state
    sigmoid.register(-3.0)
    whole = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    found = whole(input_ids=ids, decoder_input_ids=ids)
    assert torch.equal(found.encoder_last_hidden_state, alone)
    whole.save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids, decoder_input_ids=ids).logits, found.logits)
    whole.config.sigmoid_bias = -2.0  # holds for the parts, which have no value of their own
    expected = whole(input_ids=ids, decoder_input_ids=ids).logits
    whole.save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids, decoder_input_ids=ids).logits, expected)


def test_a_softmax_model_that_was_examined_is_left_as_it_was():
    """It is pickled without this library, and takes the default of the time when sigmoid is chosen."""
    sigmoid.register(-1.0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEXT)).eval()
    config = model.config.to_dict()
    assert len(TransformersAdapter(model, None).layers()) == 1
    assert model.config.to_dict() == config
    assert b"sigattn" not in pickle.dumps(model)
    sigmoid.register(-6.0)
    model.set_attn_implementation("sigmoid")
    assert model.config.to_dict()["sigmoid_bias"] == -6.0


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


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_is_asked_for_weights_raises(kind):
    """Also where its layers do not see the argument, and where the configuration asks for them."""
    settings = {"gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50}, "llama": TEXT}[kind]
    config, ids = AutoConfig.for_model(kind, **settings), torch.randint(3, 50, (2, 5))
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sigmoid").eval()
    with pytest.raises(ValueError, match=r"LMHeadModel|LlamaForCausalLM.*output_attentions: attention weights are"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="pass output_attentions=False"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model(ids, output_attentions=False)
    config.output_attentions = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid").eval()
    with pytest.raises(ValueError, match="output_attentions: attention weights are never formed"):
        model(ids)
    model(ids, output_attentions=False)
    model.set_attn_implementation("eager")
    assert len(model(ids).attentions) == 1
