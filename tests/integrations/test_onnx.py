"""Converted models through torch.onnx.export, run by onnxruntime at other batch sizes and lengths than traced.

``examples/export_model.py`` exports a language model.
"""

import math

import pytest
import torch
from torch import nn
from torch.export import Dim

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
transformers = pytest.importorskip("transformers")

from sigattn import convert, sigmoid_attention  # noqa: E402
from sigattn.integrations import transformers as sigmoid  # noqa: E402
from tests.integrations.small_models import model_of  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's exporter's own, and transformers'
]


def assert_equal_in_onnx(model, inputs_of):
    """Compare the first output at each length."""
    first = inputs_of(2, 20)
    shapes = {name: {0: Dim("b", max=9), 1: Dim("n", min=2, max=60)} for name in first}
    program = torch.onnx.export(model, kwargs=first, dynamic_shapes=shapes, dynamo=True, verbose=False)
    running = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in ((3, 7), (1, 60)):
        inputs = inputs_of(*size)
        with torch.no_grad():
            expected = model(**inputs)
        expected = expected if isinstance(expected, torch.Tensor) else expected.logits
        out = torch.from_numpy(running.run(None, {name: t.numpy() for name, t in inputs.items()})[0])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


class Multihead(nn.Module):
    """``nn.MultiheadAttention`` with its weights."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, padding):
        attended, weights = self.attention(x, x, x, padding)
        return torch.cat([attended, weights.sum(-1, keepdim=True)], -1)


def test_converted_multihead_attention():
    model = Multihead().eval()
    convert(model)
    assert_equal_in_onnx(
        model, lambda b, n: {"x": torch.randn(b, n, 32), "padding": torch.arange(n).expand(b, n) > n // 2}
    )


def test_llama():
    """Padded on the left, with the default bias, -log of the keys that each query sees."""
    model = model_of("llama", "sigmoid", use_cache=False, num_hidden_layers=1)

    def inputs_of(b, n):
        mask = torch.ones(b, n, dtype=torch.long)
        mask[-1, :2] = 0
        return {"input_ids": torch.randint(50, (b, n)), "attention_mask": mask}

    assert_equal_in_onnx(model, inputs_of)


def test_attention_of_transformers_without_a_mask():
    """The number of keys is not that of the traced call. (torch.export alone, because it decides this.)"""

    class Layer(torch.nn.Module):
        def forward(self, query, key):
            return sigmoid.attention(self, query, key, key, None, is_causal=False)[0]

    def operands(n, m):
        return torch.randn(2, 4, n, 8), torch.randn(2, 4, m, 8)

    shapes = ({2: Dim("n", max=99)}, {2: Dim("m", max=99)})
    exported = torch.export.export(Layer(), operands(7, 9), dynamic_shapes=shapes).module()
    query, key = operands(5, 30)
    expected = sigmoid_attention(query, key, key, bias=-math.log(30)).transpose(1, 2)
    torch.testing.assert_close(exported(query, key), expected)
