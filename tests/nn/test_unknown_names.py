"""Unknown names and arguments of other types are refused with what there is."""

import importlib

import pytest
import torch

from sigattn import convert, nn

CASES = {
    'Attention(8, 2, activation="relu3", attention_bias=None)': "one of ('sigmoid', 'relu', 'relu2'",
    'Attention(8, 2, activation="softmax", attention_bias=None, qk_norm="batch")': '"rms" or "layer", got \'batch\'',
    'attention(position="rope")': "got 'rope'; instead of position='rope'",
    "attention(position=Alibi)": "a RotaryEmbedding, an Alibi or None",
    "attention(position=SinusoidalEmbedding(8))": "added to the input",
    "attention(attention_bias=True)": "must be a number or a module of sigattn.nn.bias, such as VisibleKeysBias()",
    'attention(attention_bias="log_visible")': "got 'log_visible'; make_bias creates the module of a rule's name",
    "attention(attention_bias=VisibleKeysBias)": "got <class 'sigattn.nn.bias.VisibleKeysBias'>",
    'convert(a, bias="x")': "convert: bias must be a number or a module",
    "ConstantBias('a')": "ConstantBias: value must be a number, got 'a' (str)",
    "LearnableBias(True)": "LearnableBias: initial must be a number, got True (bool)",
    "LanguageModelConfig(attention_bias=True)": "attention_bias must be a finite number, got True",
    "LanguageModelConfig(num_layers=True)": "num_layers must be a whole number, got True",
    "LanguageModelConfig(tie_embeddings='no')": "tie_embeddings must be True or False, got 'no'",
    "LanguageModelConfig(use_bias=None)": "use_bias must be True or False, got None",
    "attention(temperature='a')": "temperature must be a finite number, got 'a'",
    "attention(causal='no')": "causal must be True or False, got 'no'",
    "attention(dropout=1.0)": "dropout must lie in [0, 1), got 1.0",
    "attention(window=3)": "Attention: window must be a pair (left, right), got 3",
    "attention(window=(-2, 0))": "Attention: the sides of window must be at least 0, or -1 for unlimited, got (-2, 0)",
    "Attention(0, 2, activation='softmax', attention_bias=None)": "embed_dim must be at least 1, got 0",
    "Attention(8, True, activation='softmax', attention_bias=None)": "num_heads must be a whole number, got True",
    "Block(a, MLP(16, 8), 16)": "Block: attention must have embed_dim=16, got embed_dim=8",
    "Block(a, MLP(8, 8), 8, init_values=-1)": "init_values must be a finite number of at least 0, got -1",
    "Block(a, MLP(8, 8), 8, dropout=2)": "dropout must lie in [0, 1), got 2",
    'recommend("audio")': "domain must be one of vision, speech, language, got 'audio'",
    'recommend("vision", "ctc")': "one of ('supervised', 'byol', 'simclr', 'mae'), got 'ctc'",
    'recommend("language")': "needs sequence_length",
    'recommend("language", None, 0)': "at least 1, got 0",
    'recommend("language", sequence_length="4096")': "recommend: sequence_length must be an integer, got '4096'",
    'recommend("language", sequence_length=True)': "recommend: sequence_length must be an integer, got True",
    "m(torch.tensor([[3, 256]]))": "at least 0 and below vocab_size=256, got 3 … 256",
    "m(torch.tensor([[3, -1]]))": "at least 0 and below vocab_size=256, got -1 … 3",
    "m(torch.zeros(1, 257).long())": "257 tokens do not fit in a context of 256",
    "m.loss(torch.arange(5)[None], torch.arange(4)[None])": "loss: targets must be (batch, length) = (1, 5)",
    "m(torch.ones(1, 4).long(), cache=m.new_kv_cache(), documents=one)": "causal self-attention of whole rows",
    "m.generate(torch.ones(1, 0).long(), 1)": "generate needs prompts of at least one token",
    "m.generate(torch.ones(1, 1).long(), 1, stop_tokens=[256])": "of the vocabulary, 0 … 255, got 256",
    "TrainConfig(seed=2**32)": "seed must be below 2^32, got 4294967296",
    "m(torch.arange(5))": "LanguageModel: tokens must be (batch, length); got tokens (5,) int64 on cpu",
    "m(torch.rand(1, 5))": "LanguageModel: tokens must be a tensor of integers, got (1, 5) float32 on cpu",
    "m.generate(['abc'], 5)": "generate: prompts[0] must be a tensor of integers, got str",
    "m.generate(torch.arange(5), 5)": "generate: prompts must be (batch, length), or a list of (length,); got",
    "m.generate([torch.arange(5)], 1.5)": "generate: max_new_tokens must be an integer, got 1.5",
    "m.generate([torch.arange(5)], True)": "generate: max_new_tokens must be an integer, got True",
    "m.generate([torch.arange(5)], 1, stop_tokens=10)": "stop_tokens must be a sequence of tokens, such as [0], got 10",
    'convert(m, [torch.zeros(1, 4).long()], loss="ce")': "convert: loss must be a function of model and batch",
    'make_bias("log_n", num_heads=2)': "'log_batch', 'log_sample', 'log_visible', 'log_alibi'), got 'log_n'",
    'make_bias(0.0, learn="token", num_heads=2)': "'head', 'query'), got 'token'",
    'Block(a, MLP(8, 8), 8, norm_placement="both")': "('pre', 'post', 'hybrid', 'hybrid_attention'), got 'both'",
    'make_feed_forward("glu", 8, 8)': "one of gelu, relu, swish, got 'glu'",
    'initialize(a, "xavier")': "one of fan_in, trunc_normal, moco_v3, got 'xavier'",
    'LanguageModel(LanguageModelConfig(position="cape"))': "'rope', 'alibi', 'sincos', 'none', got 'cape'",
    'ViTConfig(pool="mean")': "pool must be one of cls, average, got 'mean'",
    'transforms("autoaugment", 8)': "augmentation must be one of none, crop, randaugment, simclr, multicrop, got 'auto",
    'TrainConfig(precision="bf16")': "precision must be one of float32, bfloat16, got 'bf16'",
    'ViT(ViTConfig(position="rope"))': '"learnable", "sincos", "cape" or "none"',
    'SpeechModel(SpeechModelConfig(position="learnable"))': "'cape', 'rope', 'alibi', 'sincos', 'none', got ",
    'SpeechModel(SpeechModelConfig(block_kind="cnn"))': '"transformer" or "conformer", got \'cnn\'',
    "SpeechModel(SpeechModelConfig(num_layers=1))(torch.zeros(2, 9, 80), torch.tensor([1, 2, 3]))": "= (2,), got (3,)",
    'make_bias("log_context", num_heads=2)': "longest sequence",
    'make_bias("log_batch", learn="layer", num_heads=2)': "needs attention_bias to be a number",
    'make_bias("log_alibi", learn="layer", num_heads=2)': "got 'log_alibi' with learn='layer'",
    'make_bias("log_alibi", learn="head", num_heads=2)': "got 'log_alibi' with learn='head'",
    'Attention(8, 2, activation="sigmoid", attention_bias=AlibiKeysBias())': "needs position=Alibi",
    "SampleLengthBias()(5, 7, device=None)": "pass key_lengths",
    "AlibiKeysBias()(3, 3, device=None)": "pass visible",
    "VisibleKeysLinearBias(2)(3, 3, device=None)": "pass visible",
    "AttentionBias()(5, 7, device=None)": "is abstract",
    "evaluate_bias(AlibiKeysBias(), *torch.randn(2, 2, 4, 9, 4), normalize=False)": "for sigattn.nn.Attention only",
    'Attention(8, 2, activation="sigmoid", attention_bias=LearnableBias(-1.0, 2)).shard_heads(0, 2)': "for each head",
    "RotaryEmbedding(7)": "even, got 7",
    "alibi_slopes(0)": "heads must be at least 1",
    "Alibi(2, 'both')": "Alibi",
    "Alibi(1, 'split')": "Alibi",
    "SinusoidalEmbedding(3)": "even",
    "LearnableEmbedding(5, 4)(torch.zeros(1, 4, 4), 2)": "5 positions, and the input ends at 6",
    "DropPath(1.0)": "[0, 1)",
    "ConvolutionModule(8, 4)": "odd, got 4",
    "Cape(7)": "even, got 7",
    "ImageSinusoids(6, 2, 2)": "embed_dim=6",
    "Cape(8, max_global_shift=-1.0)": "max_scale at least 1",
    "Cape(8, max_local_shift=0.6)": "max_scale at least 1",
    "Cape(8, max_scale=0.5)": "max_scale at least 1",
    "ImageCape(8, 2, 2, max_scale=0.5)": "max_scale at least 1",
    "attention(causal=False)(torch.zeros(1, 3, 8), cache=KVCache(4))": "a cache needs causal=True",
    "attention()(torch.zeros(1, 3, 8), cache=KVCache(4))": "no gradient",
    "frozen(torch.zeros(1, 3, 8), cache=holds_three)": "the cache has 4 positions and holds 3: 3 more do not fit",
    "frozen(torch.zeros(2, 1, 8), cache=holds_three)": "a batch of 1, got a batch of 2",
    "by_sample(torch.zeros(1, 4, 8), documents=one)": "SampleLengthBias differs between rows",
    "across(torch.zeros(2, 3, 9), torch.zeros(2, 3, 5))": "x must be (batch, length, 8), got (2, 3, 9)",
    "across(torch.zeros(3, 8))": "x must be (batch, length, 8), got (3, 8)",
    "across(torch.zeros(2, 3, 8))": "kv_input must be (batch, length, 5), got (2, 3, 8)",
    'Attention(8, 4, activation="sigmoid", attention_bias=None)': "needs a bias",
    "attention(attention_bias=-1.0)": "is normalised and takes only",
    'attention(activation="performer", length_power=1.0)': "is normalised and takes only",
    'attention(activation="performer", window=(3, 0), causal=False)': "has no explicit weights",
    'attention(activation="performer", position=Alibi(2), causal=False)': "has no explicit weights",
    "attention(position=RotaryEmbedding(8))": "RotaryEmbedding(4), got RotaryEmbedding(8",
    "attention(position=Alibi(4))": "Alibi(2), got Alibi(num_heads=4",
    'Attention(10, 4, activation="softmax", attention_bias=None)': "embed_dim=10, num_heads=4",
    'Attention(8, 4, num_kv_heads=3, activation="softmax", attention_bias=None)': "heads=4, num_kv_heads=3",
    'attention(activation="sigmoid", attention_bias=AlibiKeysBias())': "AlibiKeysBias counts keys",
    "ViT(ViTConfig(num_layers=1))(torch.zeros(2, 1, 224, 224))": "(batch, 3, 224, 224), got (2, 1, 224, 224)",
    "ViT(ViTConfig(image_size=9, patch_size=4))": "multiple of patch_size, got 9 and 4",
    "SpeechModel(SpeechModelConfig(block_kind='conformer', norm_placement='post'))": "support ['norm_placement']",
    "build(3)": "int is not the configuration of a model",
}
MODULES = ("nn.attention", "nn.bias", "nn.bias_rules", "nn.block", "nn.cape", "nn.conformer", "nn.feedforward",
           "nn.guide", "nn.initialization", "nn.position", "nn.residual_branch", "nn.visible_keys",
           "models.language", "models.speech", "models.vision", "models.saving", "data.images",
           "train.config")  # fmt: skip


@pytest.fixture(scope="module")
def names():
    found = {"torch": torch, "convert": convert, "KVCache": nn.KVCache}
    for module in MODULES:
        found.update(vars(importlib.import_module(f"sigattn.{module}")))

    def attention(**options):
        return found["Attention"](8, 2, **{"activation": "softmax", "attention_bias": None, **options})

    frozen, holds_three = attention().requires_grad_(False), nn.KVCache(4)
    frozen(torch.zeros(1, 3, 8), cache=holds_three)
    return found | {
        "attention": attention, "across": attention(kv_embed_dim=5), "a": attention(), "frozen": frozen,
        "by_sample": attention(activation="sigmoid", attention_bias=nn.SampleLengthBias()),
        "m": found["LanguageModel"](found["LanguageModelConfig"](num_layers=1)), "holds_three": holds_three,
        "one": nn.Documents.from_end_token(torch.ones(1, 4).long(), 0),
    }  # fmt: skip


@pytest.mark.parametrize("call", CASES)
@pytest.mark.usefixtures("unchecked")
def test_the_message_names_what_there_is(call, names):
    with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)) as error:
        eval(call, dict(names))
    assert CASES[call] in str(error.value)
