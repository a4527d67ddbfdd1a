"""attn_implementation="sigmoid" in small models, in every kind of layer. (Outputs: test_transformers_sweep.py.)"""

import copy
import importlib
import pickle
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from benchmarks.compatibility import tiny_transformers as tiny  # noqa: E402
from sigattn import convert  # noqa: E402
from sigattn.conversion.transformers import TransformersAdapter  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from sigattn.integrations.transformers.mask import is_plain_causal, sigmoid_mask  # noqa: E402
from sigattn.nn.bias import LearnableBias, VisibleKeysLinearBias  # noqa: E402
from tests.conversion.layers import refused  # noqa: E402
from tests.conversion.test_fit import of_transformers  # noqa: E402
from tests.integrations import small_models  # noqa: E402
from tests.integrations.small_models import DECODERS, TEXT, inputs_of, model_of, replaced, sigmoid_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def test_gradient_checkpointing_keeps_the_gradients_and_the_check_keeps_the_mode_of_each_layer():
    model, inputs = sigmoid_model("gemma3_text", "learned"), inputs_of("gemma3_text")
    model(**inputs)[0].square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.train()(**inputs, use_cache=False)[0].square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-6)
    next(model.children()).eval()
    modes = [m.training for m in model.modules()]
    assert sigmoid.check(model, **inputs) == 2
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("kind", ["gemma3_text", "bart"])
def test_generation_with_a_cache_is_that_without(kind):
    """Dynamic and static, and beams, with windows and padding; caches of decoder and encoder.

    A server passes ``tokenizer`` to each call, which reaches the layers.
    """
    model, inputs, common = sigmoid_model(kind, "learned"), inputs_of(kind), {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **common, use_cache=False)
    for how in ({}, *([{"cache_implementation": "static"}] if kind in DECODERS else [])):
        assert torch.equal(model.generate(**inputs, **common, **how, tokenizer=object()), expected), how
    beams = {**inputs, **common, "num_beams": 3}
    assert torch.equal(model.generate(**beams), model.generate(**beams, use_cache=False))
    if kind in DECODERS:
        alone = model.generate(inputs["input_ids"][1:, 3:], **common)[0]
        assert torch.equal(alone, expected[1, 3:][: len(alone)])


