"""torch.fx.symbolic_trace of calls of the operator, which are recorded, and of layers, which become one node."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from sigattn import convert, sigmoid_attention
from sigattn.nn import Attention

pytestmark = pytest.mark.usefixtures("unchecked")


class Heads(nn.Module):
    def __init__(self, function=F.scaled_dot_product_attention, **options):
        super().__init__()
        self.projection, self.function, self.options = nn.Linear(16, 48), function, options

    def forward(self, x):
        query, key, value = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.function(query, key, value, is_causal=True, **self.options).transpose(1, 2).flatten(2)


def converted(module):
    model = nn.Sequential(nn.Linear(16, 16), module)
    convert(model)
    return model


MODULES = {
    "operator": Heads(sigmoid_attention, normalize=True, bias=-2.0),
    "converted layer": converted(Heads()),
    "converted encoder": converted(nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)),
    "Attention": nn.Sequential(Attention(16, 2, activation="sigmoid", attention_bias=-2.0, causal=True)),
}


@pytest.mark.parametrize("name", MODULES)
def test_symbolic_trace(name):
    module = copy.deepcopy(MODULES[name]).eval()
    traced = fx.symbolic_trace(module)
    for length in (5, 9):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(traced(x), module(x))


def test_features_of_a_converted_model_of_torchvision():
    models = pytest.importorskip("torchvision.models")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5).eval()
    convert(model)
    name, x, expected = "encoder.layers.encoder_layer_1.mlp", torch.randn(2, 3, 32, 32), []
    with model.get_submodule(name).register_forward_hook(lambda *call: expected.append(call[2])):
        model(x)
    features = extraction.create_feature_extractor(model, {name: "last"})(x)
    torch.testing.assert_close(features["last"], expected[0])


@pytest.mark.parametrize("layer", [MODULES["converted layer"][1], MODULES["Attention"][0]], ids=type)
def test_a_layer_alone_is_refused(layer):
    with pytest.raises(TypeError, match=r"is one node for torch\.fx: trace a module that contains it"):
        fx.symbolic_trace(layer)
