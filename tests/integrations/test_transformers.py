"""attn_implementation="sigmoid" in tiny random models of transformers, against the formula in the same models."""

import copy
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    AttentionMaskInterface,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from sigattn.integrations import transformers as sigmoid  # noqa: E402
from sigattn.integrations.transformers.mask import is_plain_causal, sigmoid_mask  # noqa: E402
from tests.integrations.sizes import SMALL, TEXT, WHISPER  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
DECODERS = {"llama": TEXT, "gemma3_text": {**TEXT, "sliding_window": 6}}
OTHERS = {"bert": {**SMALL, "vocab_size": 50, "pad_token_id": 0}, "whisper": WHISPER}


def formula(module, query, key, value, attention_mask, scaling=None, is_causal=None, **_):
    """σ(scale · Q Kᵀ + b) V written out in float64, from what each query sees."""
    n, m = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = torch.ones(n, m, dtype=torch.bool)
    if attention_mask is not None:
        seen = attention_mask
    elif causal and n > 1:
        seen = torch.arange(m) <= torch.arange(n)[:, None]
    k, v = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).double() for t in (key, value))
    b = getattr(module.config, "sigmoid_bias", "log_visible")
    if b == "log_visible":
        b = -seen.sum(-1, keepdim=True).clamp(min=1).double().log()
    s = query.double() @ k.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5) + b
    out = (torch.sigmoid(s) * seen) @ v
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def registered():
    sigmoid.register()
    AttentionInterface.register("formula", formula)
    AttentionMaskInterface.register("formula", sdpa_mask)


def config_of(kind, **more):
    return AutoConfig.for_model(kind, **{**DECODERS, **OTHERS}[kind], **more)


def pair(kind, auto=AutoModelForCausalLM, **more):
    """The same model with ours and with the formula."""
    torch.manual_seed(0)
    config = config_of(kind, **more)
    ours = auto.from_config(copy.deepcopy(config), attn_implementation="sigmoid").eval()
    theirs = auto.from_config(copy.deepcopy(config), attn_implementation="formula").eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def inputs_of(kind):
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    return {
        "whisper": {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids},
        "bert": {"input_ids": ids, "attention_mask": mask.flip(1)},
    }.get(kind, {"input_ids": ids, "attention_mask": mask})


def output_of(model, inputs):
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize(("kind", "bias"), [("llama", None), ("gemma3_text", -2.5), ("bert", None), ("whisper", -2.5)])
def test_models(kind, bias):
    """Outputs and all gradients."""
    more = {} if bias is None else {"sigmoid_bias": bias}
    ours, theirs = pair(kind, AutoModelForCausalLM if kind in DECODERS else AutoModel, **more)
    inputs = inputs_of(kind)
    a, b = output_of(ours, inputs), output_of(theirs, inputs)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for out in (a, b):
        out.square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
            continue
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    next(ours.train().children()).eval()
    modes = [m.training for m in ours.modules()]
    assert sigmoid.check(ours, **inputs) >= 2
    assert [m.training for m in ours.modules()] == modes


def test_generation():
    """Dynamic, static and no cache and beams give what the formula gives, with windows and padded on the left."""
    ours, theirs = pair("gemma3_text")
    inputs = inputs_of("gemma3_text")
    common = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(**inputs, **common, use_cache=False)
    for how in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(ours.generate(**inputs, **common, **how), expected), how
    beams = {**common, "num_beams": 3}
    assert torch.equal(ours.generate(**inputs, **beams), theirs.generate(**inputs, **beams, use_cache=False))
    alone = {"input_ids": inputs["input_ids"][1:, 3:]}
    assert torch.equal(ours.generate(**alone, **common)[0], expected[1, 3:][: alone["input_ids"].shape[1] + 8])