def test_packed_sequences_do_not_see_one_another():
    """Marked by position_ids or by cu_seq_lens alone; each counts its own keys."""
    ours, ids = sigmoid_model("llama"), torch.randint(3, 50, (1, 10))
    first, second = ours(ids[:, :4]).logits, ours(ids[:, 4:]).logits
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat([first, second], 1), rtol=1e-4, atol=1e-5)
    cu, positions = torch.tensor([0, 4, 10], dtype=torch.int32), torch.arange(10)[None]
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
    packed = ours(ids, position_ids=positions, use_cache=False, **lengths).logits
    second = ours(ids[:, 4:], position_ids=positions[:, 4:]).logits
    torch.testing.assert_close(packed, torch.cat([first, second], 1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a batch of one row"):
        ours(ids.expand(2, 10), use_cache=False, **lengths)


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    ours = sigmoid_model("llama", "learned", num_hidden_layers=1)
    inputs = {"input_ids": inputs_of()["input_ids"], "use_cache": False}
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, ours(**inputs).logits, rtol=1e-4, atol=1e-5)


def queries(q_length, kv_length, attention_mask=None, **options):
    return {"q_length": q_length, "kv_length": kv_length, "attention_mask": attention_mask, **options}


PLAIN_CAUSAL = {
    "whole": queries(5, 5),
    "static cache": queries(5, 9),
    "not padded": queries(3, 3, [[1, 1, 1], [1, 1, 1]]),
    "padding beyond": queries(3, 5, [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]),
    "wide window": queries(5, 5, local_size=9),
}
MASKS = PLAIN_CAUSAL | {
    "padded": queries(5, 5, [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "short mask": queries(4, 4, [[1, 1], [1, 1]]),
    "continued": queries(3, 7, q_offset=4),
    "one token": queries(1, 7, q_offset=6),
    "one token, static": queries(1, 9, q_offset=6),
    "one token, padded": queries(1, 3, [[0, 1, 1], [1, 1, 1]], q_offset=2),
    "one token, padded at an offset": queries(1, 3, [[1, 1, 0, 1], [1, 1, 1, 1]], q_offset=3, kv_offset=1),
    "one token, window": queries(1, 4, q_offset=9, kv_offset=6, local_size=4),
    "narrow window": queries(5, 5, local_size=3),
    "unknown function": queries(5, 5, allow_is_causal_skip=False),
}


class TestMask:
    """The mask function against transformers' own, which is asked never to leave a mask out."""

    @pytest.mark.parametrize("name", MASKS)
    def test_hides_the_same(self, name):
        case = {"allow_is_causal_skip": True, "batch_size": 2, **MASKS[name]}
        if case["attention_mask"] is not None:
            case["attention_mask"] = torch.tensor(case["attention_mask"], dtype=torch.bool)
        if "local_size" in case:
            case["mask_function"] = sliding_window_causal_mask_function(case["local_size"])
        ours, expected = sigmoid_mask(**case), sdpa_mask(**{**case, "allow_is_causal_skip": False})
        assert (ours is None) == (name == "one token")
        assert ours is None or torch.equal(ours, expected)
        assert is_plain_causal(ours) == (name in PLAIN_CAUSAL)

    def test_the_mark_is_lost(self):
        mask = sigmoid_mask(2, 4, 4, allow_is_causal_skip=True)
        assert is_plain_causal(mask)
        for derived in (mask[:, :, 1:], mask.clone(), mask & mask, mask.to(torch.float32)):
            assert not is_plain_causal(derived)
        single = sigmoid_mask(1, 4, 4, allow_is_causal_skip=True)
        single[..., 0] = False
        assert not is_plain_causal(single)

    def test_a_causal_mask_holds_with_is_causal_false(self):
        """As Moonshine passes it."""
        q, causal = torch.randn(2, 4, 5, 8), sigmoid_mask(2, 5, 5, allow_is_causal_skip=True)
        with_mark, without = (
            sigmoid.attention(torch.nn.Identity(), q, q, q, mask, is_causal=False)[0]
            for mask in (causal, causal.clone())
        )
        torch.testing.assert_close(with_mark, without, rtol=1e-4, atol=1e-5)

    def test_a_decoder_as_encoder(self):
        """transformers' is_causal=False of a call, without and with padding."""
        ours = sigmoid_model("llama")
        ids, mask = inputs_of("llama").values()
        changed = ids.clone()
        changed[:, -1] = 3 + (ids[:, -1] - 2) % 40
        for more in ({}, {"attention_mask": mask}):
            a, b = (ours(i, is_causal=False, use_cache=False, **more).logits for i in (ids, changed))
            assert (a - b)[:, 3].abs().amax(-1).min() > 1e-4
            a, b = (ours(i, use_cache=False, **more).logits for i in (ids, changed))
            assert torch.equal(a[:, :8], b[:, :8])


@pytest.mark.parametrize("bias", ["-log n", True, float("nan")], ids=str)
def test_wrong_biases_are_refused(bias):
    with pytest.raises(ValueError, match='sigmoid_bias must be a finite number or "log_visible"'):
        sigmoid_model("llama", bias)(inputs_of("llama")["input_ids"])


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (torch.ones(1, 1, 5, 5, dtype=torch.long), {}, r"Identity.*boolean or floating point, got torch\.int64"),
        *((None, {name: torch.ones(1)}, f"Identity.*{name}: ") for name in ("cache", "unheard_of")),
        (None, {"s_aux": torch.ones(4)}, r"s_aux: .* set config\.sigmoid_normalize = True"),
        (None, {"output_attentions": True}, "output_attentions: the keyword may change the result"),
        (None, {"is_causal": True}, "is_causal=True without a mask"),
    ],
)
def test_what_may_change_results_is_refused(mask, options, message):
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match=message):
        sigmoid.attention(torch.nn.Identity(), q, q, q, mask, **options)
    nothing = dict.fromkeys(options)
    assert sigmoid.attention(torch.nn.Identity(), q, q, q, None, **nothing)[0].shape == (1, 5, 4, 8)


