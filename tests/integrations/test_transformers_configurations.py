"""Configurations: parts with biases of their own, fields of other code, and requests for attention weights."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from sigattn.conversion.transformers import TransformersAdapter  # noqa: E402
from tests.integrations.small_models import CLIP_TEXT  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
TEXT = {**CLIP_TEXT, "bos_token_id": 1}


def test_parts_with_different_biases_are_saved_with_them(tmp_path):
    encoder, decoder = (
        transformers.BertModel(transformers.BertConfig(**TEXT, sigmoid_bias=-1.0), add_pooling_layer=False),
        transformers.BertLMHeadModel(transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)),
    )
    ids = torch.randint(3, 50, (2, 9))
    for part in (encoder, decoder):
        part.eval().set_attn_implementation("sigmoid")
    alone = encoder(ids).last_hidden_state
    whole = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    out = whole(input_ids=ids, decoder_input_ids=ids)
    assert torch.equal(out.encoder_last_hidden_state, alone)
    whole.save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids, decoder_input_ids=ids).logits, out.logits)


def test_a_softmax_model_that_was_examined_is_left_as_it_was():
    """It is pickled without this library."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEXT)).eval()
    config = model.config.to_dict()
    assert len(TransformersAdapter(model, None).layers()) == 1
    assert model.config.to_dict() == config
    assert b"sigattn" not in pickle.dumps(model)


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
