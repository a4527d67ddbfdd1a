"""The public names of the packages: exports, help and lazy imports."""

import importlib
import inspect
import pydoc

import pytest
from torch import nn

import sigattn

PACKAGES = ["sigattn", "sigattn.models", "sigattn.nn"]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_complete_and_resolves(package):
    module = importlib.import_module(package)
    public = {n for n, v in vars(module).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public - set(module.__all__) <= {"Any", "import_module", "TYPE_CHECKING"}
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_help_shows_every_public_name_with_its_first_line(package):
    module = importlib.import_module(package)
    page = pydoc.render_doc(module, renderer=pydoc.plaintext)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            assert f"sigattn.{name} " in page or f"sigattn.{name}," in page, name
        elif callable(value):
            assert inspect.getdoc(value).splitlines()[0] in page, name


def test_an_unknown_name_of_the_package_raises():
    with pytest.raises(AttributeError, match="module 'sigattn' has no attribute 'attention'"):
        sigattn.attention  # noqa: B018


SHOWN = {
    "Attention(8, 2, activation='softmax', attention_bias=None, window=(3, 0))": "'softmax'; window=(3, 0)",
    "Attention(8, 4, num_kv_heads=2, activation='sigmoid', attention_bias=-1.0)": "num_kv_heads=2; ConstantBias(-1)",
    "Attention(8, 4, activation='sigmoid', attention_bias=-1.0)": "causal=True; (attention_bias)",
    "Alibi(2, 'split')": "num_heads=2; 'split'; steepness=4",
    "AlibiLinearBias(3)": "AlibiLinearBias(num_heads=3)",
    "AlibiQuadraticBias(2, 4, 3)": "num_heads=2; head_dim=4; query_dim=3",
    "Block(a, MLP(8, 16), 8, norm_placement='hybrid')": "norm_placement='hybrid'",
    "Cape(8, max_scale=3.0)": "8, step=0.03; max_scale=3",
    "ConformerBlock(a, 8, 16, init_values=0.5)": "(scales); init_values=0.5",
    "ConstantBias(-2.0)": "-2",
    "ContextLengthBias(2048)": "ContextLengthBias(-7.625)",
    "DropPath(0.25)": "DropPath(drop_prob=0.25)",
    "ImageCape(8, 2, 3)": "rows=2, columns=3; max_global_shift=0.5",
    "LayerScale(8, 0.1)": "LayerScale(8, init_values=0.1)",
    "LearnableBias(-3.0, 2)": "initial=-3, num_parameters=2",
    "LearnableEmbedding(5, 8)": "5, 8, std=0.02",
    "MLP(8, 16, activation='relu')": "activation='relu'",
    "PerformerFeatures(8, 3)": "head_dim=8, features=3",
    "QuadraticBias(2, 4, 3)": "num_heads=2; head_dim=4; query_dim=3",
    "QueryBias()": "initial=-5",
    "RotaryEmbedding(8)": "8, base=10000",
    "SinusoidalEmbedding(8)": "8, base=10000",
    "VisibleKeysLinearBias(3)": "num_heads=3",
}
WITHOUT_SETTINGS = {  # no settings, or all of them are shown by submodules, or by the class of PyTorch
    "AlibiKeysBias", "AttentionBias", "BatchLengthBias", "ConvolutionModule", "LayerNorm", "MaskedBatchNorm",
    "RMSNorm", "SampleLengthBias", "SigmoidMultiheadAttention", "SwiGLU", "VisibleKeysBias",
}  # fmt: skip


@pytest.mark.parametrize("code", SHOWN)
def test_printing_a_layer_shows_its_settings(code):
    names = vars(importlib.import_module("sigattn.nn"))
    a = names["Attention"](8, 2, activation="sigmoid", attention_bias=0.0)
    shown = repr(eval(code, dict(names), {"a": a}))
    assert all(text in shown for text in SHOWN[code].split("; ")), shown


def test_every_layer_is_tested_for_its_settings():
    values = {name: getattr(sigattn.nn, name) for name in sigattn.nn.__all__}
    layers = {n for n, v in values.items() if inspect.isclass(v) and issubclass(v, nn.Module)}
    assert layers == {code.partition("(")[0] for code in SHOWN} | WITHOUT_SETTINGS


def test_printing_a_converted_layer_shows_its_bias():
    layers = nn.TransformerEncoderLayer(8, 2), nn.TransformerEncoderLayer(8, 2)
    sigattn.convert(layers[0])
    sigattn.convert(layers[1], bias=-2.0)
    assert "8, num_heads=2, dropout=0.1, sigmoid_bias=None (-log of the visible keys)" in repr(layers[0].self_attn)
    assert "(sigmoid_bias): ConstantBias(-2)" in repr(layers[1])


def test_printing_a_model_shows_what_differs_from_the_defaults():
    models = sigattn.models
    config = models.LanguageModelConfig(num_layers=1, attention_bias=-2.0)
    assert "num_layers=1, attention_bias=-2.0\n" in repr(models.LanguageModel(config))