@pytest.mark.parametrize("number", range(24))
def test_the_attention_function_computes_the_formula(number):
    """Masks alone hide keys; a sink is one more term of the sum of a row."""
    r, layer = random.Random(number), torch.nn.Identity()
    layer.is_causal = True  # wrong in models that do not support SDPA
    position, sink = (
        r.choice([None, torch.randn(1, 4, 5, 7)]),
        r.choice([None, torch.randn(4), torch.randn(2, 4, 5, 1)]),
    )
    normalize = sink is not None or r.choice([True, False])
    bias = -2.0 if sink is not None else r.choice([-2.0, "log_visible"])
    layer.config = AutoConfig.for_model("llama", sigmoid_bias=bias, sigmoid_normalize=normalize)
    query, (key, value) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 7, 8)
    seen, form = torch.rand(2, 1, 5, 7) > 0.4, r.choice(["none", "bool", "number"])
    seen[..., 2] = True
    seen = torch.ones_like(seen) if form == "none" else seen
    masks = {"none": None, "bool": seen, "number": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)}
    options = {"sliding_window": r.choice([None, 3]), "position_bias": position, "s_aux": sink}
    out, _ = sigmoid.attention(layer, query, key, value, masks[form], scaling=0.3, **options)
    k, v = (t.double().repeat_interleave(2, 1) for t in (key, value))
    b = bias if bias == -2.0 else -seen.sum(-1, keepdim=True).double().log() - 6 * normalize
    weights = (0.3 * query.double() @ k.mT + b + (0 if position is None else position)).sigmoid() * seen
    if normalize:
        sinks = 0 if sink is None else ((sink.view(4, 1, 1) if sink.dim() == 1 else sink).double() - 2).sigmoid()
        weights = weights / (weights.sum(-1, keepdim=True) + sinks)
    torch.testing.assert_close(out.transpose(1, 2).double(), weights @ v, rtol=1e-5, atol=1e-6)


def test_a_softmax_model_that_was_examined_is_left_as_it_was():
    """It is pickled without this library."""
    model = model_of("llama")
    config = model.config.to_dict()
    assert len(TransformersAdapter(model, None).layers()) == 2
    assert model.config.to_dict() == config
    assert b"sigattn" not in pickle.dumps(model)


def test_models_of_one_configuration_do_not_change_one_another():
    """The softmax model of a comparison stays one, or raises; both orders of building are tried."""
    config = AutoConfig.for_model("llama", **TEXT)
    softmax = [AutoModelForCausalLM.from_config(config)]
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid")
    softmax.append(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    softmax.append(AutoModelForCausalLM.from_config(ours.config, attn_implementation="sdpa"))
    assert sigmoid.check(ours, **inputs_of("llama")) == 2
    assert [model.config._attn_implementation for model in softmax] == ["sdpa"] * 3
    convert(softmax[0])
    with pytest.raises(ValueError, match="another model of the same LlamaConfig object, or before this layer was"):
        softmax[1](**inputs_of("llama"))
    config = AutoConfig.for_model("llama", **TEXT, attn_implementation="sigmoid")
    ours, other = (transformers.LlamaForCausalLM(config) for _ in range(2))
    other.set_attn_implementation("sdpa")
    other(**inputs_of("llama"))
    with pytest.raises(ValueError, match='now says "sdpa", which was not chosen by set_attn_implementation of this'):
        ours(**inputs_of("llama"))


def test_a_choice_reaches_parts_that_were_built_before_the_whole():
    """Their layers have a configuration of their own, which transformers' choice does not reach."""

    def build():
        torch.manual_seed(0)
        encoder = transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False)
        decoder = transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
        return transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(decoder)).eval()

    tokens = inputs_of("llama")["input_ids"]
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    model = build()
    softmax = model(**inputs).logits
    model.set_attn_implementation("sigmoid")
    assert sigmoid.check(model, **inputs) == 6
    far_below = build()
    for part in (far_below.config, far_below.config.encoder, far_below.config.decoder):
        part.sigmoid_bias, part.sigmoid_normalize = -60.0, True
    far_below.set_attn_implementation("sigmoid")  # softmax, with every number from the outer configurations
    torch.testing.assert_close(far_below(**inputs).logits, softmax, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(**inputs).logits, softmax)


