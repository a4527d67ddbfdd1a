"""Models of transformers whose layers write their softmax out, use PyTorch's layer, or have attention sinks."""

import copy
import importlib
import re

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sigattn import convert
from sigattn.integrations import transformers as sigmoid
from tests.integrations import tiny_transformers as tiny
from tests.integrations.small_models import model_of, replaced

pytestmark = pytest.mark.filterwarnings("ignore")
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
