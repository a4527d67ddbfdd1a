"""Whole models through torch.onnx.export, run by onnxruntime at other batch sizes and lengths than traced."""

import math

import pytest
import torch
from torch import nn
from torch.export import Dim

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from sigattn import convert, sigmoid_attention  # noqa: E402
from sigattn.models.language import LanguageModel, LanguageModelConfig  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's exporter's own, and transformers'
]
DYNAMIC = {0: Dim("b", max=9), 1: Dim("n", min=2, max=60)}
LENGTHS = ((2, 20), (3, 7), (1, 60))


def assert_equal_in_onnx(model, inputs_of):
    """Compare the first output at each length."""
    first = inputs_of(*LENGTHS[0])
    shapes = dict.fromkeys(first, DYNAMIC)
    program = torch.onnx.export(model, kwargs=first, dynamic_shapes=shapes, dynamo=True, verbose=False)
    running = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in LENGTHS:
        inputs = inputs_of(*size)
        with torch.no_grad():
            expected = model(**inputs)
        expected = expected if isinstance(expected, torch.Tensor) else expected.logits
        out = torch.from_numpy(running.run(None, {name: t.numpy() for name, t in inputs.items()})[0])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_language_model():
    config = LanguageModelConfig(
        vocab_size=50, max_seq_len=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, position="alibi"
    )
    model = LanguageModel(config).eval()
    assert_equal_in_onnx(model, lambda b, n: {"tokens": torch.randint(50, (b, n))})


class Multihead(nn.Module):
    """``nn.MultiheadAttention`` and PyTorch's transformer, both of the same input."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        layer = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True, dropout=0.0)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x, padding):
        attended, weights = self.attention(x, x, x, padding)
        decoded = self.decoder(attended, x, memory_key_padding_mask=padding)
        return torch.cat([decoded, weights.sum(-1, keepdim=True)], -1)


def test_converted_multihead_attention_and_transformer():
    model = Multihead().eval()
    convert(model)

    def inputs_of(b, n):
        return {"x": torch.randn(b, n, 32), "padding": torch.arange(n).expand(b, n) > n // 2}

    assert_equal_in_onnx(model, inputs_of)


def test_llama():
    """Padded on the left, with the default bias, -log of the keys that each query sees."""
    transformers = pytest.importorskip("transformers")
    from sigattn.integrations import transformers as sigmoid

    sigmoid.register()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sigmoid").eval()

    def inputs_of(b, n):
        mask = torch.ones(b, n, dtype=torch.long)
        mask[-1, :2] = 0
        return {"input_ids": torch.randint(50, (b, n)), "attention_mask": mask}

    assert_equal_in_onnx(model, inputs_of)


def test_attention_of_transformers_without_a_mask():
    """The number of keys is not that of the traced call. (torch.export alone, because it decides this.)"""
    pytest.importorskip("transformers")
    from sigattn.integrations import transformers as sigmoid

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
