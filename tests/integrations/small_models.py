"""Small models of transformers, and their inputs."""

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sigattn.conversion.transformers import TransformersAdapter
from sigattn.integrations.transformers.configured import Configured
from sigattn.nn.bias import VisibleKeysLinearBias

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 64, "head_dim": 8, "num_key_value_heads": 2}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 50}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0}
BART |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
PART = {**SMALL, "num_hidden_layers": 1}
IMAGE = {**PART, "image_size": 16, "patch_size": 4}
CLIP_TEXT = {**PART, "vocab_size": 50, "max_position_embeddings": 32, "eos_token_id": 2}
CLIP = {"text_config": CLIP_TEXT, "vision_config": IMAGE, "projection_dim": 16}
VISION = {**IMAGE, "vision_use_head": False}
GEMMA3 = {"text_config": {**TEXT, "sliding_window": 4}, "vision_config": VISION, "mm_tokens_per_image": 4}
GEMMA3 |= {"image_token_index": 49, "boi_token_index": 47, "eoi_token_index": 48}
MODULE = {**TEXT, "attn_logit_softcapping": None}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "pad_token_id": 0}
WRITTEN = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "num_hidden_layers": 2, "n_head": 4, "pad_token_id": 0}
WRITTEN |= {"num_attention_heads": 4}
SIZES = {
    "llama": TEXT,
    "gemma3_text": {**TEXT, "sliding_window": 6},  # grouped heads, windows
    "bert": {**SMALL, "vocab_size": 50, "pad_token_id": 0},
    "bart": {**BART, "max_position_embeddings": 64, "forced_eos_token_id": None},
    "clip": CLIP,
    "gemma2": {**TEXT, "sliding_window": 6, "attn_logit_softcapping": 0.5},  # windows, and logits that are capped
    "gemma3": GEMMA3,  # composite
    "t5": {**T5, "decoder_start_token_id": 0},  # position biases, and cross-attention
    "t5gemma": {"encoder": MODULE, "decoder": MODULE, "vocab_size": 50},
    # layers that write their softmax out
    **dict.fromkeys(("bloom", "falcon", "mpt"), WRITTEN), "gptj": {**WRITTEN, "rotary_dim": 4},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50},
}  # fmt: skip
DECODERS = ("llama", "gemma2", "gemma3_text", "bloom", "falcon", "mpt", "gptj", "gpt2")
AUTO = dict.fromkeys(DECODERS, AutoModelForCausalLM)
AUTO |= dict.fromkeys(("bart", "t5", "t5gemma"), transformers.AutoModelForSeq2SeqLM)
AUTO["gemma3"] = transformers.AutoModelForImageTextToText


def model_of(kind="llama", implementation=None, *, auto=None, spread=0.0, **more):
    """Return a model; ``spread`` is the standard deviation of what is added to its weights, so that layers matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES[kind], **more})
    auto = auto or AUTO.get(kind, AutoModel)
    model = auto.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters() if spread else ():
            parameter.add_(spread * torch.randn_like(parameter))
    return model


def with_random_biases(model):
    """Give every attention layer of a softmax model a learned bias."""
    adapter = TransformersAdapter(model, None)
    biases = {name: VisibleKeysLinearBias(4) for name in adapter.layers()}
    adapter.swap(biases, normalize=True)
    for bias in biases.values():
        torch.nn.init.normal_(bias.constant, std=0.3)
        torch.nn.init.normal_(bias.slope, -0.7, 0.2)
    return model


def sigmoid_model(kind, bias="log_visible", **more):
    """Return a model with sigmoid attention and a bias: a number, "log_visible", or "learned"."""
    if bias == "learned":
        return with_random_biases(model_of(kind, **more))
    return model_of(kind, "sigmoid", **({} if bias == "log_visible" else {"sigmoid_bias": bias}), **more)


def replaced(model):
    """Return the names of the layers that write their softmax out, and now compute sigmoid attention."""
    return [name for name, m in model.named_modules() if isinstance(m, Configured)]


def inputs_of(kind="llama"):
    """Return inputs whose second sample is padded, on the side that the model has."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 47, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    if kind == "clip":
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    if kind == "gemma3":
        ids[:, 1:5] = 49  # an image
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": (ids == 49).long()}
    more = {"decoder_input_ids": ids[:, :7]} if kind == "t5gemma" else {}
    return {"input_ids": ids, "attention_mask": mask if kind in DECODERS else mask.flip(1), **more}
