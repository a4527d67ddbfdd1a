"""Adapters of peft on a converted model: trained with its biases, saved, and loaded on the saved model."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from sigattn.conversion import ConversionError, convert  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from sigattn.integrations.transformers.model import export  # noqa: E402
from sigattn.models import LanguageModel, LanguageModelConfig  # noqa: E402
from tests.integrations.small_models import model_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def test_a_model_with_an_adapter_is_refused_until_it_is_merged():
    adapted = peft.get_peft_model(model_of("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    batches = torch.randint(0, 50, (2, 2, 24)).unbind()
    name = r"model.layers.0.self_attn.q_proj is a Linear"
    for model, where in ((adapted, "it is a PeftModel"), (adapted.base_model.model, name)):
        with pytest.raises(ConversionError, match=f"has an adapter of peft \\({where}.*convert the base model"):
            convert(model, batches)
        with pytest.raises(ConversionError, match="has an adapter of peft"):  # whose base would be softmax when loaded
            convert(model)
    assert adapted.config._attn_implementation == "sdpa"
    prompt = peft.get_peft_model(
        model_of("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ConversionError, match="it is a PeftModelForCausalLM"):
        convert(prompt, batches)
    assert len(convert(adapted.merge_and_unload(), batches).layers) == 2


def test_trainable_tokens_of_an_exported_tied_model_are_merged(tmp_path):
    """The output, whose weights are the embedding's, has the trained tokens before and after."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_seq_len": 32, "num_layers": 1, "embed_dim": 32, "num_heads": 4}
    export(LanguageModel(LanguageModelConfig(**sizes)), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = peft.TrainableTokensConfig(task_type="CAUSAL_LM", target_modules=["embedding"], token_indices=[5, 6])
    adapted, ids = peft.get_peft_model(model, tokens), torch.tensor([[5, 6, 7, 5, 6]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    (delta,) = (p for p in adapted.parameters() if p.requires_grad)
    with torch.no_grad():
        delta += delta.grad.sign()
    before = adapted.eval()(input_ids=ids).logits
    torch.testing.assert_close(adapted.merge_and_unload()(input_ids=ids).logits, before)


def test_an_adapter_of_a_converted_model_is_trained_and_loaded(tmp_path):
    sigmoid.register()
    model = model_of("llama")
    ids = torch.randint(0, 50, (4, 2, 24), generator=torch.Generator().manual_seed(0))
    convert(model, [{"input_ids": part, "labels": part} for part in ids])
    model.save_pretrained(tmp_path / "base")
    before = {name: p.clone() for name, p in model.named_parameters()}

    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["sigmoid_bias"])
    adapted = peft.get_peft_model(model, adapter)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(3):
        adapted(input_ids=ids[0], labels=ids[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    trained = adapted(input_ids=ids[1]).logits
    adapted.save_pretrained(tmp_path / "adapter")

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for name, p in base.named_parameters():
        assert torch.equal(p, before[name])
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(input_ids=ids[1]).logits, trained)
    moved = [p for name, p in loaded.named_parameters() if "modules_to_save" in name and "sigmoid_bias" in name]
    first = {name: p for name, p in before.items() if "sigmoid_bias" in name}
    assert len(moved) == len(first)
    assert all((a != b).any() for a, b in zip(moved, first.values(), strict=True))


@pytest.mark.parametrize("is_converted_first", [True, False])
def test_adapters_of_multihead_attention(is_converted_first):
    """LoRA of ``nn.MultiheadAttention`` in PyTorch's encoder, whose fused layer would compute a softmax."""
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True), 2)
    if is_converted_first:
        convert(encoder, normalize=False)
    adapted = peft.get_peft_model(encoder, peft.LoraConfig(r=2, target_modules=["self_attn"])).eval()
    if not is_converted_first:
        convert(adapted, normalize=False)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    layer, x = encoder.layers[0].self_attn, torch.randn(3, 10, 32)
    with torch.no_grad():
        out = layer(x, x, x)[0]
        of_the_encoder = adapted(x)
        merged = adapted.merge_and_unload()
        query, key, value = merged.layers[0].self_attn.in_proj_weight.chunk(3)
        q, k, v = ((x @ w.T).unflatten(-1, (4, 8)).transpose(1, 2).double() for w in (query, key, value))
        weights = torch.sigmoid(q @ k.mT / 8**0.5 - math.log(10))
        expected = (weights @ v).transpose(1, 2).flatten(2).float() @ merged.layers[0].self_attn.out_proj.weight.T
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(merged(x), of_the_encoder, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(merged.requires_grad_()(x), of_the_encoder, atol=1e-4, rtol=1e-4)