def test_packed_positions():
    """Documents one after another in a row, marked by position_ids, do not see one another."""
    ours, _ = pair("llama")
    ids = torch.randint(3, 50, (1, 10))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([ours(ids[:, :4]).logits, ours(ids[:, 4:]).logits], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    ours, _ = pair("llama")
    inputs = {"input_ids": inputs_of("llama")["input_ids"], "use_cache": False}
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, ours(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_exported_and_traced_for_any_length():
    """Shared key heads and a window, at lengths within and beyond it."""

    class Layer(torch.nn.Module):
        def forward(self, query, key, padding):
            n = query.shape[2]
            window = {"mask_function": sliding_window_causal_mask_function(6), "local_size": 6}
            mask = sigmoid_mask(len(query), n, n, attention_mask=padding, allow_is_causal_skip=True, **window)
            return sigmoid.attention(self, query, key, key, mask, sliding_window=6)[0]

    def inputs(n):
        return torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8), torch.arange(n) >= torch.tensor([[0], [2]])

    n = torch.export.Dim("n", min=3, max=60)
    exported = torch.export.export(Layer(), inputs(9), dynamic_shapes=({2: n}, {2: n}, {1: n})).module()
    traced = torch.jit.trace(Layer(), inputs(9), check_trace=False)
    for length in (5, 30):
        operands = inputs(length)
        torch.testing.assert_close(exported(*operands), Layer()(*operands))
        torch.testing.assert_close(traced(*operands), Layer()(*operands))


def test_packed_with_sequence_lengths():
    """Sequences that only cu_seq_lens separates do not see one another, and each counts its own keys."""
    ours, _ = pair("llama")
    ids = torch.randint(3, 50, (1, 10))
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    positions = torch.arange(10)[None]
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
    packed = ours(ids, position_ids=positions, use_cache=False, **lengths).logits
    first = ours(ids[:, :4]).logits
    second = ours(ids[:, 4:], position_ids=positions[:, 4:]).logits
    torch.testing.assert_close(packed, torch.cat([first, second], 1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a batch of one row"):
        ours(ids.expand(2, 10), use_cache=False, **lengths)


class TestCompositeModels:
    """sigmoid_bias of the outermost configuration holds where a sub-configuration has none of its own."""

    def model(self, **biases):
        size = {**SMALL, "num_hidden_layers": 1}
        text = {**size, "vocab_size": 50, "max_position_embeddings": 32, "eos_token_id": 2}
        vision = {**size, "image_size": 16, "patch_size": 4}
        for part in (text, vision):
            part |= {"sigmoid_bias": biases.pop("text")} if part is text and "text" in biases else {}
        config = AutoConfig.for_model("clip", text_config=text, vision_config=vision, projection_dim=16, **biases)
        torch.manual_seed(0)
        return AutoModel.from_config(config, attn_implementation="sigmoid").eval()

    def outputs(self, model):
        torch.manual_seed(1)
        out = model(input_ids=torch.randint(3, 50, (2, 9)), pixel_values=torch.randn(2, 3, 16, 16))
        return out.text_embeds, out.image_embeds

    def test_inherited_unless_the_part_has_its_own(self):
        low, default, both = self.model(sigmoid_bias=-9.0), self.model(), self.model(text=-9.0)
        for a, b in zip(self.outputs(low), self.outputs(default), strict=True):
            assert not torch.equal(a, b)
        assert torch.equal(self.outputs(low)[0], self.outputs(both)[0])
        assert torch.equal(self.outputs(default)[1], self.outputs(both)[1])
        own = self.outputs(self.model(sigmoid_bias=-9.0, text=-2.0))
        assert not torch.equal(own[0], self.outputs(low)[0])
        assert torch.equal(own[1], self.outputs(low)[1])
        default.config.sigmoid_bias = -9.0  # read at each call
        for a, b in zip(self.outputs(low), self.outputs(default), strict=True):
            assert torch.equal(a, b)

    def test_saved_whole_and_in_part(self, tmp_path):
        model = self.model(sigmoid_bias=-9.0)
        model.text_model.save_pretrained(tmp_path / "part")
        part = type(model.text_model).from_pretrained(tmp_path / "part")
        ids = torch.randint(3, 50, (2, 9))
        torch.testing.assert_close(part(ids).last_hidden_state, model.text_model(ids).last_hidden_state)
        assert model.text_model.config.to_dict().get("sigmoid_bias") != -9.0  # only what was saved has the value
        model.save_pretrained(tmp_path / "whole")
        loaded = AutoModel.from_pretrained(tmp_path / "whole")
        for a, b in zip(self.outputs(model), self.outputs(loaded), strict=True):
            assert torch.equal(a, b)
        loaded.config.sigmoid_bias = -2.0  # the parts were saved without a value of their own
        assert not torch.equal(self.outputs(model)[0], self.outputs(loaded)[0])


MASKS = {
    "causal": {"q_length": 5, "kv_length": 5},
    "static cache": {"q_length": 5, "kv_length": 9},
    "padded": {"q_length": 5, "kv_length": 5, "attention_mask": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]},
    "not padded": {"q_length": 3, "kv_length": 3, "attention_mask": [[1, 1, 1], [1, 1, 1]]},
    "padding beyond": {"q_length": 3, "kv_length": 5, "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]},
    "short mask": {"q_length": 4, "kv_length": 4, "attention_mask": [[1, 1], [1, 1]]},
    "continued": {"q_length": 3, "kv_length": 7, "q_offset": 4},
    "one token": {"q_length": 1, "kv_length": 7, "q_offset": 6},
    "one token, static": {"q_length": 1, "kv_length": 9, "q_offset": 6},
    "one token, padded": {"q_length": 1, "kv_length": 3, "q_offset": 2, "attention_mask": [[0, 1, 1], [1, 1, 1]]},
    "one token, padded at an offset": {
        "q_length": 1,
        "kv_length": 3,
        "q_offset": 3,
        "kv_offset": 1,
        "attention_mask": [[1, 1, 0, 1], [1, 1, 1, 1]],
    },
    "one token, window": {"q_length": 1, "kv_length": 4, "q_offset": 9, "kv_offset": 6, "local_size": 4},
    "wide window": {"q_length": 5, "kv_length": 5, "local_size": 9},
    "narrow window": {"q_length": 5, "kv_length": 5, "local_size": 3},
    "unknown function": {"q_length": 5, "kv_length": 5, "allow_is_causal_skip": False},
}


class TestMask:
    """The mask function against transformers' own, which is asked never to leave a mask out."""

    @pytest.mark.parametrize("name", MASKS)
    def test_hides_the_same(self, name):
        case = {"allow_is_causal_skip": True, "batch_size": 2, **MASKS[name]}
        if "attention_mask" in case:
            case["attention_mask"] = torch.tensor(case["attention_mask"], dtype=torch.bool)
        if "local_size" in case:
            case["mask_function"] = sliding_window_causal_mask_function(case["local_size"])
        found = sigmoid_mask(**case)
        expected = sdpa_mask(**{**case, "allow_is_causal_skip": False})
        assert (found is None) == (name == "one token")
        assert found is None or torch.equal(found, expected)
        plain = torch.ones(case["q_length"], case["kv_length"], dtype=torch.bool).tril().expand_as(expected)
        assert not is_plain_causal(found) or torch.equal(expected, plain)
        assert is_plain_causal(found) == (
            name in ("causal", "static cache", "not padded", "padding beyond", "wide window")
        )

    def test_the_mark_is_lost(self):
        mask = sigmoid_mask(2, 4, 4, allow_is_causal_skip=True)
        assert is_plain_causal(mask)
        for derived in (mask[:, :, 1:], mask.clone(), mask & mask, mask.to(torch.float32)):
            assert not is_plain_causal(derived)
        single = sigmoid_mask(1, 4, 4, allow_is_causal_skip=True)
        single[..., 0] = False
        assert not is_plain_causal(single)

    def test_none_hides_nothing(self):
        """module.is_causal is wrong in models that do not support SDPA, and is not read."""
        q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
        module = torch.nn.Identity()
        module.is_causal = True
        out, _ = sigmoid.attention(module, q, k, v, None, scaling=1.0)
        expected = torch.sigmoid(q @ k.mT - math.log(5)) @ v
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)

    def test_causal_without_a_mask(self):
        q = torch.randn(1, 4, 5, 8)
        with pytest.raises(ValueError, match="is_causal=True without a mask"):
            sigmoid.attention(torch.nn.Identity(), q, q, q, None, is_causal=True)
        causal = sigmoid_mask(1, 5, 5, allow_is_causal_skip=True)
        found, _ = sigmoid.attention(torch.nn.Identity(), q, q, q, causal, is_causal=False)  # as Moonshine passes it
        expected, _ = sigmoid.attention(torch.nn.Identity(), q, q, q, causal.clone())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_a_decoder_as_encoder(self):
        """transformers' is_causal=False of a call, without and with padding."""
        ours, _ = pair("llama")
        ids, mask = inputs_of("llama").values()
        changed = ids.clone()
        changed[:, -1] = 3 + (ids[:, -1] - 2) % 40
        for more in ({}, {"attention_mask": mask}):
            a, b = (ours(i, is_causal=False, use_cache=False, **more).logits for i in (ids, changed))
            assert (a - b)[:, 3].abs().amax(-1).min() > 1e-4
            a, b = (ours(i, use_cache=False, **more).logits for i in (ids, changed))
            assert torch.equal(a[:, :8], b[:, :8])


class TestRefused:
    def test_parts_chosen_one_by_one(self):
        size = {**SMALL, "num_hidden_layers": 1}
        vision = {**size, "image_size": 16, "patch_size": 4}
        config = AutoConfig.for_model("siglip", text_config={**size, "vocab_size": 50}, vision_config=vision)
        choice = {"": "sigmoid", "text_config": "sigmoid", "vision_config": "eager"}
        model = AutoModel.from_config(config, attn_implementation=choice)
        assert model.vision_model.config._attn_implementation == "eager"
        assert model.text_model.config._attn_implementation == "sigmoid"

    def test_masks_of_integers(self):
        q = torch.randn(1, 4, 5, 8)
        with pytest.raises(ValueError, match=r"Identity.*boolean or floating point, got torch\.int64"):
            sigmoid.attention(torch.nn.Identity(), q, q, q, torch.ones(1, 1, 5, 5, dtype=torch.long))

    @pytest.mark.parametrize("name", ["block_indices", "cache", "never_heard_of"])
    def test_keywords_that_may_change_results(self, name):
        q = torch.randn(1, 4, 5, 8)
        with pytest.raises(ValueError, match=f"Identity.*{name}: "):
            sigmoid.attention(torch.nn.Identity(), q, q, q, None, **{name: torch.ones(1)})
        assert sigmoid.attention(torch.nn.Identity(), q, q, q, None, **{name: None})[0].shape == (1, 5, 4, 8)

    @pytest.mark.parametrize("bias", ["-log n", True, [1.0]], ids=str)
    def test_biases(self, bias):
        ours, _ = pair("llama", sigmoid_bias=bias)
        with pytest.raises(ValueError, match='sigmoid_bias must be a number or "log_visible"'):
            ours(inputs_of("llama")["input_ids"])

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"s_aux": torch.ones(4)}, r"s_aux: .* set config\.sigmoid_normalize = True"),
            ({"output_attentions": True}, "weights are never formed"),
            ({"sliding_window": 3}, "sliding_window=3 needs a mask"),
        ],
    )
    def test_what_has_no_meaning(self, kwargs, message):
        q = torch.randn(1, 4, 5, 8)
        with pytest.raises(ValueError, match=message):
            sigmoid.attention(torch.nn.Identity(), q, q, q, None, **kwargs)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_position_bias_and_a_mask(numbers):
    """A mask of booleans, as T5 has it, or of numbers, as switch_transformers."""
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    position, visible = torch.randn(1, 4, 5, 5), torch.rand(2, 1, 5, 5) > 0.3
    mask = torch.zeros(2, 1, 5, 5).masked_fill(~visible, torch.finfo(torch.float32).min) if numbers else visible
    out, _ = sigmoid.attention(torch.nn.Identity(), q, k, v, mask, scaling=1.0, position_bias=position)
    b = -visible.sum(-1, keepdim=True).clamp(min=1).log()
    expected = (torch.sigmoid(q @ k.mT + b + position) * visible) @ v
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
