"""Models of transformers whose layers write their softmax out, use PyTorch's layer, or have attention sinks."""

import copy
import re

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sigattn import convert
from sigattn.integrations import transformers as sigmoid
from sigattn.integrations.transformers.configured import CONFIGURED
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


@pytest.mark.parametrize("normalize", [False, True])
def test_a_softmax_with_a_backward_pass_of_its_own(normalize, tmp_path, monkeypatch):
    """That of SEW-D, compared with the formula of its own logits in float64."""
    modeling = pytest.importorskip("transformers.models.sew_d.modeling_sew_d")
    config = tiny.tiny_config(CONFIG_MAPPING["sew-d"], sigmoid_bias=-2.0, sigmoid_normalize=normalize)
    model = tiny.build(config, "sigmoid")
    model.save_pretrained(tmp_path)
    layer = next(m for m in AutoModel.from_pretrained(tmp_path).modules() if isinstance(m, CONFIGURED))
    reference = copy.deepcopy(next(m for m in model.modules() if isinstance(m, CONFIGURED))).double()
    reference.__class__ = modeling.DisentangledSelfAttention
    x, mask = torch.randn(2, 9, config.hidden_size), MASK[:, None, None] * MASK[:, None, :, None]
    positions = {"rel_embeddings": torch.randn(2 * reference.pos_ebd_size, config.hidden_size)}
    found = layer(x, mask, **positions)
    torch.manual_seed(1)
    with torch.no_grad():
        layer.query_proj.weight.mul_(20)  # logits of several nats
        reference.load_state_dict(layer.state_dict())

    class Formula:
        @staticmethod
        def apply(logits, mask, _):
            weights = torch.where(mask.bool(), (logits - 2).sigmoid(), 0)
            return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) if normalize else weights

    found = layer(x, mask, **positions)
    monkeypatch.setattr(modeling, "XSoftmax", Formula)
    expected = reference(x.double(), mask, **{n: t.double() for n, t in positions.items()})
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    if isinstance(found, tuple):  # the oldest transformers that is supported returns the output alone
        assert not found[1][~mask.bool().expand_as(found[1])].any()
    grads, truth = (
        torch.autograd.grad(out[0].square().sum(), [*m.parameters()])
        for out, m in ((found, layer), (expected, reference))
    )
    for ours, theirs in zip(grads, truth, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_the_softmax_of_a_convolution_s_kernel_stays():
    """ConvBERT's: attention is sigmoid attention, and half of a layer's width does not depend on it."""
    model = tiny.build(tiny.tiny_config(CONFIG_MAPPING["convbert"]), "eager")
    softmax = copy.deepcopy(model)
    model.set_attn_implementation("sigmoid")
    model.config.sigmoid_bias = -1.0
    assert sigmoid.check(model, input_ids=IDS) == len(replaced(model)) == 2
    x, layer = torch.randn(2, 9, model.config.hidden_size), softmax.encoder.layer[0].attention.self
    query, key, value = (
        linear(x).unflatten(-1, (-1, layer.attention_head_size)).transpose(1, 2)
        for linear in (layer.query, layer.key, layer.value)
    )
    weights = (query @ key.mT / layer.attention_head_size**0.5 - 1).sigmoid()
    found, kept = (m.encoder.layer[0].attention.self(x)[0].chunk(2, -1) for m in (model, softmax))
    torch.testing.assert_close(found[0], (weights @ value).transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1], kept[1])
    with pytest.raises(ValueError, match="compute a softmax"):
        sigmoid.check(softmax, input_ids=IDS)


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

    def test_layers_of_other_packages_are_not_known(self):
        class OtherAttention(torch.nn.Module):
            def forward(self, x):
                return (x @ x.mT).softmax(-1) @ x

        model = model_of("bloom")
        model.transformer.h[0].extra = OtherAttention()
        with pytest.raises(ValueError, match=r"h\.0\.extra \(OtherAttention: only layers of transformers"):
            model.set_attn_implementation("sigmoid")
        assert not replaced(model)
        assert model.config._attn_implementation != "sigmoid"

    def test_layers_of_timm(self):
        """Those which multiply their weights with values are known, linear attention is not."""
        pytest.importorskip("torchvision")
        from timm.layers import Attention
        from timm.models.mobilevit import LinearSelfAttention

        model = model_of("bloom")
        model.transformer.h[0].extra = Attention(32)
        model.set_attn_implementation("sigmoid")
        assert "transformer.h.0.extra" in replaced(model)
        model = model_of("bloom")
        model.transformer.h[0].extra = LinearSelfAttention(32)
        with pytest.raises(ValueError, match="LinearSelfAttention: its weights are not multiplied with a matrix"):
            model.set_attn_implementation("sigmoid")


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