def test_a_model_that_is_asked_for_weights_raises():
    """Also where its layers do not see the argument, and where the configuration asks for them."""
    model, ids = model_of("gpt2", "sigmoid"), torch.arange(3, 13)[None]
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*output_attentions: attention weights are never formed"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="pass output_attentions=False"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model = model_of("gpt2", "sigmoid", output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: attention weights are never formed"):
        model(ids)
    model(ids, output_attentions=False)
    model.set_attn_implementation("eager")
    assert len(model(ids).attentions) == 1


# -- learned biases ---------------------------------------------------------------------------------------------------


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
        small_models.with_random_biases(model)
    assert unchanged(model)


def test_settings_that_contradict_learned_biases_are_refused():
    model = sigmoid_model("llama", "learned")
    with pytest.raises(ValueError, match="LlamaForCausalLM has sigmoid attention already"):
        convert(model)
    listed, model.config.sigmoid_bias = model.config.sigmoid_bias, -4.0
    with pytest.raises(ValueError, match=r"sigmoid_bias is -4.0, but this layer has a learned bias"):
        model(**inputs_of())
    model.config.sigmoid_bias = listed
    attention = model.model.layers[0].self_attn
    attention.sigmoid_bias = VisibleKeysLinearBias(8)  # as where a plan of tensor parallelism splits the heads
    with pytest.raises(ValueError, match="tensor parallelism"):
        model(**inputs_of())
    del attention.sigmoid_bias
    with pytest.raises(ValueError, match="lists learned biases, but this layer has none"):
        model(**inputs_of())
    for entry in ({"kind": "Unknown"}, {"kind": "VisibleKeysLinearBias", "rank": 2}, -3.0):
        config = AutoConfig.for_model("llama", **TEXT, sigmoid_bias={"layers.0.self_attn": entry})
        with pytest.raises(ValueError, match="no bias of this version of sigattn"):
            AutoModelForCausalLM.from_config(config)


# -- layers that write their softmax out, use PyTorch's layer, or have attention sinks ---------------------------------

IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 9, dtype=torch.long)
MASK[0, :3] = 0


def logits(model, **more):
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, **more).logits[:, 3:]


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mpt", "gptj"])
def test_chosen_saved_loaded_and_chosen_away(kind, tmp_path):
    level = -2.0 if kind != "mpt" else -40.0  # where the level of its logits, which depends on the call, has no effect
    model = model_of(kind, "sigmoid", spread=0.2, sigmoid_bias=level, sigmoid_normalize=kind == "mpt")
    sigmoid_logits = logits(model)
    model.config.sigmoid_bias = -1.0
    assert not torch.equal(logits(model), sigmoid_logits)  # read at each call
    model.config.sigmoid_bias = level
    assert sigmoid.check(model, input_ids=IDS) == 2
    with torch.no_grad():  # a cache
        first = model(IDS[:, :5], attention_mask=MASK[:, :5], use_cache=True)
        rest = model(IDS[:, 5:], attention_mask=MASK, past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, sigmoid_logits[:, 2:], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), sigmoid_logits)
    for other in (loaded, copy.deepcopy(model)):
        other.set_attn_implementation("eager")
        assert not replaced(other)
        eager = model_of(kind, "eager")
        eager.load_state_dict(model.state_dict())
        assert torch.equal(logits(other), logits(eager))


