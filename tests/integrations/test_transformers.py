"""attn_implementation="sigmoid" in tiny random models of transformers, against the formula in the same models."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

from sigattn.integrations import transformers as sigmoid  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 64, "head_dim": 8, "num_key_value_heads": 2}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODERS = {
    "llama": TEXT,
    "qwen3": TEXT,
    "gemma3_text": {**TEXT, "sliding_window": 6, "layer_types": None},
    "olmo2": TEXT,
}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 50}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
WHISPER |= {"max_source_positions": 10, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1}
WHISPER |= {"eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
OTHERS = {
    "bert": {**SMALL, "vocab_size": 50, "pad_token_id": 0},
    "vit": {**SMALL, "image_size": 16, "patch_size": 4},
    "whisper": WHISPER,
}


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
    settings = {k: v for k, v in {**DECODERS, **OTHERS}[kind].items() if v is not None}
    return AutoConfig.for_model(kind, **settings, **more)


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
        "vit": {"pixel_values": torch.randn(2, 3, 16, 16)},
        "whisper": {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids},
        "bert": {"input_ids": ids, "attention_mask": mask.flip(1)},
    }.get(kind, {"input_ids": ids, "attention_mask": mask})


def output_of(model, inputs):
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("bias", [None, -2.5], ids=["log_visible", "number"])
@pytest.mark.parametrize("kind", [*DECODERS, *OTHERS])
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
    assert sigmoid.check(ours, **inputs) >= 2


@pytest.mark.parametrize("kind", DECODERS)
def test_generation(kind):
    """Dynamic, static and no cache and beams give what the formula gives, padded on the left."""
    ours, theirs = pair(kind)
    inputs = inputs_of(kind)
    common = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(**inputs, **common, use_cache=False)
    for how in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(ours.generate(**inputs, **common, **how), expected), how
    beams = {**common, "num_beams": 3}
    assert torch.equal(ours.generate(**inputs, **beams), theirs.generate(**inputs, **beams, use_cache=False))
    alone = {"input_ids": inputs["input_ids"][1:, 3:]}
    assert torch.equal(ours.generate(**alone, **common)[0], expected[1, 3:][: alone["input_ids"].shape[1] + 8])


def test_packed_positions():
    """Documents one after another in a row, told by position_ids, do not see one another."""
    ours, _ = pair("llama")
    ids = torch.randint(3, 50, (1, 10))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([ours(ids[:, :4]).logits, ours(ids[:, 4:]).logits], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_switched_and_compiled():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    ids = inputs_of("llama")["input_ids"]
    softmax = model(ids).logits
    with pytest.raises(
        ValueError, match=r"these layers of LlamaForCausalLM compute a softmax: model.layers.0.self_attn"
    ):
        sigmoid.check(model, input_ids=ids)
    model.set_attn_implementation("sigmoid")
    assert not torch.allclose(model(ids).logits, softmax)
    assert sigmoid.check(model, input_ids=ids) == 2


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    ours, _ = pair("llama")
    inputs = {"input_ids": inputs_of("llama")["input_ids"], "use_cache": False}
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, ours(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    ours, _ = pair("llama")
    rows = [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)}] * 16
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, gradient_checkpointing=True, logging_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=ours, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 1


class TestRefused:
    @pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
    def test_models_that_would_stay_softmax(self, kind):
        config = AutoConfig.for_model(kind, vocab_size=50, hidden_size=32, n_layer=1, n_head=2, num_attention_heads=2)
        with pytest.raises(
            ValueError, match=r"does not use transformers' attention interface.*silently stay a softmax"
        ):
            AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid")

    @pytest.mark.parametrize("bias", ["-log n", True, [1.0]], ids=str)
    def test_biases(self, bias):
        ours, _ = pair("llama", sigmoid_bias=bias)
        with pytest.raises(ValueError, match='sigmoid_bias must be a number or "log_visible"'):
            ours(inputs_of("llama")["input_ids"])

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [({"softcap": 30.0}, "a cap of logits"), ({"s_aux": torch.ones(4)}, "attention sinks")],
    )
    def test_what_has_no_meaning(self, kwargs, message):
        q = torch.randn(1, 4, 5, 8)
        with pytest.raises(ValueError, match=message):
            sigmoid.attention(torch.nn.Identity(), q, q, q, None, **kwargs)


def test_a_position_bias_is_added():
    """As T5 has them."""
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    position, mask = torch.randn(1, 4, 5, 5), torch.rand(2, 1, 5, 5) > 0.3
    out, _ = sigmoid.attention(torch.nn.Identity(), q, k, v, mask, scaling=1.0, position_bias=position)
    b = -mask.sum(-1, keepdim=True).clamp(min=1).log()
    expected = (torch.sigmoid(q @ k.mT + b + position) * mask) @ v
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