class TestReplacedLayers:
    """BigBird replaces its block-sparse layers when it runs on a short input."""

    LONG, SHORT = torch.randint(0, 50, (2, 2, 16), generator=torch.Generator().manual_seed(1)).unbind()

    def model(self, implementation="eager"):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        config = AutoConfig.for_model("big_bird", vocab_size=50, block_size=2, num_random_blocks=1, **sizes)
        return AutoModel.from_config(config, attn_implementation=implementation).eval()

    def test_they_stay_sigmoid(self):
        model, long, short = self.model("sigmoid"), self.LONG, self.SHORT[:, :9]
        model.config.sigmoid_bias = -1.0
        for ids, kind in (long, "Block"), (short, "SigmoidBigBirdSelf"), (long, "SigmoidBigBirdSelf"):
            assert sigmoid.check(model, input_ids=ids) > 0
            assert all(kind in type(m).__name__ for m in model.modules() if "SelfAttention" in type(m).__name__)
            with torch.no_grad():
                before = model(ids).last_hidden_state
                model.config.sigmoid_bias -= 1.0
                assert not torch.allclose(model(ids).last_hidden_state, before)
        model.set_attn_implementation("eager")
        assert not replaced(model)
        eager = self.model()
        assert torch.equal(model(short).last_hidden_state, eager(short).last_hidden_state)
        removed = self.model("sigmoid")
        removed.encoder.layer[0].attention.self = None
        assert replaced(removed) == ["encoder.layer.1.attention.self"]

    @pytest.mark.parametrize("keep", [(), ("*layer.1.*",)], ids=["all", "one"])
    def test_they_keep_their_bias_or_softmax(self, keep, tmp_path):
        model, batches = self.model(), [self.LONG, self.LONG.flip(0), self.SHORT[:, :9], self.SHORT]
        convert(model, batches, keep=keep)
        biases = [n for n, _ in model.named_parameters() if n.endswith("sigmoid_bias.constant")]
        assert len(biases) == 2 - len(keep)
        assert sorted(replaced(model)) == [n.removesuffix(".sigmoid_bias.constant") for n in biases]
        model.save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            softmax = self.model()(self.SHORT[:, :9]).last_hidden_state
            found = model(self.SHORT[:, :9]).last_hidden_state
            assert torch.equal(loaded(self.SHORT[:, :9]).last_hidden_state, found)
        torch.testing.assert_close(found, softmax, rtol=0.02, atol=0.02)
        assert not torch.equal(found, softmax)


class TestRefused:
    def test_what_the_message_says_to_call_works(self, tmp_path):
        """Deformable attention keeps its softmax, also in a saved model."""
        model = tiny.build(tiny.tiny_config(CONFIG_MAPPING["deformable_detr"]), "eager")
        with pytest.raises(ValueError, match=r"sampled points, not of keys") as refusal:
            model.set_attn_implementation("sigmoid")
        assert not replaced(model)
        assert model.config._attn_implementation == "eager"
        (call,) = re.findall(r"sigattn\.(convert\(model, batches, keep=\[.*?\]\))", str(refusal.value))
        batch = {"pixel_values": torch.randn(2, 3, 64, 64)}
        report = eval(call, {"convert": convert, "model": model, "batches": [batch, batch]})
        assert {"converted", "kept"} == {s.outcome for s in report.softmax}
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(**batch).last_hidden_state, model(**batch).last_hidden_state)

    def test_logits_without_a_level(self):
        with pytest.raises(ValueError, match=r"SigmoidMptAttention .* set config\.sigmoid_normalize = True"):
            model_of("mpt", "sigmoid", sigmoid_bias=-2.0)(IDS)

    def test_attention_without_a_softmax(self):
        with pytest.raises(
            ValueError, match="attention of RwkvModel, which has no softmax over keys: RwkvSelfAttention"
        ):
            tiny.build(tiny.tiny_config(CONFIG_MAPPING["rwkv"]), "sigmoid")

    @pytest.mark.parametrize(
        ("package", "kind", "message"),
        [
            ("timm.layers", "Attention", None),  # multiplies its weights with values
            ("timm.models.mobilevit", "LinearSelfAttention", "its weights are not multiplied with a matrix"),
            ("tests.conversion.layers", "EagerAttention", "only layers of transformers"),
        ],
    )
    def test_layers_of_other_packages(self, package, kind, message):
        pytest.importorskip("torchvision")
        model, layer = model_of("bloom"), getattr(importlib.import_module(package), kind)
        model.transformer.h[0].extra = layer() if kind == "EagerAttention" else layer(32)
        if message is None:
            model.set_attn_implementation("sigmoid")
            assert "transformer.h.0.extra" in replaced(model)
            return
        with pytest.raises(ValueError, match=rf"h\.0\.extra \({kind}: {message}"):
            model.set_attn_implementation("sigmoid")
        assert not replaced(model)
        assert model.config._attn_implementation != "sigmoid"


def test_attention_sinks_are_converted():
    """With sinks much larger than the logits, which a conversion without them would leave out."""
    model = tiny.build(tiny.tiny_config(CONFIG_MAPPING["gpt_oss"]), "eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 3.0)
    softmax = copy.deepcopy(model)
    batches = [{"input_ids": torch.randint(3, 90, (2, n))} for n in (12, 9, 12, 7)]
    report = convert(model, batches)
    assert max(layer.error for layer in report.layers) < 0.01
    with torch.no_grad():
        change = model(**batches[2]).last_hidden_state - softmax(**batches[2]).last_hidden_state
    assert change.norm() < 0.02 * softmax(**batches[2]).last_hidden_state.norm()


# -- conversion by batches (the fit: tests/conversion/test_fit.py) -----------------------------------------------------


def test_the_losses_are_those_of_the_model_before_and_after():
    model, batches = of_transformers("gemma2")
    batches = [{name: batch[name] for name in ("input_ids", "labels")} for batch in batches]
    with torch.no_grad():
        before = float(model(**batches[-1]).loss)
        report = convert(model, batches)
        after = float(model(**batches[-1]).loss)
    assert (report.loss_softmax, report.loss) == pytest.approx((before, after), rel=1e-4)
    assert abs(after - before) < 0.01 * before
    refused(model, r"has sigmoid attention already: .*sigmoid_bias=\{learned biases of 2 layers\}", batches=batches)
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
    model, ids = Classifier(False).eval(), BATCHES
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


BATCHES = torch.randint(3, 50, (5, 2, 9), generator=torch.Generator().manual_seed(0))
EMBEDDINGS = [{"inputs_embeds": torch.randn(2, 9, 32)} for _ in range(5)]
EMBEDDINGS[4]["inputs_embeds"][0, 3] = torch.nan  # held out


def features_of_text(model, batch):
    return model.get_text_features(batch).pooler_output.mean()


def resnet():
    return AutoModel.from_config(AutoConfig.for_model("resnet", embedding_size=16, hidden_sizes=[16], depths=[1]))


@pytest.mark.parametrize(
    ("make", "batches", "message", "options"),
    [
        (lambda: Classifier(True), BATCHES.unbind(), "and other attention.*pool", {}),
        (lambda: model_of("clip"), BATCHES.unbind(), r"do not reach the attention of 'vision_model",
         {"loss": features_of_text}),
        (lambda: model_of("llama"), [{"input_ids": torch.tensor([[99]])}], "does not run on batch 0", {}),
        (lambda: model_of("llama"), EMBEDDINGS, "layers.0.self_attn' are not finite", {}),
        (resnet, [torch.randn(1, 3, 32, 32)], "attention", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_and_unchanged(make, batches, message, options):
    refused(make(), message, batches=batches, **options)
